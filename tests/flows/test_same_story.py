"""The flow and `Trainer.fit` tell the same story: their order is written twice, and held here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fitting import fit_toys
from tests.support.flow import train
from tests.support.hook_story import (
    CHECKPOINT,
    FRESH,
    FRESH_BATCHES,
    RESUMED,
    RESUMED_BATCHES,
    UPLOAD_END,
    VALIDATION,
    WORKLOAD,
    assert_uploads_end_in_time,
    calls,
    hparams,
    spelt,
    told,
    without_uploads,
)
from tests.support.slots import ONE_TWO_FOUR, toy_config

pytestmark = [pytest.mark.slots, pytest.mark.server]

DIFFERENT_EACH_TIME = ("uuid", "folder")


def story(record: Path, rank: int) -> list[dict[str, Any]]:
    """Every call on a rank, with its arguments; but not when uploads end, which is chance."""
    return [
        {name: value for name, value in line.items() if name not in DIFFERENT_EACH_TIME}
        for line in told(record, rank)
        if line["call"] != UPLOAD_END
    ]


@pytest.mark.parametrize("ranks", ONE_TWO_FOUR)
def test_every_hook_has_its_place_in_the_flow(here: Path, ranks: int) -> None:
    """On every rank, in a run and in one that goes on from its checkpoint; and the uuid that
    callbacks are told is the one that the flow gives."""

    def run(name: str, batches: int, trial: str | None = None) -> Any:
        config = toy_config(
            here, batches, entrypoint="hook_trials:Told", scheduling_unit=WORKLOAD,
            min_validation_period={"batches": VALIDATION}, perform_initial_validation=True,
            min_checkpoint_period={"batches": CHECKPOINT}, checkpoint_policy="none",
            resources={"slots_per_trial": ranks}, hyperparameters=hparams(ranks, here / name),
        )  # fmt: skip
        return train(config, trial)

    first = run("fresh", FRESH_BATCHES)
    run("resumed", RESUMED_BATCHES, first.trial)
    for rank in range(ranks):
        for name, expected in (("fresh", FRESH), ("resumed", RESUMED)):
            seen = calls(here / name, rank)
            assert without_uploads(seen) == without_uploads(spelt(expected))
            assert_uploads_end_in_time(seen)
        assert told(here / "fresh", rank, UPLOAD_END)[-1]["uuid"] == first.checkpoint_uuid
        (started,) = told(here / "resumed", rank, "on_trial_startup")
        assert started["uuid"] == first.checkpoint_uuid


@pytest.mark.parametrize("ranks", ONE_TWO_FOUR)
def test_everything_is_told_the_same(here: Path, ranks: int) -> None:
    """Mutually prime periods, a validation before the first batch, the best ones saved, epochs that
    end in between: the same calls with the same arguments in the same order, on every rank."""
    config = toy_config(
        here, 16, entrypoint="hook_trials:Told", scheduling_unit=7,
        min_validation_period={"batches": 3}, min_checkpoint_period={"batches": 5},
        perform_initial_validation=True, checkpoint_policy="best",
        resources={"slots_per_trial": ranks}, hyperparameters=hparams(ranks, here / "flow"),
    )  # fmt: skip
    train(config)
    fit = {
        "max_length": {"batches": 16}, "reporting_period": {"batches": 7},
        "validation_period": {"batches": 3}, "checkpoint_period": {"batches": 5},
        "step_zero_validation": True,
    }  # fmt: skip
    init = {
        "hparams": hparams(ranks, here / "fit"),
        "exp_conf": {"searcher": {"metric": "loss"}},
    }
    run = {"trial": "hook_trials:Told", "init": init, "fit": fit}
    fit_toys("torchrun", here / "fit", run, ranks=ranks)

    for rank in range(ranks):
        expected, seen = story(here / "flow", rank), story(here / "fit", rank)
        assert len(expected) > 100
        assert seen == expected
        flow_uploads, fit_uploads = (
            told(here / each, rank, UPLOAD_END) for each in ("flow", "fit")
        )
        assert len(flow_uploads) == len(fit_uploads) > 3
