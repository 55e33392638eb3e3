"""The accelerators of this machine, found and tried without torch in the driver.

The driver launches one rank per accelerator and tells the ranks which kind it has counted. A rank
that cannot use its accelerator refuses to train (`rank.collectives.accelerator`): otherwise
DeepSpeed would train on the CPU and say nothing.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trial_core.common.text_format import last_line, plural
from trial_core.errors import LaunchError

CPU_SLOTS = 2

CPU_SLOTS_PER_CORE = 4
"""More rank processes per core than this only take each other's time and memory."""

MIN_CPU_SLOT_LIMIT = 8
"""Small machines may also test a larger topology."""

CPU, NVIDIA = "cpu", "cuda"
KIND_VARIABLE = "DS_ACCELERATOR"
"""DeepSpeed's switch: the kind of accelerator that a process uses."""

NVIDIA_DEVICE = Path("/dev/nvidiactl")
"""Exists where the NVIDIA driver is loaded and this process, or its container, may use it.
Containers that may not use the driver see /proc/driver/nvidia, too."""

TOOL_TIMEOUT_SECONDS = 60.0
PROBE_TIMEOUT_SECONDS = 300.0

ACCELERATOR_CHECK = (sys.executable, "-m", "trial_core.deepspeed.accelerator_check")
PROBE = """
import sys
sys.path.pop(0)  # the working folder may be a stranger's
from deepspeed.accelerator import get_accelerator
found = get_accelerator()
count = found.device_count() if found.is_available() else 0
print("found", found.device_name(), count, found.visible_devices_envs()[0])
"""
OTHER_BUILDS = ("rocm", "xpu")
"""Local versions of torch, such as 2.13.0+xpu, for accelerators other than NVIDIA's."""
EXTENSIONS = (
    "intel_extension_for_pytorch", "torch_npu", "habana_frameworks", "torch_mlu", "torch_sdaa",
)  # fmt: skip
"""Packages that bring other accelerators to torch and DeepSpeed."""

ADVICE = (
    "to train on the CPU, set resources.accelerator: cpu in the experiment, or the environment "
    "variable DS_ACCELERATOR=cpu"
)

NO_MESSAGE = "it ended without a message"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Accelerators:
    """The accelerators that the ranks of a run may use.

    Attributes:
        kind: DeepSpeed's name of their kind: ``cuda``, ``xpu``, …; ``cpu`` without accelerators.
        variable: the environment variable that selects some of them.
        devices: their names in that variable.
    """

    kind: str = CPU
    variable: str = ""
    devices: tuple[str, ...] = ()


CPU_ONLY = Accelerators()


def count_accelerators(environment: Mapping[str, str] = os.environ) -> int:
    """The number of accelerators for the ranks; 0: CPU ranks. Raises as `visible_accelerators`."""
    return len(visible_accelerators(environment).devices)


def has_cpu_alone(environment: Mapping[str, str] = os.environ) -> bool:
    """True if ranks are certainly on the CPU, judged without starting a process."""
    if environment.get(KIND_VARIABLE) == CPU:
        return True
    return not (_needs_probe() or NVIDIA_DEVICE.exists() or shutil.which("nvidia-smi"))


def visible_accelerators(environment: Mapping[str, str]) -> Accelerators:
    """The accelerators that ranks with these environment variables would use.

    With ``DS_ACCELERATOR=cpu`` there are none. ``nvidia-smi`` counts NVIDIA's; DeepSpeed itself, in
    another process, counts all others. Variables such as ``CUDA_VISIBLE_DEVICES`` are respected.

    Raises:
        LaunchError: there is an NVIDIA driver, but its GPUs cannot be counted; or DeepSpeed fails.
    """
    if environment.get(KIND_VARIABLE) == CPU:
        return CPU_ONLY
    if _needs_probe():
        return _probe(tuple(sorted(environment.items())))
    gpus = _nvidia_gpus()
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    devices = [str(index) for index in range(len(gpus))]
    if chosen is not None:
        devices = _visible(chosen, list(gpus))
    # CUDA shows a process one MIG instance, and then no whole GPU.
    instances = [each for uuid in _uuids(devices, gpus).values() for each in gpus.get(uuid, ())]
    devices = instances[:1] or devices
    return Accelerators(NVIDIA, "CUDA_VISIBLE_DEVICES", tuple(devices)) if devices else CPU_ONLY


