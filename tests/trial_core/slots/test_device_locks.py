"""Accelerators that a run has for itself: locks, and the folder that they are in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trial_core.errors import LaunchError
from trial_core.slots.device_locks import LOCKS_VARIABLE, reserve_devices

TAKE = """
import os, sys
from trial_core.slots.device_locks import reserve_devices
with reserve_devices(1, os.environ, lambda: None) as mine:
    print(mine["CUDA_VISIBLE_DEVICES"], flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with two GPUs, as its driver's tool has it."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho GPU 0: Some; echo GPU 1: Some\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_runs_whose_temporary_folders_differ_share_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in containers, each with a /tmp of its own: what TRIALFLOW_LOCKS names is common."""
    monkeypatch.setenv(LOCKS_VARIABLE, str(tmp_path / "common"))
    taken = []
    runs = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("TMPDIR", str(tmp_path / name))
        run = subprocess.Popen(
            [sys.executable, "-c", TAKE],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        runs.append(run)
        assert run.stdout is not None
        taken.append(run.stdout.readline().strip())
    for run in runs:
        run.communicate()
    assert taken == ["0", "1"]


def test_a_folder_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what to set instead; training on a GPU that may be another's would be worse."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(LOCKS_VARIABLE, str(tmp_path / "file" / "locks"))
    with (
        pytest.raises(
            LaunchError, match=rf"device 0 .*file/locks.*set {LOCKS_VARIABLE} to a folder"
        ),
        reserve_devices(1, {"PATH": "/"}, lambda: None),
    ):
        pass
