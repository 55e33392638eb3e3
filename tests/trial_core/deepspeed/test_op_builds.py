"""Locks that killed builds of DeepSpeed's extensions leave behind."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from tests.support.waiting import until
from trial_core.deepspeed import op_builds
from trial_core.deepspeed.op_builds import (
    ABANDONED_SECONDS,
    SHARED_MEMORY_OP,
    clear_interrupted_builds,
)

SCRIPT = """
import deepspeed.comm
from trial_core.deepspeed import init

with init():
    assert deepspeed.comm.is_initialized()
"""
BUILDER = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
time.sleep(600)
"""


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the lock of an extension that has not been built yet."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / SHARED_MEMORY_OP
    folder.mkdir()
    return folder / "lock"


def test_a_cpu_rank_compiles_nothing(tmp_path: Path) -> None:
    """DeepSpeed would compile its shared-memory all-reduce, which only inference calls."""
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    subprocess.run([sys.executable, "-c", SCRIPT], env=environment, cwd=tmp_path, check=True)
    assert not (tmp_path / "extensions").exists()


FACTS = """
import os, shutil
from trial_core.deepspeed.op_builds import prepare_op_builds

prepare_op_builds(local_rank=1)
print(shutil.which("ninja"), os.environ["TORCH_EXTENSIONS_DIR"])
"""


def build_tools(**variables: str) -> tuple[str, str]:
    """The ninja and the build folder of a process with these environment variables."""
    inherited = {name: text for name, text in os.environ.items() if name != "TORCH_EXTENSIONS_DIR"}
    ninja, folder = subprocess.check_output(
        [sys.executable, "-c", FACTS], env={**inherited, **variables}, text=True
    ).split()
    return ninja, folder


def test_every_process_of_an_environment_uses_the_same_build(tmp_path: Path) -> None:
    """Also one in which the environment is not activated, and another ninja is found first."""
    other = tmp_path / "ninja"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    here = build_tools(PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert here[0] == str(Path(sys.executable).with_name("ninja"))
    assert here == build_tools(PATH="/usr/bin:/bin")
    assert here[1] != build_tools(CXX="another-compiler")[1]


def age(folder: Path, seconds: float) -> None:
    """Make all files in the folder that old."""
    for file in folder.iterdir():
        os.utime(file, (time.time() - seconds,) * 2)


def test_only_the_lock_of_a_killed_builder_is_removed(
    lock: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A slow builder keeps its lock; after it was killed, others can build."""
    with subprocess.Popen([sys.executable, "-c", BUILDER, str(lock)]) as builder:
        until(lock.exists, "a build")
        age(lock.parent, ABANDONED_SECONDS + 60)
        clear_interrupted_builds()
        assert lock.exists()
        builder.kill()
    with caplog.at_level(logging.WARNING):
        clear_interrupted_builds()
    assert "a build of deepspeed_shm_comm was killed" in caplog.text
    assert FileBaton(str(lock)).try_acquire()


def test_a_builder_elsewhere_is_waited_for(
    lock: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock without a visible owner is removed only after its folder has not changed for long."""
    lock.touch()
    age(lock.parent, 1000)
    (lock.parent / "shm.o").touch()
    monkeypatch.setattr(op_builds.time, "sleep", lambda seconds: age(lock.parent, 1000))
    with caplog.at_level(logging.WARNING):
        clear_interrupted_builds()
    assert "is being built on another machine" in caplog.text
    assert not lock.exists()


def test_a_build_is_named(lock: Path) -> None:
    """While its lock exists, the operator that is compiled, and how long that usually takes."""
    assert op_builds.op_being_built() is None
    lock.touch()
    assert op_builds.op_being_built() == (
        "compiling DeepSpeed's operator deepspeed_shm_comm "
        "(once in this environment, usually 1 to 4 minutes)"
    )


def test_without_a_lock_no_process_is_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor if there is no folder yet."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "none"))
    monkeypatch.setattr("psutil.process_iter", lambda: pytest.fail("examined processes"))
    clear_interrupted_builds()
