"""Which checkpoints the retention policy keeps, and the reasons it gives."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from tests.trial_core.checkpoint.retention.histories import kept, saved
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.retention_policy import RetentionPolicy, decide
from trial_core.schedule.sequencer import Progress
from trial_core.schedule.units import Batch, Epoch, EpochLength

KEEP_NONE = RetentionPolicy(save_trial_best=0, save_trial_latest=0)


def batches_kept(manifests: list[Manifest], policy: RetentionPolicy, **needs: Any) -> list[int]:
    stay = kept(manifests, policy, **needs)
    return [each.progress.batches_trained for each in manifests if each.uuid in stay]


LOSSES = [saved(7, 0.5), saved(14, 0.2), saved(21, 0.3), saved(28, 0.4), saved(35, 0.9)]


@pytest.mark.parametrize(
    ("rules", "batches"),
    [
        ({}, [14, 35]),
        ({"save_trial_best": 2}, [14, 21, 35]),
        ({"save_trial_best": 0, "save_trial_latest": 2}, [28, 35]),
        ({"save_trial_best": 2, "save_trial_latest": 0, "smaller_is_better": False}, [7, 35]),
        ({"save_trial_best": 0, "save_trial_latest": 0}, []),
        ({"save_trial_best": 9, "save_trial_latest": 0}, [7, 14, 21, 28, 35]),
    ],
)
def test_best_and_latest_of_a_trial(rules: dict[str, Any], batches: list[int]) -> None:
    """A checkpoint may be both."""
    assert batches_kept(LOSSES, RetentionPolicy(metric="loss", **rules)) == batches


def test_the_best_of_an_experiment_are_of_all_trials() -> None:
    """Here both are of one trial."""
    manifests = [saved(7, 0.5), saved(7, 0.1, "two"), saved(14, 0.2, "two"), saved(7, 0.9, "three")]
    policy = RetentionPolicy(0, 0, save_experiment_best=2, metric="loss")
    assert kept(manifests, policy) == {"two-7-x", "two-14-x"}


def test_only_its_own_validation_makes_a_checkpoint_the_best() -> None:
    """A later checkpoint carries the metrics of an earlier validation too."""
    stale = saved(9, progress=Progress(9, validated_at=7), metrics={"validation": {"loss": 0.1}})
    policy = RetentionPolicy(1, 0, metric="loss")
    assert batches_kept([saved(7, 0.1), stale], policy) == [7]
    assert batches_kept([stale], policy) == []


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, "low", True, [0.1], {"mean": 0.1}])
def test_an_incomparable_metric_is_never_the_best(loss: Any) -> None:
    """Nor is a checkpoint without the metric."""
    manifests = [saved(7, loss), saved(14, 0.5), saved(21, None)]
    for smaller in (True, False):
        policy = RetentionPolicy(1, 0, metric="loss", smaller_is_better=smaller)
        assert batches_kept(manifests, policy) == [14]


def test_of_equal_metrics_the_earlier_is_the_best() -> None:
    """As in the sequencer, where only a better metric is an improvement."""
    manifests = [saved(7, 0.25), saved(14, 0.25), saved(21, 0.25)]
    for smaller in (True, False):
        policy = RetentionPolicy(1, 0, metric="loss", smaller_is_better=smaller)
        assert batches_kept(manifests, policy) == [7]


def test_without_a_metric_every_validated_checkpoint_stays() -> None:
    """Unless no best checkpoint is to be kept."""
    manifests = [saved(7, 0.5), saved(14), saved(21, 0.2), saved(28), saved(35)]
    assert batches_kept(manifests, RetentionPolicy()) == [7, 21, 35]
    assert batches_kept(manifests, RetentionPolicy(save_trial_best=0)) == [35]


def test_a_run_that_went_back_keeps_what_it_saves() -> None:
    """The checkpoint at 20 is damaged; the run has resumed from 10 and saved at 15. Both are latest
    until it saves at 20 again."""
    policy = RetentionPolicy(0, 1)
    back = [saved(10, second=1), saved(20, second=2), saved(15, second=3)]
    assert kept(back, policy) == {"one-20-2", "one-15-3"}
    assert kept([*back, saved(20, second=4)], policy) == {"one-20-4"}


def test_of_the_same_state_saved_twice_the_later_is_the_best() -> None:
    """A run that has resumed from before a damaged checkpoint saves its best state again."""
    manifests = [saved(20, 0.1, second=2), saved(20, 0.1, second=4), saved(25, 0.3, second=5)]
    assert kept(manifests, RetentionPolicy(1, 0, metric="loss")) == {"one-20-4"}


@pytest.mark.parametrize(
    ("every", "batches"),
    [
        (Batch(10), [14, 21, 35]),  # the first at or after 10, 20 and 30
        (Batch(7), [7, 14, 21, 28, 35]),
        (Batch(36), []),
        (Epoch(1), [14, 28]),  # an epoch has 13.5 batches
        (Epoch(2), [28]),
    ],
)
def test_keep_every(every: Batch | Epoch, batches: list[int]) -> None:
    """The first checkpoint at or after each multiple stays, whatever the checkpoint period."""
    epoch = EpochLength(27, 2)
    manifests = [msgspec.structs.replace(each, epoch=epoch) for each in LOSSES]
    assert batches_kept(manifests, RetentionPolicy(0, 0, keep_every=every)) == batches


def test_epochs_of_unknown_length_keep_all() -> None:
    """The reason says so."""
    decisions = decide(LOSSES, RetentionPolicy(0, 0, keep_every=Epoch(2)))
    assert all(decision.keep and "not known" in decision.why for decision in decisions)


def test_a_running_trial_keeps_its_newest_checkpoints() -> None:
    """The one with the most batches and the one saved last, whatever the rules."""
    back = [saved(10, second=1), saved(20, second=2), saved(15, second=3)]
    others = [saved(10, trial="two"), saved(20, trial="two")]
    assert kept([*back, *others], KEEP_NONE, running=("one",)) == {"one-20-2", "one-15-3"}


def test_a_needed_checkpoint_stays() -> None:
    """Its reason is the given one."""
    (decision, *others) = decide(LOSSES, KEEP_NONE, needed={"one-7-x": "pinned by ann: figure 3"})
    assert decision.keep
    assert decision.why == "pinned by ann: figure 3"
    assert not any(other.keep for other in others)


def test_every_decision_has_a_reason() -> None:
    """To keep: the rules. To delete: its place in each order, and how many are kept."""
    nan = saved(42, math.nan)
    stale = saved(44, progress=Progress(44, validated_at=42))
    policy = RetentionPolicy(metric="loss", save_experiment_best=1, keep_every=Batch(30))
    assert [decision.why for decision in decide([*LOSSES, nan, stale], policy)] == [
        "7th latest, and 1 is kept; 4th best of its trial (loss 0.5), and 1 is kept; "
        "4th best of its experiment, and 1 is kept; not the first in 30 batches",
        "best of its trial (loss 0.2); best of its experiment (loss 0.2)",
        "5th latest, and 1 is kept; 2nd best of its trial (loss 0.3), and 1 is kept; "
        "2nd best of its experiment, and 1 is kept; not the first in 30 batches",
        "4th latest, and 1 is kept; 3rd best of its trial (loss 0.4), and 1 is kept; "
        "3rd best of its experiment, and 1 is kept; not the first in 30 batches",
        "the first at or after 30 batches",
        "2nd latest, and 1 is kept; loss nan; not the first in 30 batches",
        "latest of its trial",
    ]


@pytest.mark.parametrize("rules", [{"save_trial_best": -1}, {"save_trial_latest": -3}])
def test_a_negative_number_is_refused(rules: dict[str, int]) -> None:
    """At least 0 are kept."""
    with pytest.raises(ValueError, match="at least 0"):
        RetentionPolicy(**rules)
