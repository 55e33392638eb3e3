"""The warning of changed settings that a restore overrides."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.manifests import new_manifest
from trial_core.checkpoint.resume_point import Restore, ResumePoint
from trial_core.config import ExperimentConfig
from trial_core.driver.changed_settings import override_warning

OPTIMIZER = "optimizer 0 (SGD): lr 0.1 (not 0.2)"
SCHEDULER = "scheduler 0 (StepLR): gamma 0.5 (not 0.9)"


def warning(
    saved: dict[str, Any],
    given: dict[str, Any],
    optimizers: tuple[str, ...] = (OPTIMIZER,),
    schedulers: tuple[str, ...] = (),
    restore: Restore = "everything",
    lengths: tuple[int, int] = (4, 4),
) -> str:
    """The warning; empty if there is none."""
    before, now = (
        experiment(length, each) for length, each in zip(lengths, (saved, given), strict=True)
    )
    manifest = new_manifest(
        uuid="4f0c21aa-0000-4000-8000-000000000000",
        hyperparameters=before.hyperparameters, config=before.digested(),
    )  # fmt: skip
    point = ResumePoint(checkpoint=manifest, restore=restore)
    return override_warning(point, now, optimizers, schedulers) or ""


def experiment(batches: int, hyperparameters: dict[str, Any]) -> ExperimentConfig:
    return ExperimentConfig(
        name="toy", entrypoint="toy:Trial", hyperparameters=hyperparameters,
        searcher={"name": "single", "metric": "loss", "max_length": {"batches": batches}},
    )  # fmt: skip


def test_changes_and_what_counts_instead() -> None:
    """Both values of each, and how a new trial takes the new ones."""
    assert warning({"lr": 0.1}, {"lr": 0.2}) == (
        "changed since the checkpoint: lr 0.1 -> 0.2. But the restore brought back the "
        "checkpoint's values, which count: optimizer 0 (SGD): lr 0.1 (not 0.2). To train "
        "with the new ones, begin a new trial with the checkpoint's weights: without --resume (in "
        "a script, without latest_checkpoint), with "
        "searcher.source_checkpoint_uuid=4f0c21aa-0000-4000-8000-000000000000 and "
        "searcher.source_weights_only=true"
    )


@pytest.mark.parametrize(
    ("saved", "given", "text"),
    [
        ({"opt": {"lr": 0.1, "wd": 1}}, {"opt": {"lr": 0.2, "wd": 1}}, "opt.lr 0.1 -> 0.2"),
        ({}, {"depth": 12}, "depth 12, which is new"),
        ({"depth": 12}, {}, "depth 12, which is gone"),
        ({"a": {"b": 1}}, {"a": 2}, "a.b 1, which is gone, a 2, which is new"),
        ({"betas": [0.9, 0.99]}, {"betas": (0.9, 0.999)}, "betas [0.9, 0.99] -> [0.9, 0.999]"),
        ({"opt": "adam"}, {"opt": None}, "opt adam -> None"),
        (
            {str(i): 0 for i in range(9)}, {str(i): 1 for i in range(9)},
            "0 0 -> 1, 1 0 -> 1, 2 0 -> 1, 3 0 -> 1, 4 0 -> 1, 5 0 -> 1 and 3 more",
        ),
    ],
)  # fmt: skip
def test_how_changes_are_named(saved: dict[str, Any], given: dict[str, Any], text: str) -> None:
    """By dotted names, also those that are new or gone; the first few."""
    assert warning(saved, given).startswith(f"changed since the checkpoint: {text}. But ")


@pytest.mark.parametrize(
    ("saved", "given"),
    [
        ({"lr": 0.1}, {"lr": 0.1}),
        ({"lr": 1}, {"lr": 1.0}),
        ({"betas": [0.9, 0.99]}, {"betas": (0.9, 0.99)}),
        ({"layers": {1: "a"}}, {"layers": {"1": "a"}}),
        ({"model": {}}, {}),
    ],
)
def test_an_optimizer_may_differ_if_no_hyperparameter_has_changed(
    saved: dict[str, Any], given: dict[str, Any]
) -> None:
    """The trial may change it itself. Equal values may have another type in a manifest."""
    assert warning(saved, given) == ""


def test_a_schedule_may_differ_if_nothing_has_changed() -> None:
    """Then the trial's code has changed, or takes it from elsewhere."""
    assert warning({"lr": 0.1}, {"lr": 0.1}, schedulers=(SCHEDULER,)) == ""


def test_a_change_that_nothing_overrides() -> None:
    """It counts elsewhere, so there is nothing to say."""
    assert warning({"dropout": 0.1}, {"dropout": 0.2}, optimizers=()) == ""


def test_a_longer_training_with_the_old_schedule() -> None:
    """Only the schedule is named: the optimizer may differ because the schedule has moved on."""
    text = warning({}, {}, schedulers=(SCHEDULER,), lengths=(4, 8))
    assert text.startswith("changed since the checkpoint: searcher.max_length.batches 4 -> 8. But ")
    assert f"which count: {SCHEDULER}. To" in text
    assert warning({}, {}, lengths=(4, 8)) == ""


def test_a_new_trial_with_anothers_state() -> None:
    """It need not begin again, but may take weights alone."""
    text = warning({"lr": 0.1}, {"lr": 0.2}, restore="state")
    assert text.endswith("To train with the new ones, set searcher.source_weights_only=true")
    assert warning({"lr": 0.1}, {"lr": 0.2}, restore="weights") == ""
    assert override_warning(ResumePoint(), experiment(4, {}), [OPTIMIZER], []) is None
