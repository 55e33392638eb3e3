"""The folder of a run: one driver at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trial_core.errors import TrialflowError
from trial_core.run.run_dirs import clear_kept, locked_run_dir, trial_id

TRIAL = "toy-0000beef"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path))
    return tmp_path


def test_runs_of_one_moment_are_different_trials() -> None:
    """Prefect's ids begin with the time, and those of a schedule are made together."""
    ids = "01a1fde0-8b63-711d-a100-5be2a1a8b3eb", "01a1fde0-8b63-7121-a953-bb153f2b3707"
    assert len({trial_id("gpt", each) for each in ids}) == 2


def test_a_trial_is_trained_by_one_at_a_time() -> None:
    """Another is told by whom, and what is staged there stays; afterwards it may go on."""
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


def test_a_killed_process_holds_nothing() -> None:
    """The kernel gives the folder back at once, although a process that it forked (a data loader's
    worker) lives on for a while."""
    program = (
        "import os, signal, sys\n"
        "from trial_core.run.run_dirs import locked_run_dir\n"
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


def test_a_home_that_cannot_be_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is named, and what to set."""
    (home / "file").touch()
    monkeypatch.setenv("TRIALFLOW_HOME", str(home / "file"))
    with (
        pytest.raises(TrialflowError, match=f"file/{TRIAL}: .*set TRIALFLOW_HOME"),
        locked_run_dir(TRIAL),
    ):
        pass


@pytest.mark.parametrize(("rank", "left"), [(None, []), (1, ["rank-0"])])
def test_what_is_kept_for_a_restart_goes_at_the_end(
    home: Path, rank: int | None, left: list[str]
) -> None:
    """All of it, or one rank's part; of what others still put there nothing."""
    for number in (0, 1):
        (home / "kept" / "uuid" / f"rank-{number}").mkdir(parents=True)
        (home / "kept" / "uuid" / f"rank-{number}" / "shard").touch()
    clear_kept(home, rank)
    assert [path.name for path in home.glob("kept/*/*")] == left
    assert (home / "kept").exists() == bool(left)
