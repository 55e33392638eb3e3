"""Ranks commit a checkpoint without a collective. Each rank is a thread here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from trial_core.checkpoint.manifest import FileEntry
from trial_core.controller.collective_errors import Outcome
from trial_core.errors import CheckpointError, SlotsError
from trial_core.trainer.commit_rendezvous import CommitRendezvous

FULL = Outcome(None, "StorageError", "the disk is full")


def files(rank: int, count: int = 1, name: str = "file") -> list[FileEntry]:
    digest = "sha256:" + f"{rank}" * 64
    return [
        FileEntry(path=f"{name}-{i}", size_bytes=i, digest=digest, rank=rank) for i in range(count)
    ]


def commit_together(
    *stored: Outcome | Callable[[], Outcome],
    commit: Callable[[list[list[FileEntry]]], int] = len,
    store: Any = None,
    timeout_seconds: float = 30.0,
) -> list[Outcome]:
    """The outcome of the commit on each rank."""
    shared = store or dist.HashStore()

    def run_rank(rank: int) -> Outcome:
        rendezvous = CommitRendezvous(shared, "one", rank, len(stored), timeout_seconds)
        own = stored[rank]
        return rendezvous.commit(own() if callable(own) else own, commit)

    with ThreadPoolExecutor(len(stored)) as ranks:
        return list(ranks.map(run_rank, range(len(stored))))


def test_rank_0_commits_the_files_of_all_ranks() -> None:
    """In the order of ranks, whichever posts first; and every rank gets the result."""
    committed: list[list[FileEntry]] = []
    late = threading.Event()

    def commit(stored: list[list[FileEntry]]) -> int:
        committed.extend(stored)
        return 42

    def last() -> Outcome:
        assert late.wait(30)
        return Outcome(files(1, 3))

    def first() -> Outcome:
        late.set()
        return Outcome(files(2, 2))

    assert commit_together(Outcome(files(0)), last, first, commit=commit) == [Outcome(42)] * 3
    assert committed == [files(0), files(1, 3), files(2, 2)]


def test_a_single_rank_commits_alone() -> None:
    """Without torch.distributed."""
    assert commit_together(Outcome(files(0))) == [Outcome(1)]


def test_a_failure_reaches_all_ranks_at_once() -> None:
    """With its message and the rank's number, although another rank is still uploading."""
    is_posted = threading.Event()

    def slow() -> Outcome:
        assert is_posted.wait(30)
        return Outcome(files(3))

    def commit(stored: list[list[FileEntry]]) -> int:
        raise AssertionError(f"{stored} must not be committed")

    class NotifyingStore(dist.HashStore):
        def set(self, key: str, value: str) -> None:
            super().set(key, value)
            if key.endswith("result"):
                is_posted.set()

    outcomes = commit_together(
        Outcome(files(0)), Outcome(files(1)), FULL, slow, commit=commit, store=NotifyingStore()
    )
    assert outcomes == [Outcome(None, "StorageError", "rank 2: the disk is full")] * 4


def test_the_first_failure_is_reported() -> None:
    """Rank 2 fails before rank 1 does."""
    store = dist.HashStore()
    seen: list[bool] = []

    def fails_second() -> Outcome:
        deadline = time.monotonic() + 30
        while not store.check(["trialflow/one/failed"]):
            assert time.monotonic() < deadline
        seen.append(True)
        return Outcome(None, "CheckpointError", "a symptom")

    def comes_last() -> Outcome:
        deadline = time.monotonic() + 30
        while not store.check(["trialflow/one/rank-1"]):
            assert time.monotonic() < deadline
        return Outcome(files(0))

    outcomes = commit_together(comes_last, fails_second, FULL, store=store)
    assert outcomes == [Outcome(None, "StorageError", "rank 2: the disk is full")] * 3


def test_a_failed_commit_reaches_all_ranks() -> None:
    """Every rank gets rank 0's error."""

    def commit(_: object) -> int:
        raise CheckpointError("ranks 0 and 1 both saved a file")

    outcomes = commit_together(Outcome(files(0)), Outcome(files(1)), commit=commit)
    assert outcomes == [Outcome(None, "CheckpointError", "ranks 0 and 1 both saved a file")] * 2


def test_a_missing_rank_is_named_on_all_ranks() -> None:
    """After the timeout."""
    store = dist.HashStore()
    present = [CommitRendezvous(store, "one", rank, size=4, timeout_seconds=0.2) for rank in (0, 2)]
    with ThreadPoolExecutor(2) as ranks:
        outcomes = list(ranks.map(lambda each: each.commit(Outcome(files(0)), len), present))
    assert {outcome.error_type for outcome in outcomes} == {"DeadlineExceeded"}
    (message,) = {outcome.message for outcome in outcomes}
    assert message.startswith(
        "a checkpoint could not be committed: rank 1, 3 has not stored its part 0.2 s after rank 0"
    )


def test_waiting_for_rank_0_has_a_timeout() -> None:
    """Twice as long, because rank 0 may itself wait for other ranks."""
    alone = CommitRendezvous(dist.HashStore(), "one", rank=1, size=2, timeout_seconds=0.1)
    outcome = alone.commit(Outcome(files(1)), len)
    assert "rank 0 has not committed it 0.2 s after rank 1 had stored its part" in outcome.message


def test_large_file_lists_are_posted_in_parts() -> None:
    """torch's TCP store closes a connection that sends more than 8 MiB. The parts are deleted."""
    many = files(1, 12_000, name="n" * 900)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    assert commit_together(
        Outcome(files(0)), Outcome(many), store=store, commit=lambda all_: len(all_[1])
    ) == [
        Outcome(12_000),
        Outcome(12_000),
    ]
    assert not store.check(["trialflow/one/rank-1/0"])


def test_a_file_name_that_is_not_valid_text_can_be_posted() -> None:
    """Bytes that are not UTF-8 become question marks."""
    odd = Outcome(None, "CheckpointError", "cannot store 'caf\udce9'")
    assert commit_together(odd) == [Outcome(None, "CheckpointError", "rank 0: cannot store 'caf?'")]


def test_a_store_that_cannot_be_reached() -> None:
    """The error says that it is on rank 0."""

    class Gone(dist.HashStore):
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("Broken pipe")

    with pytest.raises(SlotsError, match=r"store on rank 0 cannot be reached: Broken pipe$"):
        commit_together(Outcome(files(0)), store=Gone())
