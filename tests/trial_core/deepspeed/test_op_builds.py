"""Which builds of DeepSpeed's extensions processes share, and locks that killed builds leave."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from deepspeed.ops.op_builder.builder import CUDAOpBuilder
from torch.utils.file_baton import FileBaton

from tests.support.slots import build, lines, toy_config
from tests.support.waiting import until
from trial_core.deepspeed import op_builds
from trial_core.deepspeed.config_rejection import rejection
from trial_core.deepspeed.op_builds import (
    ABANDONED_SECONDS,
    SHARED_MEMORY_OP,
    prepare_op_builds,
)
from trial_core.processes.slots.slot_group import SlotGroup

ROOT = Path(__file__).parents[3]

SCRIPT = """
import deepspeed.comm
from trial_core.deepspeed import init

with init():
    assert deepspeed.comm.is_initialized()
"""


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the lock of an extension that has not been built yet."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(FileBaton, "try_acquire", FileBaton.try_acquire)
    folder = tmp_path / SHARED_MEMORY_OP
    folder.mkdir()
    return folder / "lock"


@pytest.mark.long
def test_a_cpu_rank_compiles_nothing(tmp_path: Path) -> None:
    """DeepSpeed would compile its shared-memory all-reduce, which only inference calls."""
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    subprocess.run([sys.executable, "-c", SCRIPT], env=environment, cwd=tmp_path, check=True)
    assert not (tmp_path / "extensions").exists()


WAYS_IN = """
import json, os, shutil, sys
import deepspeed
from benchmarks import stopping_trial
from trial_core.deepspeed import DeepSpeedTrialContext, init

class Begun(BaseException):
    pass

def begin(*args, **options):
    raise Begun

def of_init():
    with init():
        pass

def of_from_config():
    DeepSpeedTrialContext.from_config({})

def of_a_benchmark():
    sys.argv[1:] = ["tiny"]
    stopping_trial.main()

def of_another_compiler():
    os.environ["CXX"] = "another-compiler"
    of_init()

deepspeed.init_distributed = begin
for way in (of_init, of_from_config, of_a_benchmark, of_another_compiler):
    if os.fork() == 0:
        try:
            way()
        except Begun:
            pass
        print(json.dumps([shutil.which("ninja"), os.environ.get("TORCH_EXTENSIONS_DIR")]))
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""


@pytest.mark.long
@pytest.mark.slots
def test_every_way_in_uses_the_same_build(
    warm_slots: Callable[[int], SlotGroup], tmp_path: Path
) -> None:
    """The same ninja and folder, so that one builds for all; another compiler has its own folder.

    Also where the environment is not activated, and another ninja is found first.
    """
    config = toy_config(
        tmp_path, entrypoint="context_use_trials:RecordsBuildTools",
        hyperparameters={"record": str(tmp_path)},
    )  # fmt: skip
    build(warm_slots(2), config, tmp_path)
    ((ninja, folder),) = lines(tmp_path, "tools", 1)
    assert ninja == str(Path(sys.executable).with_name("ninja"))
    assert folder

    other = tmp_path / "ninja"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    printed = subprocess.check_output(
        [sys.executable, "-c", WAYS_IN], env=environment, cwd=tmp_path, text=True
    )
    *ways, compiler = map(json.loads, printed.splitlines())
    assert ways == [[ninja, folder]] * 3
    assert compiler[0] == ninja
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        assert compiler[1] != folder


def age(folder: Path, seconds: float) -> None:
    """Make all files in the folder that old."""
    for file in folder.iterdir():
        os.utime(file, (time.time() - seconds,) * 2)


