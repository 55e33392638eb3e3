"""The flow `retrain` on a real server and a real registry, with fake training and validation."""

from __future__ import annotations

import contextlib
import re
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from prefect.exceptions import Abort

import trialflow.flows.evaluate
import trialflow.flows.retrain
from tests.support.prefect import PrefectServer
from tests.support.retraining import WAIT_SECONDS, Killed, RetrainHarness, stop_with
from tests.support.s3 import S3Server
from trial_core.errors import CheckpointDamaged, Stopped
from trial_core.processes.machine.run_dirs import locked_run_dir, trial_id
from trial_core.schedule.stop_requests import StopHandler

pytestmark = pytest.mark.server


def test_the_first_challenger_is_promoted(harness: RetrainHarness) -> None:
    """Without a champion, any finite metric wins. The report is a file, an object, an artifact."""
    result = harness.run()
    assert (result.promoted, result.champion, result.challenger) == (True, None, 1)
    assert (harness.champion(), harness.validated) == (1, [])
    report = harness.report(result.flow_run_id)
    assert "**version 1 promoted**" in report
    assert "loss 0.5, and there was no champion" in report
    assert Path(result.report_path).read_text() == report
    artifact = harness.report_artifact(result.flow_run_id)
    assert (artifact["key"], artifact["data"]) == (f"retraining-{harness.model}", report)


def test_a_better_challenger_is_promoted(harness: RetrainHarness) -> None:
    """It is compared with the champion's metric on the run's data, not on the champion's own."""
    old = harness.promote_by_hand(loss=0.1)
    run = harness.create_run(margin=0.1, data={"day": "2026-03-01"})
    result = harness.execute(run)
    assert result.promoted
    assert (result.champion_value, result.challenger_value) == (0.7, 0.5)
    assert harness.validated == [harness.registry.version(harness.model, old).checkpoint]
    move = harness.moves()[-1]
    assert (move.champion, move.previous, move.run) == (2, old, str(run))
    report = harness.report(run)
    assert "| loss (decides) | 0.7 | 0.5 | -0.2 |" in report
    assert "| mean_index | 1.5 |  |  |" in report
    assert '"day": "2026-03-01"' in report


def test_a_damaged_challenger_is_not_promoted(harness: RetrainHarness) -> None:
    """The result and the report say why."""
    harness.promote_by_hand()
    harness.on_train = lambda stopping: harness.damage(harness.store.list()[-1].uuid)
    result = harness.run()
    assert not result.promoted
    assert result.why.startswith("the challenger's checkpoint cannot be used: ")
    assert (harness.champion(), len(harness.moves())) == (1, 1)
    assert "**version 1 kept, version 2 not promoted**" in harness.report(result.flow_run_id)


@pytest.mark.long
def test_a_damaged_champion(harness: RetrainHarness) -> None:
    """Nothing is trained. After the rollback that the error advises, a retry compares with the
    previous champion."""
    harness.promote_by_hand(loss=0.9)
    harness.promote_by_hand(loss=0.8)
    path = harness.damage(harness.registry.version(harness.model, 2).checkpoint)
    run = harness.create_run()
    expected = f"version 2 .*{re.escape(path)}.*`trialflow models rollback .*retry this run"
    with pytest.raises(CheckpointDamaged, match=expected):
        harness.execute(run)
    assert (harness.trained, harness.champion()) == ([], 2)
    assert "**failed: the champion, version 2" in harness.report(run)
    harness.registry.rollback(harness.model)
    result = harness.execute(run)
    assert (result.promoted, result.champion, harness.champion()) == (True, 1, 3)
    note = "- planned with champion version 2, not validated before "
    assert note in harness.report(run)


@pytest.mark.long
def test_a_plan_with_a_validated_champion_is_kept(harness: RetrainHarness) -> None:
    """A later attempt does not compare with another champion."""
    harness.promote_by_hand()
    run = harness.create_run()

    def fail(stopping: StopHandler) -> None:
        raise RuntimeError("died")

    harness.on_train = fail
    with pytest.raises(RuntimeError):
        harness.execute(run)
    harness.promote_by_hand(loss=0.1)
    harness.on_train = lambda stopping: None
    result = harness.execute(run)
    assert (result.promoted, result.champion, harness.champion()) == (False, 1, 2)


