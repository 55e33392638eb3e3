"""Counts this machine's accelerators without torch, which the driver must not import.

DeepSpeed decides which accelerator a rank uses; the count only decides how many ranks to launch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from itertools import takewhile

from trial_core.errors import LaunchError

CPU_SLOTS = 2

CPU_SLOTS_PER_CORE = 4
"""More rank processes than this per core only take each other's time and memory."""

MIN_CPU_SLOT_LIMIT = 8
"""Small machines may also test a larger topology."""


def count_accelerators(environment: Mapping[str, str] = os.environ) -> int:
    """How many accelerators the ranks would see; 0 means CPU ranks."""
    return len(visible_accelerators(environment)[1])


def visible_accelerators(environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """The accelerators that the ranks would see, and the variable that selects them.

    With ``DS_ACCELERATOR=cpu``, DeepSpeed's switch, there are none. ``CUDA_VISIBLE_DEVICES`` and
    ``HIP_VISIBLE_DEVICES`` are respected.
    """
    if environment.get("DS_ACCELERATOR") != "cpu":
        for tool, variable in (
            (("nvidia-smi", "--list-gpus"), "CUDA_VISIBLE_DEVICES"),
            (("rocm-smi", "--showid", "--csv"), "HIP_VISIBLE_DEVICES"),
        ):
            present = _count_lines(tool)
            if present:
                chosen = environment.get(variable)
                indices = [str(index) for index in range(present)]
                return variable, indices if chosen is None else _visible(chosen, present)
    return "", []


def resolve_slot_count(requested: int | str, environment: Mapping[str, str] = os.environ) -> int:
    """The number of ranks to start on this machine for `resources.slots_per_trial`.

    ``"auto"`` is one per accelerator, or two CPU ranks without accelerators.

    Raises:
        LaunchError: there are fewer accelerators than requested slots; or there are none, and too
            few cores.
    """
    accelerators = count_accelerators(environment)
    if not isinstance(requested, int):
        return accelerators or CPU_SLOTS
    if accelerators and requested > accelerators:
        raise LaunchError(
            f"resources.slots_per_trial is {requested}, but this machine has {accelerators} "
            f"accelerator{'s' if accelerators != 1 else ''}; ask for at most {accelerators} "
            '(or "auto"), or set DS_ACCELERATOR=cpu to train on CPU ranks'
        )
    cores = os.cpu_count() or 1
    limit = max(CPU_SLOTS_PER_CORE * cores, MIN_CPU_SLOT_LIMIT)
    if not accelerators and requested > limit:
        raise LaunchError(
            f"resources.slots_per_trial is {requested}, but this machine has no accelerator and "
            f"{cores} core{'s' if cores != 1 else ''}: each slot would be a process on a CPU; ask "
            f'for at most {limit} (or "auto")'
        )
    return requested


def _visible(devices: str, present: int) -> list[str]:
    """The visible devices of a list: those before the first one that does not exist."""
    entries = (entry.strip() for entry in devices.split(","))
    return list(takewhile(lambda entry: _may_exist(entry, present), entries))[:present]


def _may_exist(device: str, present: int) -> bool:
    """Whether `device` is an index below `present`, or a device's UUID."""
    if device.isdecimal():
        return int(device) < present
    return device.startswith(("GPU-", "MIG-"))


def _count_lines(command: tuple[str, ...]) -> int:
    if shutil.which(command[0]) is None:
        return 0
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    if found.returncode != 0:
        return 0
    return sum(1 for line in found.stdout.splitlines() if line.lower().startswith(("gpu", "card")))
