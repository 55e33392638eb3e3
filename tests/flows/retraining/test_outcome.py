"""The report, event and callbacks of a retraining."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.exceptions import Abort

import trialflow.flows.retraining.outcome
from tests.support.events import check_fields, related
from tests.support.retraining import WAIT_SECONDS, RetrainHarness
from tests.support.wire import Wire, mend_at_the_end
from trial_core.errors import ConfigError, Stopped, StorageError, Superseded
from trial_core.models.journal import Journal
from trial_core.schedule.stop_requests import StopHandler
from trialflow.tasks.retrain import CallbackFailed

pytestmark = pytest.mark.server


@pytest.mark.long
def test_events(harness: RetrainHarness) -> None:
    """Each run sends one event, promoted or kept, with the fields of its result."""
    first = harness.run(data={"day": 1})
    harness.challenger_loss = 0.8
    second = harness.run()
    assert (second.promoted, harness.champion()) == (False, 1)
    assert "**version 1 kept, version 2 not promoted**" in harness.report(second.flow_run_id)
    for event in (found := harness.events(at_least=2)):
        check_fields(event)
        assert related(event)["trial"] == f"trialflow.trial.{event['payload']['trial']}"
    events = {event["event"]: event["payload"] for event in found}
    assert set(events) == {"trialflow.model.promoted", "trialflow.model.kept"}
    (moved,) = harness.events(prefix="trialflow.champion.")
    check_fields(moved)
    assert (moved["payload"]["version"], moved["payload"]["previous"]) == (1, None)
    payload = events["trialflow.model.promoted"]
    assert payload["promoted"]
    assert (payload["champion"], payload["challenger"]) == (None, 1)
    assert (payload["data"], payload["checkpoint_uuid"]) == ({"day": 1}, first.checkpoint_uuid)
    why = "worse by 0.1: the challenger's loss 0.8 against the champion's 0.7"
    assert events["trialflow.model.kept"]["why"] == why


def test_a_missing_callback(harness: RetrainHarness) -> None:
    """The run fails before anything is trained."""
    expected = r"retraining\.callbacks\[0\]: absent:tell cannot be imported: ModuleNotFoundError"
    with pytest.raises(ConfigError, match=expected):
        harness.run(callbacks=["absent:tell"])
    assert harness.trained == []


def test_callbacks(harness: RetrainHarness) -> None:
    """Each gets the outcome. A failed one fails the run after the promotion, and a retry calls
    only that one again."""
    code = harness.write_callbacks(
        "import json, pathlib\n"
        "def broken(outcome):\n"
        "    pathlib.Path('calls').open('a').write('broken\\n')\n"
        "    raise ValueError('no such channel')\n"
        "def tell(outcome):\n"
        "    pathlib.Path('calls').open('a').write('tell\\n')\n"
        "    pathlib.Path('outcome.json').write_text(json.dumps(outcome))\n"
    )
    run = harness.create_run(callbacks=["hooks:broken", "hooks:tell"])
    expected = r"version 1 promoted .*hooks:broken: ValueError: no such channel"
    with pytest.raises(CallbackFailed, match=expected):
        harness.execute(run)
    assert harness.champion() == 1
    outcome = json.loads((code / "outcome.json").read_text())
    assert {"model": harness.model, "promoted": True, "challenger": 1}.items() <= outcome.items()
    assert "Callback hooks:broken failed: ValueError: no such channel" in harness.report(run)
    with pytest.raises(CallbackFailed):
        harness.execute(run)
    assert (code / "calls").read_text().split() == ["broken", "tell", "broken"]
    assert (len(harness.moves()), len(harness.trained)) == (1, 1)


@pytest.mark.long
def test_a_callback_that_hangs(harness: RetrainHarness) -> None:
    """It is killed after its timeout and counts as failed; the promotion stands."""
    harness.write_callbacks("import time\ndef hang(outcome):\n    time.sleep(600)\n")
    with pytest.raises(CallbackFailed, match="hooks:hang: killed: it took longer than"):
        harness.run(callbacks=["hooks:hang"], callback_timeout_seconds=2)
    assert harness.champion() == 1


@pytest.mark.long
def test_an_event_that_cannot_be_sent(
    harness: RetrainHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callbacks are still called; the run fails, and a retry sends the event."""
    code = harness.write_callbacks(
        "def tell(outcome):\n    open('calls', 'a').write('called\\n')\n"
    )
    run = harness.create_run(callbacks=["hooks:tell"])

    def refuse(retraining: Any, outcome: Any) -> None:
        raise httpx.ConnectError("no server")

    with monkeypatch.context() as patch:
        patch.setattr(trialflow.flows.retraining.outcome, "send_event", refuse)
        with pytest.raises(httpx.ConnectError):
            harness.execute(run)
    assert (code / "calls").read_text().split() == ["called"]
    assert "After the decision the run failed: no server" in harness.report(run)
    assert harness.execute(run).promoted
    assert (code / "calls").read_text().split() == ["called"]
    assert len(harness.events()) == 1


@pytest.mark.long
def test_an_event_waits_for_the_server(
    harness: RetrainHarness, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is away after the training costs the run nothing: the event arrives later."""
    mend_at_the_end(wire, monkeypatch)
    harness.on_train = lambda stopping: wire.cut()
    assert harness.run().promoted
    assert [event["event"] for event in harness.events()] == ["trialflow.model.promoted"]


@pytest.mark.long
@pytest.mark.parametrize(
    "error",
    [
        StorageError("no way"),
        pytest.param(Superseded("attempt 2 has it"), marks=pytest.mark.long),
        pytest.param(Stopped("requeued"), marks=pytest.mark.long),
    ],
)
def test_a_presumed_dead_attempt_keeps_the_report(
    harness: RetrainHarness, error: Exception
) -> None:
    """It fails after a newer attempt has promoted: the report still says so."""
    harness.promote_by_hand()
    run = harness.create_run()

    def overtake(stopping: StopHandler) -> None:
        harness.on_train = lambda stopping: None
        assert harness.execute_in_thread(run).result(WAIT_SECONDS).promoted
        raise error

    harness.on_train = overtake
    with pytest.raises((type(error), Abort)):  # Abort: Prefect noticed the newer attempt
        harness.execute(run)
    assert "**version 2 promoted**" in harness.report(run)
    assert "**version 2 promoted**" in harness.report_artifact(run)["data"]


@pytest.mark.long
def test_a_superseded_attempt_writes_no_report(harness: RetrainHarness) -> None:
    """The report of an undecided run is left to the newer attempt."""
    run = harness.create_run()

    def supersede(stopping: StopHandler) -> None:
        raise Superseded("attempt 2 has it")

    harness.on_train = supersede
    with pytest.raises(Superseded):
        harness.execute(run)
    folder = f"models/{harness.model}/retrainings/{run}"
    assert [*harness.store.storage.sizes(folder)] == [f"{folder}/plan.json"]


@pytest.mark.long
def test_a_report_that_the_storage_refuses(
    harness: RetrainHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The artifact and the file are still written."""

    def refuse(journal: Journal, text: str) -> None:
        raise StorageError("no room")

    monkeypatch.setattr(Journal, "write_report", refuse)
    result = harness.run()
    assert "**version 1 promoted**" in Path(result.report_path).read_text()
    assert "**version 1 promoted**" in harness.report_artifact(result.flow_run_id)["data"]