def resolve_slot_count(
    requested: int | str,
    environment: Mapping[str, str] = os.environ,
    at_most: int | str | None = None,
) -> int:
    """The number of ranks to start on this machine for `resources.slots_per_trial`.

    Args:
        at_most: the number to start if the machine has room for so many; None: `requested`.

    Raises:
        LaunchError: there are fewer accelerators than requested slots; or none, and too few cores;
            or torch does not support them; or see `visible_accelerators`.
    """
    accelerators = count_accelerators(environment)
    if accelerators and (problem := torch_problem()):
        raise LaunchError(
            f"this machine has {plural(accelerators, 'accelerator')}, but {problem}; {ADVICE}"
        )
    if not isinstance(requested, int):
        return accelerators or CPU_SLOTS
    if accelerators and requested > accelerators:
        raise LaunchError(
            f"resources.slots_per_trial is {requested}, but this machine has "
            f"{plural(accelerators, 'accelerator')}; ask for at most {accelerators} "
            f'(or "auto"), or train on several machines (resources.engine); {ADVICE}'
        )
    cores = available_cores()
    limit = max(CPU_SLOTS_PER_CORE * cores, MIN_CPU_SLOT_LIMIT)
    if not accelerators and requested > limit:
        raise LaunchError(
            f"resources.slots_per_trial is {requested}, but this machine has no accelerator and "
            f"{plural(cores, 'core')}: each slot would be a process on a CPU; ask "
            f'for at most {limit} (or "auto"), or train on several machines (resources.engine)'
        )
    wanted = at_most if isinstance(at_most, int) else requested
    return max(requested, min(wanted, accelerators or limit))


def torch_problem() -> str | None:
    """Why the installed torch cannot use any accelerator; None if it may."""
    if _torch_build() != CPU:
        return None
    return (
        f"torch {importlib.metadata.version('torch')} computes on the CPU only: install a build "
        "for the accelerator (docs/guides/gpu.md)"
    )


def try_accelerators(
    visible: Accelerators, environment: Mapping[str, str] = os.environ
) -> tuple[str | None, str | None]:
    """Have a process claim the accelerators as ranks do. Takes some seconds.

    Returns why ranks cannot use them, or None; and why ranks cannot compile DeepSpeed's operators
    for them, or None, also if that was not tried.
    """
    if (problem := torch_problem()) is not None:
        return problem, None
    try:
        command = [*ACCELERATOR_CHECK, str(len(visible.devices))]
        done = _run(command, PROBE_TIMEOUT_SECONDS, {**environment, KIND_VARIABLE: visible.kind})
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error), None
    lines = done.stdout.splitlines()
    if done.returncode != 0 or len(lines) < 2:
        last = last_line(done.stderr) or "without a message"
        return f"a process like a rank's ended with code {done.returncode}: {last}", None
    # Libraries may print before.
    return json.loads(lines[-2]), json.loads(lines[-1])


def described(visible: Accelerators) -> str:
    """Their number, kind and model: ``2 × cuda (NVIDIA H100 80GB HBM3, driver 570.86.15)``."""
    counted = f"{len(visible.devices)} × {visible.kind}"
    if visible.kind != NVIDIA:
        return counted
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        query.append(f"--id={','.join(device_uuids(visible).values())}")
        done = _run(query, TOOL_TIMEOUT_SECONDS)
        done.check_returncode()
    except (OSError, subprocess.SubprocessError, LaunchError):
        return counted
    models = {line.replace(", ", ", driver "): None for line in done.stdout.splitlines()}
    return f"{counted} ({'; '.join(models)})" if models else counted


def available_cores() -> int:
    """The cores that this process, and so its ranks, may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def device_uuids(accelerators: Accelerators) -> dict[str, str]:
    """The UUIDs of NVIDIA's devices, for names that are indices or beginnings of UUIDs.

    Other devices keep their names. Raises as `visible_accelerators`.
    """
    gpus = _nvidia_gpus() if accelerators.kind == NVIDIA else {}
    return _uuids(accelerators.devices, gpus)


def _run(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )


def _torch_build() -> str:
    """The local version of the installed torch: ``cpu``, ``cu130``, …; empty for PyPI's."""
    try:
        return importlib.metadata.version("torch").partition("+")[2]
    except importlib.metadata.PackageNotFoundError:
        return ""