@pytest.mark.long
def test_two_runs_promote_at_once(harness: RetrainHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the lock of the model, the registry promotes one; the other run names the winner."""
    monkeypatch.setattr(
        trialflow.flows.retrain, "model_lock", lambda *_, **__: contextlib.nullcontext()
    )
    harness.promote_by_hand()
    both_have_trained = threading.Barrier(2)
    harness.on_train = lambda stopping: both_have_trained.wait(WAIT_SECONDS)
    runs = [harness.create_run(), harness.create_run()]
    futures = [harness.execute_in_thread(run) for run in runs]
    results = [future.result(WAIT_SECONDS) for future in futures]
    (winner,) = (result for result in results if result.promoted)
    (loser,) = (result for result in results if not result.promoted)
    assert (harness.champion(), len(harness.moves())) == (winner.challenger, 2)
    assert "the champion has changed since the plan" in harness.report(loser.flow_run_id)
    assert f"version {winner.challenger} " in loser.why


@pytest.mark.long
def test_the_champion_changes_between_attempts(harness: RetrainHarness) -> None:
    """The later attempt trains nothing, names the change, and completes."""
    harness.promote_by_hand()
    run = harness.create_run()

    def die(stopping: StopHandler) -> None:
        raise Killed

    harness.on_train = die
    with pytest.raises(Killed):
        harness.execute(run)
    assert (len(harness.validated), len(harness.trained)) == (1, 1)
    other = harness.promote_by_hand(loss=0.1)
    result = harness.execute(run)
    assert (result.promoted, result.challenger, len(harness.trained)) == (False, None, 1)
    assert result.why.startswith("the champion has changed since the plan: ")
    assert f"promoted version {other} instead of version 1 at " in result.why
    assert "nothing was trained" in harness.report(run)
    assert harness.champion() == other
    assert [event["event"] for event in harness.events()] == ["trialflow.model.kept"]


def test_validation_waits_for_the_folder_of_a_dying_attempt(
    harness: RetrainHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A presumed-dead attempt keeps the validation's folder until it notices: a run of a
    deployment waits for it."""

    class Launched(Exception):
        pass

    def launch(run: Any, placement: Any) -> None:
        raise Launched

    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "by-a-worker")
    monkeypatch.setattr(trialflow.flows.evaluate, "launch_slots", launch)
    for name in ("get_run_logger", "logger_finder"):
        monkeypatch.setattr(trialflow.flows.evaluate, name, lambda: None)
    config, checkpoint = harness.config(), harness.save_checkpoint("trial", 0.5).uuid
    folder = locked_run_dir(trial_id(f"{config.name} evaluation", "unique"))
    folder.__enter__()
    end = threading.Timer(0.5, folder.__exit__, (None, None, None))
    end.start()
    with pytest.raises(Launched), StopHandler(1.0) as stopping:
        trialflow.flows.evaluate.evaluate_checkpoint(config, checkpoint, "unique", stopping, {})
    end.join()


def test_a_late_run_is_skipped(harness: RetrainHarness) -> None:
    """Its message says how late it is."""
    an_hour_ago = datetime.now(timezone.utc) - timedelta(hours=1)
    late = harness.create_run(scheduled_time=an_hour_ago, max_lateness_seconds=60)
    harness.execute(late)
    name, message = harness.state_of(late)
    assert name == "Skipped"
    assert "1 h 00 min ago; retraining.max_lateness_seconds is 60" in message
    assert harness.trained == []


