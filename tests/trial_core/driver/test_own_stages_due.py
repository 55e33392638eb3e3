"""Stages of the user's own in a launch, without processes."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.slots import toy_config
from tests.support.stages import beside, faking
from trial_core.checkpoint.store import CheckpointStore
from trial_core.driver import own_stages_due
from trial_core.driver.loop import wind_up
from trial_core.driver.run import Launch, Run
from trial_core.driver.stages import own_stage
from trial_core.driver.stages.declared_stage import OwnStageFailed
from trial_core.driver.uploads import Uploads
from trial_core.errors import TrialError
from trial_core.observe.events.run_status import RunStatus

SCORE = {"run": "own:score", "after": "validate", "blocking": True, "metrics": ["score"]}
TELL = {"run": "own:tell", "after": "training"}


@pytest.fixture(autouse=True)
def nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_stages_due, "call", lambda *_: None)


def launch(folder: Path, *stages: dict[str, Any]) -> Launch:
    """A launch of a run with these stages."""
    config = toy_config(folder, stages=list(stages))
    return Launch(Run(config, "toy-0a", folder, CheckpointStore(f"file://{folder}")))


@pytest.mark.parametrize(
    "value",
    [10**400, 2**64, -(2**64), True, "high"],
    ids=["long", "large", "small", "bool", "text"],
)
def test_a_metric_that_nothing_could_store_is_left_out(
    tmp_path: Path, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a warning. JSON has integers of any length, and manifests those of 64 bits."""
    found, warned = launch(tmp_path, SCORE), list[str]()
    monkeypatch.setattr(found, "warn", warned.extend)
    found.run.execute = faking(own_stage=beside(lambda *_: {"score": value}))
    with Uploads(found) as uploads:
        uploads.own.run_blocking("validate", 4)
    assert found.answers.validated == {}
    assert 'own:score: the metric "score" is no number, or exceeds 64 bits' in warned[0]
    assert len(warned[0]) < 200


@pytest.mark.parametrize("stopped_early", [False, True])
def test_what_comes_after_training_comes_once(tmp_path: Path, stopped_early: bool) -> None:
    """Not before a move to other nodes; but if the last node is lost when all is trained."""
    found, called = launch(tmp_path, TELL), list[int]()

    def note(launch: Launch, stage: Any, argument: dict[str, Any]) -> None:
        called.append(argument["batches_trained"])

    found.status.moves = "node a is drained"
    found.run.execute = faking(own_stage=beside(note))
    with Uploads(found) as uploads:
        wind_up(found, uploads, 10, stopped_early)
    assert called == ([] if stopped_early else [10])


def test_what_comes_after_training_does_not_follow_a_mistake(tmp_path: Path) -> None:
    """The run ends with the mistake: there is nothing to publish."""
    found, called = launch(tmp_path, TELL), list[object]()
    found.run.execute = faking(own_stage=beside(lambda *given: called.append(given)))
    mistake = TrialError("the metric is missing")
    with Uploads(found) as uploads, pytest.raises(TrialError, match="is missing"):
        wind_up(found, uploads, 10, stopped_early=False, mistake=mistake)
    assert called == []


def test_a_failure_is_taken_between_workloads(tmp_path: Path) -> None:
    """Of a stage that runs in parallel with training, if it is to end the run."""
    found = launch(tmp_path, {"run": "own:tell", "after": "validate", "on_failure": "fail"})

    def fail(*_: Any) -> None:
        raise OwnStageFailed("no room")

    found.run.execute = faking(own_stage=beside(fail))
    with Uploads(found) as uploads:
        uploads.own.start_beside("validate", 4)
        uploads.own.wait()
        assert uploads.own.mistake is None
        uploads.poll()
        assert str(uploads.own.mistake) == "no room"


def test_a_stage_that_has_failed_is_not_shown_as_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the terminal and in the report. The run continues."""
    found, status = launch(tmp_path, TELL), RunStatus()
    found.run.observer = status

    def fail(*_: Any) -> None:
        assert str(status.stage) == "own-stage own:tell @4"
        raise OwnStageFailed("no room")

    monkeypatch.setattr(own_stage, "call", fail)
    with pytest.raises(OwnStageFailed):
        own_stage.own_stage.work(found, found.run.config.stages[0], {"batches_trained": 4})
    assert str(status.stage) == "starting"


def test_the_end_of_the_ranks_ends_the_pause_between_two_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that are launched again do not wait for it."""
    retried = {**TELL, "retries": 1, "retry_delay_seconds": 600}
    found, has_failed = launch(tmp_path, retried), threading.Event()

    def fail(*_: Any) -> None:
        has_failed.set()
        raise OwnStageFailed("no room")

    monkeypatch.setattr(own_stage, "call", fail)
    started = own_stage.own_stage(found, found.run.config.stages[0], {"batches_trained": 4})
    assert has_failed.wait(30)
    found.has_failed, began = True, time.monotonic()
    with pytest.raises(OwnStageFailed, match="no room"):
        started.result()
    assert time.monotonic() - began < 60