def _needs_probe() -> bool:
    """True if torch, or an extension of it, is for accelerators other than NVIDIA's."""
    if _torch_build().startswith(OTHER_BUILDS):
        return True
    return any(importlib.util.find_spec(name) is not None for name in EXTENSIONS)


@functools.lru_cache
def _probe(environment: tuple[tuple[str, str], ...]) -> Accelerators:
    """DeepSpeed's accelerators, found in a separate process. Takes some seconds."""
    try:
        done = _run([sys.executable, "-c", PROBE], PROBE_TIMEOUT_SECONDS, dict(environment))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"DeepSpeed cannot count the accelerators: {error}; {ADVICE}") from error
    answers = [line.split() for line in done.stdout.splitlines() if line.startswith("found ")]
    if done.returncode != 0 or not answers:
        why = last_line(done.stderr) or NO_MESSAGE
        raise LaunchError(f"DeepSpeed cannot count the accelerators: {why}; {ADVICE}")
    _, kind, count, variable = answers[-1]
    if kind == CPU or int(count) == 0:
        logger.warning(
            "torch %s is for accelerators, but DeepSpeed finds none on this machine: ranks train "
            "on the CPU. If there should be some, check their driver",
            importlib.metadata.version("torch"),
        )
        return CPU_ONLY
    chosen = dict(environment).get(variable)
    names = chosen.split(",") if chosen else [str(index) for index in range(int(count))]
    return Accelerators(kind, variable, tuple(names[: int(count)]))


def _nvidia_gpus() -> dict[str, list[str]]:
    """The UUIDs of the NVIDIA GPUs in the order of their indices, each with its MIG instances'."""
    has_driver = NVIDIA_DEVICE.exists()
    if shutil.which("nvidia-smi") is None:
        if not has_driver:
            return {}
        raise LaunchError(_uncountable("nvidia-smi is not on PATH"))
    try:
        done = _run(["nvidia-smi", "--list-gpus"], TOOL_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(_uncountable(str(error))) from error
    if done.returncode != 0:
        if not has_driver:  # the tool without a driver, as in an image for GPUs
            return {}
        raise LaunchError(_uncountable(last_line(done.stdout + done.stderr) or NO_MESSAGE))
    gpus: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        # GPU 0: NVIDIA H100 (UUID: GPU-8f2a0c11-…)
        #   MIG 3g.40gb     Device  0: (UUID: MIG-c7384736-…)
        uuid = line.partition("(UUID: ")[2].rstrip().removesuffix(")")
        if line.startswith("GPU "):
            gpus[uuid or str(len(gpus))] = []
        elif line.split()[:1] == ["MIG"] and gpus:
            gpus[next(reversed(gpus))].append(uuid)
    return gpus


def _uncountable(why: str) -> str:
    return f"this machine has an NVIDIA driver, but its GPUs cannot be counted: {why}; {ADVICE}"


def _visible(chosen: str, gpus: list[str]) -> list[str]:
    """The devices of ``CUDA_VISIBLE_DEVICES`` that torch sees, see `torch.cuda.device_count`.

    The list ends before the first device that does not exist, or is an index among UUIDs or the
    reverse. It is empty if one is repeated. A process uses one MIG instance.
    """
    entries = [entry.strip() for entry in chosen.split(",")]
    if entries[0].startswith("MIG-"):
        return entries[:1] if gpus else []
    found: dict[str, int] = {}
    for entry in entries:
        if entry.isdecimal() and entries[0].isdecimal():
            matching = [index for index in range(len(gpus)) if index == int(entry)]
        elif entry.startswith("GPU-") and entries[0].startswith("GPU-"):
            matching = [index for index, uuid in enumerate(gpus) if uuid.startswith(entry)]
        else:
            break
        if len(matching) != 1:
            break
        if matching[0] in found.values():
            return []
        found[entry] = matching[0]
    return list(found)


def _uuids(devices: Iterable[str], gpus: Mapping[str, list[str]]) -> dict[str, str]:
    """The UUID of each device whose index or beginning `gpus` has; else the device itself."""
    by_index = {str(index): uuid for index, uuid in enumerate(gpus)}
    known = [*gpus, *(instance for instances in gpus.values() for instance in instances)]
    return {
        device: by_index.get(device)
        or next((uuid for uuid in known if device and uuid.startswith(device)), device)
        for device in devices
    }
