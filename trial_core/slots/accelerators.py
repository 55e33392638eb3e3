"""How many accelerators this machine has, asked without torch: the driver must not import it.

DeepSpeed's own accelerator abstraction decides what a rank runs on; this only counts, so that a
slot group of the right size is launched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from itertools import takewhile

from trial_core.errors import LaunchError

CPU_SLOTS = 2


def count_accelerators(environment: Mapping[str, str] = os.environ) -> int:
    """The accelerators that ranks started from here would see; 0 means CPU ranks."""
    return len(visible_accelerators(environment)[1])


def visible_accelerators(environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """The variable that chooses among this machine's accelerators, and its entries: those that
    ranks started from here would see.

    ``DS_ACCELERATOR=cpu`` (DeepSpeed's own switch) means none. ``CUDA_VISIBLE_DEVICES`` and
    ``HIP_VISIBLE_DEVICES`` narrow what the driver's tools report, as they do for the ranks.
    """
    if environment.get("DS_ACCELERATOR") != "cpu":
        for tool, variable in (
            (("nvidia-smi", "--list-gpus"), "CUDA_VISIBLE_DEVICES"),
            (("rocm-smi", "--showid", "--csv"), "HIP_VISIBLE_DEVICES"),
        ):
            present = _count_lines(tool)
            if present:
                chosen = environment.get(variable)
                everything = [str(index) for index in range(present)]
                return variable, everything if chosen is None else _chosen(chosen, present)
    return "", []


def resolve_slot_count(asked: int | str, environment: Mapping[str, str] = os.environ) -> int:
    """How many ranks to start on this machine for `resources.slots_per_trial`.

    ``"auto"`` is every accelerator, or two CPU ranks where there is none.

    Raises:
        LaunchError: more slots than accelerators.
    """
    accelerators = count_accelerators(environment)
    if not isinstance(asked, int):
        return accelerators or CPU_SLOTS
    if accelerators and asked > accelerators:
        raise LaunchError(
            f"resources.slots_per_trial is {asked}, but this machine has {accelerators} "
            f"accelerator{'s' if accelerators != 1 else ''}; ask for at most {accelerators} "
            '(or "auto"), or set DS_ACCELERATOR=cpu to train on CPU ranks'
        )
    return asked


def _chosen(devices: str, present: int) -> list[str]:
    """What a list of devices makes visible: those before the first that does not exist."""
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
