"""When the ranks of a run move to other nodes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.slots import toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.driver.run import Launch, Run
from trial_core.messages import MetricsReported, ReportTaken


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """A run of ten batches that may move at its next checkpoint; its slots record their end."""
    config = toy_config(tmp_path)
    store = CheckpointStore(config.checkpoint_storage.url)
    launch = Launch(Run(config, "toy-0000beef", tmp_path, store))
    told: list[str] = []
    launch.slots = cast(
        Any, SimpleNamespace(stop=lambda: told.append("stop"), abort=told.append, told=told)
    )
    launch.status.end, launch.status.can_save = 10, True
    launch.move_at_checkpoint("there are nodes for 4 slots")
    return launch


def told(launch: Launch) -> list[str]:
    return cast(Any, launch.slots).told  # type: ignore[no-any-return]


def test_an_offer_waits_for_a_checkpoint(launch: Launch) -> None:
    assert not launch.should_stop
    launch.has_saved(8)
    assert launch.should_stop
    assert told(launch) == ["stop"]


def test_a_run_that_has_ended_does_not_move(launch: Launch) -> None:
    """Its last checkpoint is no reason to launch it again."""
    launch.has_saved(10)
    assert launch.status.moves is None


def test_a_run_that_stops_anyway_does_not_move(launch: Launch) -> None:
    launch.answers.stop_requested = True
    launch.has_saved(8)
    assert launch.status.moves is None


def test_before_training_there_is_nothing_to_save(launch: Launch) -> None:
    """A node that drains is left at once, however long the trial would take to build."""
    launch.status.can_save = False
    launch.move_now("node a drains")
    assert told(launch) == ["nothing to save: training had not begun"]


def test_a_report_is_queued_before_its_rank_has_the_receipt(launch: Launch) -> None:
    """Then another rank may send its checkpoint. Rank 0 needs no receipt."""
    told: list[Any] = []
    launch.slots.tell = lambda what: told.append((launch.script_events.qsize(), what))  # type: ignore[method-assign]
    for rank, receipt in ((0, ""), (1, "0a")):
        launch.note_script_event(
            MetricsReported(
                kind="training", steps_completed=1, metrics={}, rank=rank, receipt=receipt
            )
        )
    assert told == [(2, ReportTaken(receipt="0a"))]
