"""When the ranks of a run move to other nodes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.slots import toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.run.observer import Observer
from trialflow.tasks.trial_run import TrialRun


@pytest.fixture
def run(tmp_path: Path) -> TrialRun:
    """A run of ten batches that may move at its next checkpoint; its slots record their end."""
    config = toy_config(tmp_path)
    store = CheckpointStore(config.checkpoint_storage.url)
    run = TrialRun(config, "toy-0000beef", tmp_path, store, Observer())
    told: list[str] = []
    run.slots = cast(
        Any, SimpleNamespace(stop=lambda: told.append("stop"), abort=told.append, told=told)
    )
    run.end, run.can_save = 10, True
    run.move_at_checkpoint("there are nodes for 4 slots")
    return run


def told(run: TrialRun) -> list[str]:
    return cast(Any, run.slots).told  # type: ignore[no-any-return]


def test_an_offer_waits_for_a_checkpoint(run: TrialRun) -> None:
    assert not run.should_stop
    run.has_saved(8)
    assert run.should_stop
    assert told(run) == ["stop"]


def test_a_run_that_has_ended_does_not_move(run: TrialRun) -> None:
    """Its last checkpoint is no reason to launch it again."""
    run.has_saved(10)
    assert run.moves is None


def test_a_run_that_stops_anyway_does_not_move(run: TrialRun) -> None:
    run.stop_requested = True
    run.has_saved(8)
    assert run.moves is None


def test_before_training_there_is_nothing_to_save(run: TrialRun) -> None:
    """A node that drains is left at once, however long the trial would take to build."""
    run.can_save = False
    run.move_now("node a drains")
    assert told(run) == ["nothing to save: training had not begun"]
