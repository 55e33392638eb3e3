"""The journal of a retraining."""

from __future__ import annotations

import math
import uuid as uuids
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.support.interleaving import all_orders, interleave
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import RegistryError
from trial_core.models.journal import (
    Challenger,
    Champion,
    Journal,
    PromotionDecision,
    RetrainingPlan,
    StageRecord,
)

PLAN = RetrainingPlan(
    trial="toy-0000beef",
    scheduled_at="2026-03-01T03:00:00+00:00",
    begun_at="2026-03-01T03:00:07.500000Z",
    data={"begin": "2026-02-22", "days": 7},
    champion=3,
    move=5,
)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """The journal of run-1."""
    return open_journal(tmp_path)


def open_journal(folder: Path, run: str = "run-1") -> Journal:
    return Journal(CheckpointStore(f"file://{folder}"), "gpt", run)


def test_a_later_attempt_reads_the_journal(journal: Journal, tmp_path: Path) -> None:
    """Other runs do not."""
    assert journal.plan() is None
    journal.write_plan(PLAN)
    assert open_journal(tmp_path).plan() == PLAN
    assert open_journal(tmp_path, "run-2").plan() is None
    assert PLAN.lateness_seconds == 7.5


def test_the_last_plan_is_valid(journal: Journal) -> None:
    """A renewed plan and its champion are new records."""
    renewed = msgspec.structs.replace(PLAN, champion=4, renewed=1)
    journal.write_plan(PLAN)
    journal.write_plan(renewed)
    assert journal.plan() == renewed
    assert journal.read("plan-01", RetrainingPlan) == renewed
    assert (PLAN.champion_record, renewed.champion_record) == ("champion", "champion-01")


def test_the_first_record_is_valid(journal: Journal, tmp_path: Path) -> None:
    """Two concurrent attempts continue with the record that was written first."""
    first = journal.write("verdict", PromotionDecision(promoted=True, why="better"))
    second = open_journal(tmp_path).write("verdict", PromotionDecision(promoted=False, why="worse"))
    assert first == second == PromotionDecision(promoted=True, why="better")


def test_a_stage_is_computed_once(journal: Journal, tmp_path: Path) -> None:
    """A later attempt reads its result."""
    for journal_of_attempt, value in ((journal, 0.5), (open_journal(tmp_path), 0.7)):
        champion = journal_of_attempt.read_or_compute(
            "champion", Champion, lambda value=value: Champion(metrics={}, value=value)
        )
        assert champion.value == 0.5


def test_numbers_that_json_lacks(journal: Journal) -> None:
    """NaN and infinities are read as they were written."""
    journal.write(
        "champion", Champion(metrics={"loss": math.nan, "gap": -math.inf}, value=math.nan)
    )
    champion = journal.read("champion", Champion)
    assert champion is not None
    assert math.isnan(champion.value)
    assert math.isnan(champion.metrics["loss"])
    assert champion.metrics["gap"] == -math.inf
    journal.write("challenger", Challenger(version=1, value=math.inf))
    assert journal.read("challenger", Challenger) == Challenger(version=1, value=math.inf)


def test_a_record_of_another_kind(journal: Journal) -> None:
    """The error has its URL, the problem, and what to do."""
    journal.mark_done("plan", "something")
    assert journal.read("plan", StageRecord) is not None
    with pytest.raises(RegistryError, match=r"plan\.json cannot be read: .*trial.*start a new run"):
        journal.plan()


def test_an_incomplete_record(journal: Journal, tmp_path: Path) -> None:
    """The same: no storage shows a record while it is written."""
    journal.write_plan(PLAN)
    path = tmp_path / "models/gpt/retrainings/run-1/plan.json"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(RegistryError, match=r"plan\.json cannot be read: .*start a new run"):
        journal.plan()


def test_two_attempts_have_one_plan() -> None:
    """In any order of requests both get the plan that is stored."""
    later = msgspec.structs.replace(PLAN, trial="toy-0000cafe")

    def plans(plan: RetrainingPlan) -> Callable[[CheckpointStore], RetrainingPlan]:
        return lambda store: Journal(store, "gpt", "run-1").write_plan(plan)

    for order in all_orders(2, 2):
        url = f"memory://{uuids.uuid4()}"
        valid = interleave(url, plans(PLAN), plans(later), map(bool, order))
        stored = Journal(CheckpointStore(url), "gpt", "run-1").plan()
        assert valid == (stored, stored)


@pytest.mark.parametrize("run", ["../../elsewhere", "/elsewhere", "a/b", ""])
def test_an_id_that_leads_elsewhere_is_refused(tmp_path: Path, run: str) -> None:
    """The registry's objects name the runs whose journals are read."""
    with pytest.raises(RegistryError, match="cannot be the id of a retraining"):
        open_journal(tmp_path, run).read("outcome", PromotionDecision)
