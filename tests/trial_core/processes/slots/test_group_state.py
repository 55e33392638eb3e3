"""A slot group's state, without ranks: events in, instructions out."""

from __future__ import annotations

import pytest

from trial_core.checkpoint.storage.base import StorageSpec
from trial_core.errors import SlotsError
from trial_core.messages import (
    AnyRequest,
    AttachTrial,
    RunValidation,
    SaveCheckpoint,
    TrainBatches,
)
from trial_core.processes.slots.group_state import GroupState, Pause

TRAIN = TrainBatches(until=8)
SAVE = SaveCheckpoint(uuid="4f0c21aa")


def test_a_stop_pauses_once_until_another_trial_begins() -> None:
    """Later workloads end by the barrier of the ranks, which still has the stop."""
    state = GroupState()
    assert [state.stop(), state.stop(), state.submitted(TRAIN)] == [Pause.STOP, None, None]
    assert (
        state.submitted(
            AttachTrial(trial="toy-0a", run_dir="/runs", storage=StorageSpec("memory://toy", {}))
        )
        is None
    )
    assert state.stop() is Pause.STOP


@pytest.mark.parametrize(
    ("before", "pause"),
    [([], Pause.BREAK), ([RunValidation()], Pause.BREAK), ([SAVE], None)],
    ids=["at once", "after a validation", "after a checkpoint"],
)
def test_a_break_without_a_workload_ends_the_next_one(
    before: list[AnyRequest], pause: Pause | None
) -> None:
    """Only one, and none if a checkpoint was saved meanwhile."""
    state = GroupState()
    assert state.break_training(is_training=False) is None
    assert [state.submitted(request) for request in before] == [None] * len(before)
    assert [state.submitted(TRAIN), state.submitted(TRAIN)] == [pause, None]


def test_a_stop_makes_a_break_superfluous() -> None:
    """The ranks are to agree on one batch."""
    state = GroupState()
    assert state.break_training(is_training=True) is Pause.BREAK
    state.break_training(is_training=False)
    state.stop()
    assert state.submitted(TRAIN) is None
    assert state.break_training(is_training=True) is None


def test_the_first_failure_counts() -> None:
    """Requests raise it, and the ranks are killed instead of shut down."""
    state, first = GroupState(), SlotsError("the first")
    assert state.can_shut_down(is_busy=False)
    assert not state.can_shut_down(is_busy=True)
    assert state.fail(first)
    assert not state.fail(SlotsError("the second"))
    assert state.refusal is first
    assert not state.can_shut_down(is_busy=False)


def test_a_group_that_is_closing_does_not_fail_any_more() -> None:
    """Its ranks end because it ends them."""
    state = GroupState()
    state.is_closing = True
    assert not state.fail(SlotsError("rank 0 ended"))
    assert "the slot group was closed" in str(state.refusal)


def test_ranks_of_another_program_are_told_of_one_error() -> None:
    """They are neither killed nor shut down then."""
    state = GroupState()
    assert [state.abort(), state.abort()] == [True, False]
    assert not state.can_shut_down(is_busy=False)
