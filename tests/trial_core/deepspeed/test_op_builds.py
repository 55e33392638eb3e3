"""Builds of DeepSpeed's extensions that were killed, as PyTorch leaves them."""

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
from trial_core.deepspeed.op_builds import ABANDONED_SECONDS, clear_interrupted_builds

BUILDER = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
time.sleep(600)
"""


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where PyTorch locks an extension that has not been built yet."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / "deepspeed_shm_comm"
    folder.mkdir()
    return folder / "lock"


def age(folder: Path, seconds: float) -> None:
    """Nothing in it was written for so long."""
    for file in folder.iterdir():
        os.utime(file, (time.time() - seconds,) * 2)


def test_only_what_nobody_builds_is_unlocked(lock: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A builder that takes its time keeps its lock; when it was killed, the lock goes, and others
    can build."""
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


def test_a_builder_elsewhere_is_waited_for(lock: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As long as it may be another machine's: something was written a moment ago."""
    lock.touch()
    age(lock.parent, 1000)
    (lock.parent / "shm.o").touch()
    began = time.time()
    with caplog.at_level(logging.WARNING):
        clear_interrupted_builds(abandoned_seconds=1.0)
    assert time.time() - began >= 1.0
    assert "is being built elsewhere" in caplog.text
    assert not lock.exists()


def test_without_a_build_nothing_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where there is no folder yet."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "none"))
    monkeypatch.setattr("psutil.process_iter", lambda: pytest.fail("looked at processes"))
    clear_interrupted_builds()
