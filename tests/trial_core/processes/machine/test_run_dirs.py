"""The folder of a run: one driver at a time."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trial_core.cluster_info import trial_number
from trial_core.errors import CheckpointError, TrialflowError
from trial_core.processes.machine import run_dirs
from trial_core.processes.machine.run_dirs import (
    LOCK,
    clear_kept,
    holder_of,
    home_folder,
    locked_run_dir,
    prepare_run_dir,
    task_of,
    trial_id,
)

TRIAL = "toy-0000beef"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path))
    return tmp_path


def test_the_home_folder_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default ./trialflow-runs; $TRIALFLOW_HOME may be relative or begin with ~."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    for value, folder in (("", "trialflow-runs"), ("runs", "runs"), ("~/runs", "me/runs")):
        monkeypatch.setenv("TRIALFLOW_HOME", value)
        assert home_folder() == tmp_path / folder


def test_runs_created_at_the_same_time_have_different_trial_ids() -> None:
    """Prefect's ids begin with the time, and a schedule creates many at once."""
    ids = "01a1fde0-8b63-711d-a100-5be2a1a8b3eb", "01a1fde0-8b63-7121-a953-bb153f2b3707"
    assert len({trial_id("gpt", each) for each in ids}) == 2


def test_a_trials_number_fits_where_people_put_it() -> None:
    """Of many trials no two have one id; JSON and a tensor of 64 bits take the number as it is."""
    trial = trial_id("gpt", "01a1fde0-8b63-711d-a100-ffffffffffff")
    assert trial == "gpt-ffffffffffff"
    assert 2**40 < trial_number(trial) == float(trial_number(trial)) < 2**53


def test_only_one_process_trains_a_trial() -> None:
    """A second run is refused, is told who trains, and does not touch the staged files."""
    with locked_run_dir(TRIAL) as run_dir:
        staged = run_dir / "staging" / "file"
        staged.parent.mkdir()
        staged.touch()
        with (
            pytest.raises(TrialflowError, match=f"being trained by process {os.getpid()} on "),
            locked_run_dir(TRIAL),
        ):
            pass
        assert staged.exists()
    with locked_run_dir(TRIAL) as run_dir:
        assert not (run_dir / "staging").exists()


def test_what_the_process_does_besides(home: Path) -> None:
    """It trains many trials, for example: a signal to it would not end this one alone."""
    with locked_run_dir(TRIAL, task="search toy-search-1") as run_dir:
        holder = holder_of(run_dir) or ""
        assert holder == f"process {os.getpid()} on {socket.gethostname()}, for search toy-search-1"
    assert task_of(holder) == "search toy-search-1"
    with locked_run_dir(TRIAL) as run_dir:
        assert task_of(holder_of(run_dir) or "") == ""


def test_a_folder_that_is_deleted_meanwhile_has_no_holder(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that was refused: commands look at all folders."""
    (home / TRIAL).mkdir()
    (home / TRIAL / LOCK).touch()

    @contextmanager
    def deleted(run_dir: Path) -> Iterator[bool]:
        shutil.rmtree(run_dir)
        yield False

    monkeypatch.setattr(run_dirs, "locked_if_ended", deleted)
    assert holder_of(home / TRIAL) is None


def test_a_killed_process_frees_the_lock_although_its_forked_child_lives() -> None:
    """The child may be a data loader's worker."""
    program = (
        "import os, signal, sys\n"
        "from trial_core.processes.machine.run_dirs import locked_run_dir\n"
        f"with locked_run_dir({TRIAL!r}):\n"
        "    if os.fork():\n"
        "        signal.pause()\n"
        "    print('forked', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "forked\n"
        with pytest.raises(TrialflowError, match=f"process {holder.pid} "), locked_run_dir(TRIAL):
            pass
        holder.kill()
        holder.wait()
        with locked_run_dir(TRIAL):
            pass


@pytest.mark.parametrize("trial", ["../project", "project/..", "..", "{home}/project"])
def test_a_trial_cannot_be_a_path(home: Path, trial: str) -> None:
    """A run deletes the files of earlier ranks: no folder outside the home folder is touched."""
    kept = home / "project" / "staging" / "thesis.txt"
    kept.parent.mkdir(parents=True)
    kept.touch()
    trial = trial.format(home=home)
    for use in (locked_run_dir(trial).__enter__, lambda: prepare_run_dir(trial)):
        with pytest.raises(CheckpointError, match="cannot be a trial's id: expected"):
            use()
    assert [path.name for path in home.iterdir()] == ["project"]
    assert list((home / "project").rglob("*")) == [kept.parent, kept]


def test_an_unwritable_home_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the folder and the variable to set."""
    (home / "file").touch()
    monkeypatch.setenv("TRIALFLOW_HOME", str(home / "file"))
    with (
        pytest.raises(TrialflowError, match=f"file/{TRIAL}: .*set TRIALFLOW_HOME"),
        locked_run_dir(TRIAL),
    ):
        pass


def test_files_kept_for_a_restart_are_deleted_at_the_end(home: Path) -> None:
    """Those of all ranks."""
    for number in (0, 1):
        (home / "kept" / "uuid" / f"rank-{number}").mkdir(parents=True)
    clear_kept(home)
    assert not (home / "kept").exists()


def test_a_refused_run_leaves_no_folder(tmp_path: Path) -> None:
    """A run that writes nothing but its lock deletes it, and a run that waited gets a new one."""
    with pytest.raises(TrialflowError, match="refused"), locked_run_dir(TRIAL):
        raise TrialflowError("refused")
    assert list(tmp_path.iterdir()) == []
    with locked_run_dir(TRIAL) as run_dir:
        (run_dir / "report.md").touch()
    assert sorted(path.name for path in run_dir.iterdir()) == ["lock", "report.md"]


def test_a_run_that_waits_for_one_that_is_refused_locks_a_new_file(tmp_path: Path) -> None:
    """The lock of a deleted file would keep no third run out."""
    has_lock, begun, done = threading.Event(), threading.Event(), threading.Event()

    def wait_for_it() -> None:
        begun.set()
        with locked_run_dir(TRIAL, timeout_seconds=60.0):
            has_lock.set()
            done.wait(60.0)

    waiting = threading.Thread(target=wait_for_it)
    with locked_run_dir(TRIAL):
        waiting.start()
        begun.wait(60.0)
        assert not has_lock.wait(0.05)
    assert has_lock.wait(60.0)
    try:
        with pytest.raises(TrialflowError, match="being trained by process"), locked_run_dir(TRIAL):
            pass
    finally:
        done.set()
        waiting.join()
