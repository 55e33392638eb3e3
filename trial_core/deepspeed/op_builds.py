"""Builds of DeepSpeed's extensions: which are built, with which tools, and in which folder.

DeepSpeed compiles an extension on first use, for minutes. Three things would repeat that or block:

- On CPU ranks it always compiles the shared-memory all-reduce, which only its inference calls.
- A process with another ninja, or of an environment with other versions, compiles again in the
  same folder. So each environment has its own folder, and uses its own ninja.
- PyTorch lets one process build while the others wait until its lock file is removed. A process
  that is killed while it builds, for example by Ctrl-C, leaves the lock behind, and every process
  that waits then or later would wait forever.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import deepspeed
import psutil
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder.builder import MissingCUDAException, installed_cuda_version
from torch.utils.file_baton import FileBaton

from trial_core.processes.machine.process_identity import is_alive, this_process

logger = logging.getLogger(__name__)

# A builder in another container, or on another machine that shares the folder, is not visible as a
# process, and one of a script without trialflow does not say which it is. But every few minutes it
# finishes a file.
ABANDONED_SECONDS = 180.0
POLL_SECONDS = 0.5

SHARED_MEMORY_OP = "deepspeed_shm_comm"
_ARCHITECTURE = re.compile(r"\d+\.\d+(\+PTX)?")


def prepare_op_builds() -> None:
    """Avoid needless builds, and outlive killed ones. Every rank calls it before DeepSpeed starts.

    A build folder that the user has set (TORCH_EXTENSIONS_DIR) stays. So does a shared-memory
    extension that was built when DeepSpeed was installed.
    """
    # PyTorch calls ninja by name, and another version of it builds everything again: so the folder
    # of commands comes first, as in an activated environment.
    commands, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    if path.split(os.pathsep)[0] != commands:
        os.environ["PATH"] = os.pathsep.join([commands, path])
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(_build_folder())
    if get_accelerator().device_name() == "cpu" and not installed_ops.get(SHARED_MEMORY_OP):
        deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False
    torchs_lock: Any = FileBaton
    torchs_lock.try_acquire = _acquire_or_wait


def _acquire_or_wait(baton: Any) -> bool:
    """Take the lock of an extension's folder, for `FileBaton.try_acquire`.

    While another process has it, this waits. If that was killed, its lock is taken over, and what
    it has built so far is used.

    Returns:
        False if the other process has ended its build.
    """
    lock = Path(baton.lock_file_path)
    if _created(baton):
        return True
    has_said = False
    while _exists(lock):
        if _is_abandoned(lock) and _taken_over(baton):
            logger.warning(
                "the build of %s was killed: its lock %s is taken over", lock.parent.name, lock
            )
            return True
        if not has_said:
            has_said = True
            if not _is_held(lock) and _exists(lock):
                logger.warning(
                    "%s is being built on another machine, or its build was killed: waiting until "
                    "the folder of %s has not changed for %.0f s",
                    lock.parent.name, lock, ABANDONED_SECONDS,
                )  # fmt: skip
        time.sleep(POLL_SECONDS)
    return False


def _created(baton: Any) -> bool:
    """True if the lock file is this process's own now."""
    try:
        baton.fd = os.open(baton.lock_file_path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    with suppress(OSError):  # a file system without locks
        fcntl.flock(baton.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(baton.fd, this_process().encode())
    return True


def _taken_over(baton: Any) -> bool:
    """True if an abandoned lock file is this process's own now: one process at most gets it."""
    lock = Path(baton.lock_file_path)
    try:
        descriptor = os.open(lock, os.O_WRONLY)
    except FileNotFoundError:  # another process has taken it over meanwhile, and has built
        return False
    with suppress(OSError):  # a file system without locks
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process has taken it over
            os.close(descriptor)
            return False
    if not _exists(lock) or not os.path.samestat(os.fstat(descriptor), lock.stat()):
        os.close(descriptor)
        return False
    os.ftruncate(descriptor, 0)
    os.write(descriptor, this_process().encode())
    baton.fd = descriptor
    return True


def op_being_built() -> str | None:
    """The name of the extension that a process builds in this environment's folder, or None.

    Any process that loads an extension holds the lock for a moment, even if nothing is compiled.
    """
    locks = Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/lock")
    names = sorted({lock.parent.name for lock in locks if not _is_abandoned(lock)})
    if not names:
        return None
    return (
        f"compiling DeepSpeed's operator {', '.join(names)} "
        "(once in this environment, usually 1 to 4 minutes; optimizers with "
        '"torch_adam": true need none)'
    )


def nvcc_problem() -> str | None:
    """Why DeepSpeed's operators cannot be compiled for CUDA; None if they can, or need not.

    DeepSpeed refuses an nvcc of another major version, and from CUDA 13 of another minor one. It
    fails with architectures that only PyTorch knows.
    """
    if torch.version.cuda is None:
        return None
    if (problem := architecture_problem()) is not None:
        return problem
    needed = ".".join(torch.version.cuda.split(".")[:2])
    built = f"torch {torch.__version__} is built for CUDA {needed}"
    try:
        found = ".".join(map(str, installed_cuda_version()))
    except MissingCUDAException as error:
        return f"no nvcc: {error}; {built}, install the toolkit of that version"
    if found == needed:
        return None
    return f"nvcc is of CUDA {found}, but {built}: install that toolkit, or torch for CUDA {found}"


def architecture_problem() -> str | None:
    """Why DeepSpeed cannot read TORCH_CUDA_ARCH_LIST; None if it can, or need not."""
    chosen = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    named = [each for each in re.split(r"[\s;]+", chosen) if each]
    odd = [each for each in named if not _ARCHITECTURE.fullmatch(each)]
    if torch.version.cuda is None or not odd:
        return None
    return (
        f"the environment variable TORCH_CUDA_ARCH_LIST is {chosen!r}, and DeepSpeed cannot read "
        f"{odd[0]!r}: it takes numbers such as 9.0 or 9.0+PTX. Set it so, or not at all: then "
        "DeepSpeed compiles for the GPUs of the machine"
    )


def _build_folder() -> Path:
    """The build folder of this environment: its versions, compiler and flags."""
    from torch.utils.cpp_extension import get_default_build_root

    compiler = os.environ.get("CXX", "c++")
    variables = ("CXX", "CC", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST", "PYTORCH_ROCM_ARCH")
    decisive = [
        sys.prefix,
        sys.version,
        torch.__version__,
        deepspeed.__version__,
        get_accelerator().device_name(),
        os.path.realpath(shutil.which(compiler) or compiler),
        *(os.environ.get(name, "") for name in variables),
    ]
    digest = hashlib.sha256("\0".join(decisive).encode()).hexdigest()
    return Path(get_default_build_root()) / f"trialflow-{digest[:12]}"


def _exists(lock: Path) -> bool:
    try:
        return lock.exists()
    except OSError:  # in another user's folder
        return False


def _is_abandoned(lock: Path) -> bool:
    """True if the process that has the lock was killed, as far as this machine can tell."""
    owner = ""
    with suppress(OSError):  # as above
        owner = lock.read_text(errors="replace")
    return not is_alive(owner) or (_is_quiet(lock.parent) and not _is_held(lock))


def _is_held(lock: Path) -> bool:
    """True if a process of this machine has the lock file open, as a builder has."""
    path = str(lock.resolve())
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if any(file.path == path for file in process.open_files()):
                return True
    return False


def _is_quiet(folder: Path) -> bool:
    """True if nothing has changed in a folder for long."""
    times = [0.0]
    with suppress(OSError):  # deleted meanwhile, or another user's
        for file in folder.iterdir():
            with suppress(OSError):
                times.append(file.stat().st_mtime)
    return time.time() - max(times) > ABANDONED_SECONDS
