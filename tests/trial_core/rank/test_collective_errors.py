"""A failure of one rank becomes the failure of all ranks."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from trial_core.errors import CheckpointDamaged, StorageError, TrialflowError
from trial_core.rank.collective_errors import Outcome, run_on_all_ranks, run_on_rank_0
from trial_core.rank.collectives.distributed import DistributedContext


class Rank(DistributedContext):
    """One of two ranks; the other rank's outcome is given."""

    def __init__(self, rank: int, other: Outcome) -> None:
        super().__init__(
            rank=rank, size=2, local_rank=rank, local_size=2, cross_rank=0, cross_size=1
        )
        self._other = other

    def allgather(self, stuff: Any) -> list[Any]:
        return [stuff, self._other] if self.rank == 0 else [self._other, stuff]

    def broadcast(self, stuff: Any) -> Any:
        return stuff if self.rank == 0 else self._other


def fails() -> NoReturn:
    raise StorageError("the disk is full")


def test_a_successful_rank_raises_the_failed_ranks_error() -> None:
    """With the failed rank's number and error class."""
    other = Outcome(None, "CheckpointDamaged", "model.pt has 3 bytes, expected 4")
    with pytest.raises(CheckpointDamaged, match=r"^rank 1: model.pt has 3 bytes, expected 4$"):
        run_on_all_ranks(Rank(0, other), lambda: "done")


def test_the_failed_rank_raises_the_same_error() -> None:
    """With the same message as the other ranks."""
    with pytest.raises(StorageError, match=r"^rank 0: the disk is full$"):
        run_on_all_ranks(Rank(0, Outcome("done")), fails)


def test_results_of_all_ranks_are_in_their_order() -> None:
    """If no rank fails."""
    assert run_on_all_ranks(Rank(1, Outcome("first")), lambda: "second") == ["first", "second"]


def test_work_on_rank_0_is_not_done_on_other_ranks() -> None:
    """They get rank 0's result, or raise its error."""
    assert run_on_rank_0(Rank(1, Outcome("read once")), fails) == "read once"
    with pytest.raises(StorageError, match=r"^gone$"):
        run_on_rank_0(Rank(1, Outcome(None, "StorageError", "gone")), fails)


def test_an_error_with_more_than_a_message_keeps_its_class_name() -> None:
    """As part of the message of a `TrialflowError`."""
    with pytest.raises(TrialflowError, match=r"^RankFailed: rank 1: broke$"):
        run_on_all_ranks(Rank(0, Outcome(None, "RankFailed", "broke")), lambda: None)