@pytest.mark.long
def test_data_of_the_scheduled_time(harness: RetrainHarness) -> None:
    """Templates are rendered for the scheduled time; data given to the run is not rendered."""
    harness.experiment["data"] = {
        "end": "{{ scheduled_time.date() }}",
        "window": {"days": 7, "begin": "{{ (scheduled_time - timedelta(days=7)).date() }}"},
    }
    at = datetime(2026, 3, 1, 3, tzinfo=timezone.utc)
    result = harness.execute(harness.create_run({"window": {"days": 8}, "new": "{{ x }}"}, at))
    expected = {
        "end": "2026-03-01", "window": {"days": 8, "begin": "2026-02-22"}, "new": "{{ x }}"
    }  # fmt: skip
    assert result.data == expected
    assert harness.trained[0].data == expected


def stop_for_time(stopping: StopHandler) -> None:
    stop_with(stopping, "time budget", "60 s are over")


@pytest.mark.long
def test_a_run_stopped_while_it_trains(harness: RetrainHarness) -> None:
    """It promotes nothing and says so; a later attempt decides."""
    harness.promote_by_hand()
    harness.on_train = stop_for_time
    run = harness.create_run()
    result = harness.execute(run)
    assert (result.promoted, result.stop_reason) == (False, "time budget (60 s are over)")
    assert "**stopped: time budget (60 s are over)**" in harness.report(run)
    assert harness.champion() == 1
    harness.on_train = lambda stopping: None
    assert harness.execute(run).promoted
    assert len(harness.validated) == 1


@pytest.mark.long
def test_a_run_stopped_while_the_champion_is_validated(
    harness: RetrainHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends like a run stopped while it trains."""
    harness.promote_by_hand()

    def validate(
        config: Any, checkpoint: str, run: str, stopping: StopHandler, devices: Any
    ) -> None:
        stop_for_time(stopping)
        raise Stopped("time budget (60 s are over), before the validation had ended")

    run = harness.create_run()
    with monkeypatch.context() as patch:
        patch.setattr(trialflow.flows.retrain, "evaluate_checkpoint", validate)
        result = harness.execute(run)
    assert (result.promoted, result.stop_reason) == (False, "time budget (60 s are over)")
    assert harness.state_of(run)[0] == "Completed"
    assert "**stopped: time budget (60 s are over)**" in harness.report(run)


@pytest.mark.long
def test_the_time_budget_ends_after_the_training(harness: RetrainHarness) -> None:
    """The trained challenger is compared and promoted."""
    harness.promote_by_hand()
    harness.on_train, harness.finishes_despite_stop = stop_for_time, True
    result = harness.run()
    assert (result.promoted, result.stop_reason, harness.champion()) == (True, None, 2)


@pytest.mark.long
def test_suspended_after_the_training(harness: RetrainHarness) -> None:
    """Nothing is promoted after a stop request; the version is registered for the next attempt."""
    harness.on_train = lambda stopping: stop_with(stopping, "suspended", "in Prefect")
    harness.finishes_despite_stop = True
    run = harness.create_run()
    with pytest.raises(Abort):
        harness.execute(run)
    assert (harness.champion(), len(harness.registry.versions(harness.model))) == (None, 1)
    harness.on_train = lambda stopping: None
    assert harness.execute(run).promoted


@pytest.mark.long
@pytest.mark.gateway
def test_retrain_on_s3(
    prefect_server: PrefectServer,
    ceph_s3: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two retrainings and a rollback on a real gateway; no credentials are published."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    storage = {"url": f"{ceph_s3.new_bucket()}/runs", "options": ceph_s3.options}
    harness = RetrainHarness(prefect_server, tmp_path, storage)
    harness.replace_ranks(monkeypatch)
    with prefect_server.configured():
        first = harness.run()
        harness.challenger_loss = 0.4
        run = harness.create_run()
        second = harness.execute(run)
        assert harness.execute(run) == second
    assert (first.promoted, second.promoted, second.champion) == (True, True, 1)
    assert [(move.champion, move.previous) for move in harness.moves()] == [(1, None), (2, 1)]
    assert "**version 2 promoted**" in harness.report(run)
    assert harness.registry.rollback(harness.model).champion == 1
    secret = ceph_s3.options["secret"]
    assert secret not in f"{second.as_json_data()} {harness.report(run)}"
