"""What a retraining notes of its stages for the attempts after it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

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
def notes(tmp_path: Path) -> Journal:
    """Those of one run."""
    return notebook(tmp_path)


def notebook(folder: Path, run: str = "run-1") -> Journal:
    return Journal(CheckpointStore(f"file://{folder}"), "gpt", run)


def test_what_is_noted_is_read_by_a_later_attempt(notes: Journal, tmp_path: Path) -> None:
    """And by no other run."""
    assert notes.read("plan", RetrainingPlan) is None
    notes.note("plan", PLAN)
    assert notebook(tmp_path).read("plan", RetrainingPlan) == PLAN
    assert notebook(tmp_path, "run-2").read("plan", RetrainingPlan) is None
    assert PLAN.lateness_seconds == 7.5


def test_the_first_note_counts(notes: Journal, tmp_path: Path) -> None:
    """Of two attempts at once, both go on with what the first has noted."""
    first = notes.note("verdict", PromotionDecision(promoted=True, why="better"))
    second = notebook(tmp_path).note("verdict", PromotionDecision(promoted=False, why="worse"))
    assert first == second == PromotionDecision(promoted=True, why="better")


def test_a_stage_is_gone_through_once(notes: Journal, tmp_path: Path) -> None:
    """What it has come to is not asked again."""
    assert notes.once("champion", Champion, lambda: Champion(metrics={}, value=0.5)).value == 0.5

    def again() -> Champion:
        raise AssertionError("it is known")

    assert notebook(tmp_path).once("champion", Champion, again).value == 0.5


def test_numbers_that_json_lacks(notes: Journal) -> None:
    """Are noted as what they are."""
    notes.note("champion", Champion(metrics={"loss": math.nan, "gap": -math.inf}, value=math.nan))
    read = notes.read("champion", Champion)
    assert read is not None
    assert math.isnan(read.value)
    assert math.isnan(read.metrics["loss"])
    assert read.metrics["gap"] == -math.inf
    notes.note("challenger", Challenger(version=1, value=math.inf))
    assert notes.read("challenger", Challenger) == Challenger(version=1, value=math.inf)


def test_half_a_note(notes: Journal, tmp_path: Path) -> None:
    """Counts for nothing, and is replaced: whoever wrote it was killed."""
    notes.note("plan", PLAN)
    path = tmp_path / "models/gpt/retrainings/run-1/plan.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:40])
    assert notes.read("plan", RetrainingPlan) is None
    assert notes.note("plan", PLAN) == PLAN
    assert path.read_bytes() == whole


def test_a_note_of_something_else(notes: Journal) -> None:
    """Is refused: where it is, what is wrong, and what to do."""
    notes.done("plan", "something")
    assert notes.read("plan", StageRecord) is not None
    with pytest.raises(RegistryError, match=r"plan\.json cannot be read: .*trial.*begin a new run"):
        notes.read("plan", RetrainingPlan)
