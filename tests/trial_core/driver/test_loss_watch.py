"""Which losses that are not finite end a run, and which checkpoints are withheld."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from trial_core.driver.loss_watch import LossWatch
from trial_core.messages import NonFinite, Trained
from trial_core.rank.trial.metric_reduction import BatchMetrics

NAN = math.nan


def test_a_whole_workload_ends_the_run_and_says_since_which_batch() -> None:
    """Not the workload in which it begins. The last checkpoint is from before."""
    losses = LossWatch()
    (warning,) = losses.trained(16, 24, {"loss": NAN}, [{}, {"loss": NonFinite(20, 20)}])
    assert warning == 'training metric "loss" is nan in batch 20 on rank 1 (warned of once)'
    assert losses.failure(is_last=False, saved_at=16) is None
    assert losses.withholds_checkpoint(is_last=False)
    assert losses.trained(24, 32, {"loss": NAN}, [{}, {"loss": NonFinite(24, 24)}]) == []
    error = str(losses.failure(is_last=False, saved_at=16))
    assert error.startswith('the loss is not finite since batch 20 ("loss" is nan in batch 20 on')
    assert "the last one is at batch 16" in error


@pytest.mark.parametrize(
    ("workloads", "fails", "withholds"),
    [
        ([(0, 8, NonFinite(2, None))], False, False),  # it has recovered
        ([(0, 8, NonFinite(2, 6)), (8, 16, None)], False, False),
        ([(0, 8, NonFinite(1, 1)), (8, 16, NonFinite(8, 12))], False, True),  # not throughout
        ([(0, 2, NonFinite(0, 0)), (2, 4, NonFinite(2, 2))], False, True),  # too few batches
        ([(n, n + 2, NonFinite(n, n)) for n in (4, 6, 8)], True, True),
    ],
)
def test_a_loss_that_may_recover_ends_nothing(
    workloads: list[Any], fails: bool, withholds: bool
) -> None:
    losses = LossWatch()
    for begin, reached, found in workloads:
        metrics = {"loss": 1.0 if found is None else NAN, "accuracy": 0.5}
        losses.trained(begin, reached, metrics, [{} if found is None else {"loss": found}])
    assert (losses.failure(is_last=False, saved_at=None) is not None) is fails
    assert losses.withholds_checkpoint(is_last=False) is withholds


def test_at_the_end_of_training_five_batches_decide() -> None:
    """A final state whose last loss alone is infinite is saved; one that has failed is not."""
    losses = LossWatch()
    losses.trained(0, 40, {"loss": NAN}, [{"loss": NonFinite(39, 39)}])
    assert losses.failure(is_last=True, saved_at=None) is None
    assert not losses.withholds_checkpoint(is_last=True)
    losses.trained(0, 40, {"loss": NAN}, [{"loss": NonFinite(20, 20)}])
    assert losses.failure(is_last=True, saved_at=None) is not None


def test_without_a_metric_of_that_name_all_losses_decide() -> None:
    losses = LossWatch()
    losses.trained(0, 8, {"a_loss": NAN, "b_loss": 0.5}, [{"a_loss": NonFinite(0, 0)}])
    assert losses.failure(is_last=False, saved_at=None) is None
    found = {"a_loss": NonFinite(8, 8), "b_loss": NonFinite(8, 8)}
    losses.trained(8, 16, {"a_loss": NAN, "b_loss": NAN, "accuracy": 0.1}, [found])
    assert losses.failure(is_last=False, saved_at=None) is not None


def test_a_scripts_reports_tell_only_since_which_report() -> None:
    """The second report in a row ends the run, if that are five steps."""
    losses = LossWatch()
    assert losses.trained(20, 30, {"loss": NAN}) != []
    assert losses.failure(is_last=False, saved_at=20) is None
    losses.trained(30, 40, {"loss": [NAN]})
    assert "since batch 30" in str(losses.failure(is_last=False, saved_at=20))


def test_switched_off_it_only_warns() -> None:
    losses = LossWatch(is_on=False)
    assert losses.trained(0, 8, {"loss": NAN}, [{"loss": NonFinite(0, 0)}]) != []
    assert losses.failure(is_last=True, saved_at=None) is None
    assert not losses.withholds_checkpoint(is_last=False)
    assert losses.validated(8, {"loss": NAN}) == [
        'validation metric "loss" is nan at batch 8 (warned of once)'
    ]
    assert losses.validated(16, {"loss": NAN}) == []


def test_a_scaler_that_skips_every_step_is_said_once() -> None:
    losses = LossWatch()

    def workload(skipped: int) -> list[str]:
        return losses.stepped(
            Trained(
                batches_trained=9, metrics={}, seconds=1.0, scaled_steps=4, skipped_steps=skipped
            )
        )

    assert [workload(4), workload(3), workload(4)] == [[], [], []]
    (warning,) = workload(4)
    assert "has skipped the last 8 optimizer steps, all until batch 9" in warning
    assert workload(4) == []


def test_a_rank_knows_the_batches_of_its_metrics() -> None:
    """Of two calls of train_batch each; values None do not count."""
    metrics = BatchMetrics()
    values = [1.0, 2.0, NAN, 3.0, None, 4.0, 5.0, math.inf]
    for value in values:
        metrics.add_call({"a": value, "b": np.array([1.0, value or 0.0]), "c": 1})
    assert metrics.non_finite(20, 4) == {"a": NonFinite(21, 23), "b": NonFinite(21, 23)}