@contextmanager
def builder_of(lock: Path, acquire: Callable[[], object]) -> Iterator[int]:
    """A process that has the lock, and builds for ever; its id. It ends with the block."""
    if (builder := os.fork()) == 0:
        try:
            acquire()
            time.sleep(600)
        finally:
            os._exit(1)
    try:
        until(lock.exists, "a build")
        yield builder
    finally:
        os.kill(builder, signal.SIGKILL)
        os.waitpid(builder, 0)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How often a lock was found to be abandoned, and to be held."""
    found: Counter[bool] = Counter()
    is_abandoned = op_builds._is_abandoned

    def counted(lock: Path) -> bool:
        found[said := is_abandoned(lock)] += 1
        return said

    monkeypatch.setattr(op_builds, "_is_abandoned", counted)
    monkeypatch.setattr(op_builds, "POLL_SECONDS", 0.01)
    return found


@pytest.mark.parametrize("with_trialflow", [True, False])
def test_one_of_those_that_wait_for_a_killed_builder_builds(
    lock: Path, caplog: pytest.LogCaptureFixture, checks: Counter[bool], with_trialflow: bool
) -> None:
    """A slow builder keeps its lock. The others wait for the one that has taken it over."""
    torchs = FileBaton.try_acquire
    prepare_op_builds()
    batons = [FileBaton(str(lock)) for _ in range(4)]
    acquire = batons[0].try_acquire if with_trialflow else partial(torchs, batons[0])
    with ThreadPoolExecutor(4) as threads:
        with builder_of(lock, acquire):
            age(lock.parent, ABANDONED_SECONDS + 60)
            waiting = {threads.submit(each.try_acquire): each for each in batons}
            until(lambda: checks[False] > 8, "checks by those that wait")
            assert op_builds.op_being_built() is not None
            assert not any(each.done() for each in waiting)
            os.utime(lock)  # so that only its end can tell
        if not with_trialflow:  # it did not say which process it was
            age(lock.parent, ABANDONED_SECONDS + 60)
        (took_over,) = wait(waiting, 60, FIRST_COMPLETED).done
        assert took_over.result() is True
        checks.clear()
        until(lambda: checks[False] > 8, "checks by those that wait")
        assert sum(each.done() for each in waiting) == 1
        waiting[took_over].release()
        assert Counter(each.result() for each in waiting) == {False: 3, True: 1}
    assert caplog.text.count("the build of deepspeed_shm_comm was killed") == 1
    assert FileBaton(str(lock)).try_acquire()


@pytest.mark.parametrize(
    "owner", [b"17@1700000000/another-boot/4026531836", b"\xff of another kind"]
)
def test_a_builder_elsewhere_is_waited_for(
    lock: Path, caplog: pytest.LogCaptureFixture, checks: Counter[bool], owner: bytes
) -> None:
    """A lock without a visible owner is taken only after its folder has not changed for long."""
    prepare_op_builds()
    lock.write_bytes(owner)
    age(lock.parent, 1000)
    (lock.parent / "shm.o").touch()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(FileBaton(str(lock)).try_acquire)
        until(lambda: checks[False] > 2, "checks by the one that waits")
        assert not waiting.done()
        assert "is being built on another machine" in caplog.text
        age(lock.parent, 1000)
        assert waiting.result(60) is True


def test_one_process_takes_a_lock_over(lock: Path) -> None:
    """Of those that have found at the same moment that it is abandoned."""
    lock.touch()
    batons = [FileBaton(str(lock)) for _ in range(2)]
    assert [op_builds._taken_over(each) for each in batons] == [True, False]
    batons[0].release()


def test_a_build_is_named(lock: Path) -> None:
    """While its lock exists, the operator that is compiled, and how long that usually takes."""
    assert op_builds.op_being_built() is None
    lock.touch()
    assert op_builds.op_being_built() == (
        "compiling DeepSpeed's operator deepspeed_shm_comm "
        "(once in this environment, usually 1 to 4 minutes; optimizers with "
        '"torch_adam": true need none)'
    )
    age(lock.parent, ABANDONED_SECONDS + 60)
    assert op_builds.op_being_built() is None


def test_nothing_is_built_in_a_folder_that_is_gone(lock: Path) -> None:
    """A person may delete the folder at any time."""
    lock.touch()
    found = [lock]
    shutil.rmtree(lock.parent)
    prepare_op_builds()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "glob", lambda path, pattern: iter(found))
        assert op_builds.op_being_built() is None


@pytest.mark.parametrize(
    ("nvcc", "problem"),
    [
        ("13.0", None),
        ("12.8", r"nvcc is of CUDA 12\.8, but torch .* CUDA 13\.0: install that toolkit, or torch"),
        (None, r"no nvcc: .*/bin/nvcc, .* is built for CUDA 13\.0, install the toolkit of that"),
    ],
)
def test_nvcc_must_be_of_torchs_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvcc: str | None, problem: str | None
) -> None:
    """DeepSpeed refuses another one only when training begins. A torch for others needs none."""
    tool = tmp_path / "bin" / "nvcc"
    tool.parent.mkdir()
    if nvcc is not None:
        tool.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {nvcc}, V{nvcc}.48\n")
        tool.chmod(0o755)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert op_builds.nvcc_problem() is None
    monkeypatch.setattr(torch.version, "cuda", "13.0.1")
    found = op_builds.nvcc_problem()
    assert found is None if problem is None else re.match(problem, str(found))


class AnyOperator(CUDAOpBuilder):
    """One that a rank compiles."""

    def __init__(self) -> None:
        super().__init__("any")
        self.jit_mode = True

    def absolute_name(self) -> str:
        return "any"

    def sources(self) -> list[str]:
        return []


@pytest.mark.parametrize("chosen", ["", "8.0 9.0+PTX", "8.0;9.0", ";9.0;"])
def test_architectures_that_deepspeed_can_read(
    monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    """Numbers, some of them with PTX; without a choice, those of the machine's GPUs."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", chosen)
    assert op_builds.architecture_problem() is None
    if chosen:
        AnyOperator().compute_capability_args()  # raises nothing


@pytest.mark.parametrize(("chosen", "odd"), [("9.0a", "9.0a"), ("8.0;Hopper", "Hopper")])
def test_architectures_that_deepspeed_cannot_read(
    monkeypatch: pytest.MonkeyPatch, chosen: str, odd: str
) -> None:
    """PyTorch reads them, and DeepSpeed's own error names neither the variable nor the value."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", chosen)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert op_builds.architecture_problem() is None
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ValueError, match="invalid literal for int") as raised:
        AnyOperator().compute_capability_args()
    expected = f"TORCH_CUDA_ARCH_LIST is {chosen!r}, and DeepSpeed cannot read {odd!r}: it takes"
    assert expected in str(rejection(raised.value))
    assert expected in str(op_builds.architecture_problem())
