"""`trialflow search` is killed with SIGKILL, and continued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.prefect import isolated, prepared
from tests.support.processes import alive, descendants, wait_until_gone
from tests.support.slots import TOY
from tests.support.waiting import until
from trial_core.checkpoint.store import CheckpointStore
from trial_core.search.log import Exited, RungReached, SearchLog, searches
from trial_core.search.view import stored_view

pytestmark = [pytest.mark.slots, pytest.mark.server, pytest.mark.long]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the command in a folder."""
    variables = {**isolated(folder / "prefect"), "TRIALFLOW_HOME": str(folder / "home")}
    return subprocess.Popen(
        [sys.executable, "-m", "trialflow.deployments.cli.main", "search",
         str(folder / "experiment.yaml"), *arguments],
        env={**os.environ, **variables}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_a_search_whose_driver_is_killed_continues(tmp_path: Path) -> None:
    """It is the same search, without a failed trial: its records stay, and it comes to its end."""
    prepared(tmp_path / "prefect")
    stuck = tmp_path / "stuck"
    experiment = {
        "name": "toy", "entrypoint": "toy_trial:ToyTrial", "code": str(TOY),
        "hyperparameters": {
            "lr": {"type": "log", "minval": -3, "maxval": -1},
            "do": "sleep", "at_batch": 4, "once": str(stuck),
        },
        "resources": {"slots_per_trial": 1}, "tensorboard_logging": False,
        "searcher": {
            "name": "asha", "metric": "loss", "max_length": {"batches": 6}, "num_rungs": 2,
            "divisor": 2, "max_trials": 3, "max_concurrent_trials": 1,
        },
        "checkpoint_storage": str(tmp_path / "checkpoints"),
    }  # fmt: skip
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    with start(tmp_path) as run:
        until(lambda: stuck.exists() or run.poll() is not None, "a trial trains to its second rung")
        pids = descendants(run.pid)
        run.kill()
        output, _ = run.communicate()
        assert stuck.exists(), output
    left = wait_until_gone(pids, 30)
    for pid in alive(left):
        os.kill(pid, signal.SIGKILL)
    assert left == []
    storage = CheckpointStore(f"file://{tmp_path}/checkpoints").storage
    (name,) = searches(storage)
    before = SearchLog(storage, name).events
    assert [event for event in before if isinstance(event, RungReached)]
    with start(tmp_path, "--resume") as run:
        output, _ = run.communicate()
    assert run.returncode == 0, output
    assert searches(storage) == [name]
    events = SearchLog(storage, name).events
    assert events[: len(before)] == before
    assert [event for event in events if isinstance(event, Exited)] == []
    assert stored_view(storage, name).state.is_over
