"""Reserving accelerators for one run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.support.gpus import fake_gpus, uuid
from tests.support.slots import OwnSlots
from trial_core.errors import LaunchError
from trial_core.processes.slots.device_locks import (
    LOCKS_VARIABLE,
    _close,
    _lock,
    lock_descriptors,
    reserve_devices,
)
from trial_core.processes.slots.fork_server import ForkServer, ServerProcess
from trial_core.processes.slots.launcher import launch_locally

RESERVE_ONE = """
import os, sys
from trial_core.processes.slots.device_locks import reserve_devices
with reserve_devices(1, os.environ, lambda: None) as variables:
    print(variables["CUDA_VISIBLE_DEVICES"], flush=True)
    sys.stdin.read()
"""

RANK = """
import os, subprocess, sys
from trial_core.processes.slots.device_locks import DESCRIPTORS_VARIABLE, keep_locks
keep_locks()
assert DESCRIPTORS_VARIABLE not in os.environ
program = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL)
worker = os.fork()
if worker == 0:
    os.close(1)
    import time
    time.sleep(60)
print(program.pid, worker, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose NVIDIA driver reports two GPUs."""
    fake_gpus(tmp_path, monkeypatch, 2)


def test_runs_with_different_temporary_folders_share_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers with one TRIALFLOW_LOCKS folder reserve different devices."""
    monkeypatch.setenv(LOCKS_VARIABLE, str(tmp_path / "common"))
    reserved = []
    runs = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("TMPDIR", str(tmp_path / name))
        run = subprocess.Popen(
            [sys.executable, "-c", RESERVE_ONE],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        runs.append(run)
        assert run.stdout is not None
        reserved.append(run.stdout.readline().strip())
    for run in runs:
        run.communicate()
    assert reserved == ["0", "1"]
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "common").iterdir()}
    assert modes == {0o666}, "other users of the machine cannot lock these files"


def test_reserved_devices_are_free_after_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that needs all devices waits until another run's block has ended."""
    monkeypatch.setenv(LOCKS_VARIABLE, str(tmp_path / "locks"))
    monkeypatch.setattr("trial_core.processes.slots.device_locks.POLL_SECONDS", 0.01)
    first = reserve_devices(1, {"PATH": "/"}, lambda: None)
    first.__enter__()

    def end_first() -> None:
        first.__exit__(None, None, None)

    with reserve_devices(2, {"PATH": "/"}, when_waiting=end_first) as variables:
        assert variables["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_a_device_is_locked_once_under_all_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run names it by its UUID."""
    monkeypatch.setenv(LOCKS_VARIABLE, str(tmp_path / "locks"))
    by_uuid = {"CUDA_VISIBLE_DEVICES": f"{uuid(1)},{uuid(0)}"}
    with (
        reserve_devices(1, {"CUDA_VISIBLE_DEVICES": "1"}, lambda: None),
        reserve_devices(1, by_uuid, lambda: None) as variables,
    ):
        assert variables["CUDA_VISIBLE_DEVICES"] == uuid(0)


def test_a_device_is_locked_until_its_ranks_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that outlives its driver has memory there. Programs that it has started, and workers
    that it has forked, have none: they keep no lock."""
    monkeypatch.setenv(LOCKS_VARIABLE, str(tmp_path / "locks"))
    with reserve_devices(1, os.environ, lambda: None) as variables:
        rank = subprocess.Popen(
            [sys.executable, "-c", RANK], env={**os.environ, **variables},
            pass_fds=lock_descriptors(variables),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert rank.stdout is not None
    children = [int(pid) for pid in rank.stdout.readline().split()]
    try:
        assert _lock(uuid(0)) is None
        rank.communicate()
        assert rank.returncode == 0
        lock = _lock(uuid(0))
        assert lock is not None
        _close([lock])
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.slots
def test_a_slot_groups_ranks_keep_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_servers: list[ServerProcess]
) -> None:
    """A real rank, on whose device no other run trains until it has ended. The fork server keeps no
    lock, and starts ranks on other devices."""
    monkeypatch.setenv(LOCKS_VARIABLE, str(tmp_path / "locks"))
    locks: list[int] = []
    with ForkServer(["trial_core.checkpoint.transfer.persister"]) as server:
        for wanted in (0, 1):
            with reserve_devices(1, os.environ, lambda: None) as variables:
                assert variables["CUDA_VISIBLE_DEVICES"] == str(wanted)
                launcher = partial(launch_locally, server, devices=variables)
                slots = OwnSlots(1, working_dir=tmp_path, log_dir=tmp_path, launcher=launcher)
            with slots:
                assert _lock(uuid(wanted)) is None
                rank = psutil.Process(slots.pids[0])
                descriptor = lock_in(rank, uuid(wanted))
                assert descriptor is not None
                flags = Path(f"/proc/{rank.pid}/fdinfo/{descriptor}").read_text().split()[3]
                assert int(flags, 8) & os.O_CLOEXEC, "its children would keep the lock, too"
                (persister,) = rank.children()
                assert lock_in(persister, uuid(wanted)) is None
            lock = _lock(uuid(wanted))  # the next rank gets the other device
            assert lock is not None
            locks.append(lock)
    assert len(fork_servers) == 1
    _close(locks)


def lock_in(process: psutil.Process, device: str) -> int | None:
    """The process's descriptor of a device's lock."""
    opened = Path(f"/proc/{process.pid}/fd").iterdir()
    found = [each.name for each in opened if Path(os.path.realpath(each)).name == f"{device}.lock"]
    return int(found[0]) if found else None


def test_an_unusable_folder_of_locks_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training without a lock could use another run's GPU; the error says what to set."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(LOCKS_VARIABLE, str(tmp_path / "file" / "locks"))
    with (
        pytest.raises(
            LaunchError, match=rf"device GPU-0000 .*file/locks.*set {LOCKS_VARIABLE} to a"
        ),
        reserve_devices(1, {"PATH": "/"}, lambda: None),
    ):
        pass


@pytest.mark.parametrize("content", ["own", None], ids=["to a file", "to nothing"])
def test_a_link_in_the_folder_of_locks_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    """Every user may write to that folder: another one must not choose which file is opened."""
    folder, target = tmp_path / "common", tmp_path / "target"
    folder.mkdir()
    if content is not None:
        target.write_text(content)
    (folder / "device.lock").symlink_to(target)
    monkeypatch.setenv(LOCKS_VARIABLE, str(folder))
    with pytest.raises(LaunchError, match="cannot lock device device"):
        _lock("device")
    assert target.exists() == (content is not None)


def test_the_lock_of_another_user_is_only_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux lets only its owner create it in a sticky folder, or change its mode."""
    lock = tmp_path / "device.lock"
    lock.touch(mode=0o600)
    monkeypatch.setenv(LOCKS_VARIABLE, str(tmp_path))
    descriptor = _lock("device")
    assert descriptor is not None
    _close([descriptor])
    assert lock.stat().st_mode & 0o777 == 0o600
