"""Which checkpoints stay: Determined's rules, ours, and what no rule may take away."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from tests.trial_core.retention.histories import kept, saved
from trial_core.checkpoint.manifest import Manifest
from trial_core.retention.policy import RetentionPolicy, decide
from trial_core.run.sequencer import Progress
from trial_core.units import Batch, Epoch, EpochLength

NOTHING = RetentionPolicy(save_trial_best=0, save_trial_latest=0)


class Saved(Manifest, frozen=True, kw_only=True):
    """A manifest that says how long an epoch was."""

    epoch: EpochLength | None = None


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
    """So many of each, by the metric and its direction; a checkpoint may be both."""
    assert batches_kept(LOSSES, RetentionPolicy(metric="loss", **rules)) == batches


def test_the_best_of_an_experiment_are_those_of_all_trials() -> None:
    """Two of three trials together, where each trial on its own would keep one."""
    manifests = [saved(7, 0.5), saved(7, 0.1, "two"), saved(14, 0.2, "two"), saved(7, 0.9, "three")]
    policy = RetentionPolicy(0, 0, save_experiment_best=2, metric="loss")
    assert kept(manifests, policy) == {"two-7-x", "two-14-x"}


def test_only_its_own_validation_makes_a_checkpoint_the_best() -> None:
    """One saved later carries the metrics of that validation as well, but another state."""
    stale = saved(9, progress=Progress(9, validated_at=7), metrics={"validation": {"loss": 0.1}})
    policy = RetentionPolicy(1, 0, metric="loss")
    assert batches_kept([saved(7, 0.1), stale], policy) == [7]
    assert batches_kept([stale], policy) == []


@pytest.mark.parametrize("loss", [math.nan, "low", True, [0.1], {"mean": 0.1}])
def test_what_cannot_be_compared_is_not_the_best(loss: Any) -> None:
    """Neither NaN nor what is no number; nor a checkpoint that lacks the metric."""
    manifests = [saved(7, loss), saved(14, 0.5), saved(21, None)]
    for smaller in (True, False):
        policy = RetentionPolicy(1, 0, metric="loss", smaller_is_better=smaller)
        assert batches_kept(manifests, policy) == [14]


def test_infinities_are_numbers() -> None:
    """A loss that has overflowed is the worst one, and better than none."""
    policy = RetentionPolicy(1, 0, metric="loss")
    assert batches_kept([saved(7, math.inf), saved(14, 3)], policy) == [14]
    assert batches_kept([saved(7, math.inf), saved(14, math.nan)], policy) == [7]


def test_of_equals_the_earlier_is_the_best() -> None:
    """As for the sequencer: only what is better than the best so far improves on it."""
    manifests = [saved(7, 0.25), saved(14, 0.25), saved(21, 0.25)]
    for smaller in (True, False):
        policy = RetentionPolicy(1, 0, metric="loss", smaller_is_better=smaller)
        assert batches_kept(manifests, policy) == [7]


def test_without_a_metric_no_validated_checkpoint_goes() -> None:
    """Which is best is not guessed; those that were never validated are not meant by it."""
    manifests = [saved(7, 0.5), saved(14), saved(21, 0.2), saved(28), saved(35)]
    assert batches_kept(manifests, RetentionPolicy()) == [7, 21, 35]
    assert batches_kept(manifests, RetentionPolicy(save_trial_best=0)) == [35]


def test_a_run_that_went_back_keeps_what_it_saves_since() -> None:
    """The checkpoint at 20 was damaged, so the run went on from 10 and is at 15: that is the
    latest as well, and must not go for the damaged one's sake. At 20 again, it is the one."""
    policy = RetentionPolicy(0, 1)
    back = [saved(10, second=1), saved(20, second=2), saved(15, second=3)]
    assert kept(back, policy) == {"one-20-2", "one-15-3"}
    assert kept([*back, saved(20, second=4)], policy) == {"one-20-4"}


def test_of_the_same_state_saved_twice_the_later_is_the_best() -> None:
    """A run that went back behind a damaged checkpoint has saved its best again."""
    manifests = [saved(20, 0.1, second=2), saved(20, 0.1, second=4), saved(25, 0.3, second=5)]
    assert kept(manifests, RetentionPolicy(1, 0, metric="loss")) == {"one-20-4"}


@pytest.mark.parametrize(
    ("every", "batches"),
    [
        (Batch(10), [14, 21, 35]),  # of 28 and 21 the first past 20; 35 is the first past 30
        (Batch(7), [7, 14, 21, 28, 35]),
        (Batch(36), []),
        (Epoch(1), [14, 28]),  # an epoch is 13 batches and a half
        (Epoch(2), [28]),
    ],
)
def test_keep_every(every: Batch | Epoch, batches: list[int]) -> None:
    """The first checkpoint at or after each multiple, whatever the rhythm of saving is."""
    manifests: list[Manifest] = [
        Saved(**{**msgspec.structs.asdict(each), "epoch": EpochLength(27, 2)}) for each in LOSSES
    ]
    assert batches_kept(manifests, RetentionPolicy(0, 0, keep_every=every)) == batches


def test_epochs_of_unknown_length_keep_all() -> None:
    """Nothing is deleted on a guess."""
    decisions = decide(LOSSES, RetentionPolicy(0, 0, keep_every=Epoch(2)))
    assert all(decision.keep and "not known" in decision.why for decision in decisions)


def test_a_running_trial_keeps_its_newest_whatever_the_rules() -> None:
    """The furthest, which it would go on from, and the last saved; of no other trial."""
    back = [saved(10, second=1), saved(20, second=2), saved(15, second=3)]
    others = [saved(10, trial="two"), saved(20, trial="two")]
    assert kept([*back, *others], NOTHING, running=("one",)) == {"one-20-2", "one-15-3"}


def test_what_is_needed_stays_and_says_why() -> None:
    """A pin, or a run that has started from it."""
    (decision, *others) = decide(LOSSES, NOTHING, needed={"one-7-x": "pinned by ann: figure 3"})
    assert decision.keep
    assert decision.why == "pinned by ann: figure 3"
    assert not any(other.keep for other in others)


def test_every_decision_says_why() -> None:
    """Kept: by which rules. Deleted: its place in each order, and how many are kept."""
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
    """It would mean nothing."""
    with pytest.raises(ValueError, match="at least 0"):
        RetentionPolicy(**rules)
