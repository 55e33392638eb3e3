"""Real runs that are stopped: by Cancel, Suspend, SIGTERM, or the time budget."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.flow_runs import resume_flow_run
from prefect.states import Suspended

import trialflow.flows.lifecycle.stop_monitor
from tests.support.flow import train, train_until_stopped
from tests.support.prefect_worker import (
    ENDLESS,
    Scene,
    assert_a_cancel_saves,
    assert_nothing_left,
    assert_saved_where_it_ended,
)
from tests.support.processes import wait_until_gone
from tests.support.slots import toy_config
from tests.support.waiting import WAIT_SECONDS, until
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import Stopped

pytestmark = [pytest.mark.slots, pytest.mark.server]


def test_a_cancelled_run_saves_first(scene: Scene) -> None:
    """After Cancel the last batch is saved, the state is Cancelled, and no process is left. The
    state's message says where it saved, although the worker has set its own in between."""
    assert_a_cancel_saves(scene)
    assert scene.history().count("Cancelled") == 3
    message = scene.run()["state"]["message"]
    assert f"; saved at batch {scene.saved()}, checkpoint " in message


@pytest.mark.long
def test_a_preempted_run_resumes_by_itself(scene: Scene) -> None:
    """After SIGTERM to its driver it saves, goes back into its queue, and resumes from there."""
    before = scene.driver()
    scene.signal_driver(signal.SIGTERM)
    assert wait_until_gone([before], WAIT_SECONDS) == []
    saved = scene.saved()
    scene.until_resumed(saved, saved)
    assert scene.state() == "Running"


@pytest.mark.long
def test_a_suspended_run_waits_until_it_is_resumed(scene: Scene) -> None:
    """After Suspend it is saved and no process is left; after Resume it continues from there."""
    ports = scene.ports()
    with scene.server.configured(), get_client(sync_client=True) as client:
        client.set_flow_run_state(UUID(scene.run_id), Suspended(timeout_seconds=600))
    until(lambda: not scene.processes(), "no process")
    assert_nothing_left(scene, ports)
    saved = assert_saved_where_it_ended(scene)
    assert scene.state() == "Suspended"
    with scene.server.configured():
        resume_flow_run(UUID(scene.run_id))
    scene.until_resumed(saved, saved)


@pytest.mark.long  # test_stop_monitor has the timer and the final state
def test_a_time_budget_that_is_over(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run saves and completes early. Before there is anything to save, it ends at once."""
    monkeypatch.setattr(trialflow.flows.lifecycle.stop_monitor, "POLL_SECONDS", 0.1)

    def within(seconds: float) -> Any:
        return toy_config(
            here, ENDLESS, scheduling_unit=ENDLESS, resources={"slots_per_trial": 1},
            stopping={"time_budget_seconds": seconds},
        )  # fmt: skip

    with pytest.raises(Stopped, match=r"ranks were starting|nothing to save"):
        train(within(0.2))
    result = train_until_stopped(within(15), 15)
    assert result.stopped_early
    (manifest,) = CheckpointStore(f"file://{here}/checkpoints").list(result.trial)
    assert manifest.progress.batches_trained == result.batches_trained > 0
