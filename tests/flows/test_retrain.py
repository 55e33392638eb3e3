"""Decisions of the flow `retrain` that need no server."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trialflow.flows.retrain
from tests.support.manifests import commit_files
from tests.support.slots import toy_config
from trial_core.checkpoint.retention.claims import RunClaim, claims
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import RankFailed, Stalled
from trial_core.models.journal import Challenger, RetrainingPlan
from trial_core.schedule.stop_requests import StopHandler
from trialflow.flows.evaluate import EvaluateResult
from trialflow.flows.retrain import (
    RetrainingAttempt,
    claim_challenger,
    describe_lateness,
    evaluate_with_restarts,
)
from trialflow.tasks.retrain import RetrainingRun

PLAN = RetrainingPlan(
    trial="toy-1", scheduled_at="2026-03-01T03:00:00Z", begun_at="2026-03-01T03:00:00Z",
    data={}, champion=1, move=1,
)  # fmt: skip


def rank_failure(**how: Any) -> RankFailed:
    return RankFailed(rank=0, host="here", during="validation", **how)


DIED, HUNG = rank_failure(signal_name="SIGKILL"), Stalled("no progress")
RAISED = rank_failure(error_type="ValueError", error_message="no such column")


@pytest.mark.parametrize(
    ("failures", "raised", "evaluations"),
    [
        ([DIED, HUNG], None, 3),
        ([DIED, HUNG, DIED], DIED, 3),
        ([RAISED], RAISED, 1),
    ],
)
def test_the_champion_is_evaluated_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failures: list[Exception],
    raised: Exception | None,
    evaluations: int,
) -> None:
    """After ranks died or hung, up to `max_restarts` times; not after a rank raised."""
    evaluated, outstanding = [], list(failures)

    def evaluate(config: Any, checkpoint: str, *_: Any) -> EvaluateResult:
        evaluated.append(checkpoint)
        if outstanding:
            raise outstanding.pop(0)
        return EvaluateResult(checkpoint, "toy-1", 7, {"loss": 0.5})

    monkeypatch.setattr(trialflow.flows.retrain, "evaluate_checkpoint", evaluate)
    monkeypatch.setattr(
        trialflow.flows.retrain, "get_run_logger", lambda: logging.getLogger("test")
    )
    config = toy_config(tmp_path, max_restarts=2, retraining={})
    attempt = RetrainingAttempt(RetrainingRun(config, "run-1"), PLAN, None, StopHandler(1.0), {})
    if raised is None:
        assert evaluate_with_restarts(attempt, config, "uuid").metrics == {"loss": 0.5}
    else:
        with pytest.raises(type(raised)):
            evaluate_with_restarts(attempt, config, "uuid")
    assert evaluated == ["uuid"] * evaluations


@pytest.mark.parametrize(("limit_seconds", "is_late"), [(60, True), (7200, False), (None, False)])
def test_lateness(tmp_path: Path, limit_seconds: float | None, is_late: bool) -> None:
    """A run an hour late is too late only for a limit below an hour."""
    config = toy_config(tmp_path, retraining={"max_lateness_seconds": limit_seconds})
    scheduled_time = datetime.now(timezone.utc) - timedelta(hours=1)
    lateness = describe_lateness(RetrainingRun(config, "run-1"), scheduled_time)
    assert (lateness is not None) is is_late


def test_the_challengers_checkpoint_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If it has been deleted, the run continues: the promotion refuses it."""
    logger = logging.getLogger("retrain")
    monkeypatch.setattr(trialflow.flows.retrain, "get_run_logger", lambda: logger)
    store = CheckpointStore(str(tmp_path))
    retraining: Any = SimpleNamespace(store=store)
    saved = commit_files(store)
    claim = RunClaim(store, "toy-1-retraining")
    claim_challenger(claim, retraining, Challenger(checkpoint=saved.uuid))
    assert [each.needs for each in claims(store)] == [[saved.uuid]]
    store.delete(saved)
    claim_challenger(claim, retraining, Challenger(checkpoint=saved.uuid))
    assert "the challenger's checkpoint is not claimed: no checkpoint" in caplog.text
    claim_challenger(claim, retraining, Challenger(why_none="stopped"))
