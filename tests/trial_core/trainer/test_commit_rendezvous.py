"""Ranks that commit a checkpoint together without a collective; threads are the ranks here."""

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


def meet(
    *stored: Outcome | Callable[[], Outcome],
    commit: Callable[[list[list[FileEntry]]], int] = len,
    store: Any = None,
    patience_seconds: float = 30.0,
) -> list[Outcome]:
    """How the meeting ends for each of the ranks that have `stored` this."""
    shared = store or dist.HashStore()

    def attend(rank: int) -> Outcome:
        meeting = CommitRendezvous(shared, "one", rank, len(stored), patience_seconds)
        own = stored[rank]
        return meeting.commit(own() if callable(own) else own, commit)

    with ThreadPoolExecutor(len(stored)) as ranks:
        return list(ranks.map(attend, range(len(stored))))


def test_rank_0_commits_what_all_have_stored() -> None:
    """In the order of ranks, whoever comes first; and every rank is told the result."""
    committed: list[list[FileEntry]] = []
    late = threading.Event()

    def commit(everybodys: list[list[FileEntry]]) -> int:
        committed.extend(everybodys)
        return 42

    def last() -> Outcome:
        assert late.wait(30)
        return Outcome(files(1, 3))

    def first() -> Outcome:
        late.set()
        return Outcome(files(2, 2))

    assert meet(Outcome(files(0)), last, first, commit=commit) == [Outcome(42)] * 3
    assert committed == [files(0), files(1, 3), files(2, 2)]


def test_a_rank_alone_needs_nobody() -> None:
    """Plain python: torch.distributed may not even be there."""
    assert meet(Outcome(files(0))) == [Outcome(1)]


def test_a_failure_is_told_to_all_at_once() -> None:
    """With its own words and the rank's number, though another rank still uploads."""
    others_know = threading.Event()

    def slow() -> Outcome:
        assert others_know.wait(30)
        return Outcome(files(3))

    def know(everybodys: list[list[FileEntry]]) -> int:
        raise AssertionError(f"{everybodys} must not be committed")

    class Telling(dist.HashStore):
        def set(self, key: str, value: str) -> None:
            super().set(key, value)
            if key.endswith("verdict"):
                others_know.set()

    outcomes = meet(Outcome(files(0)), Outcome(files(1)), FULL, slow, commit=know, store=Telling())
    assert outcomes == [Outcome(None, "StorageError", "rank 2: the disk is full")] * 4


def test_the_first_failure_stays_the_cause() -> None:
    """Rank 2 has failed before rank 1 does."""
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

    outcomes = meet(comes_last, fails_second, FULL, store=store)
    assert outcomes == [Outcome(None, "StorageError", "rank 2: the disk is full")] * 3


def test_a_commit_that_fails_is_told_to_all() -> None:
    """Its error is rank 0's, and everybody's."""

    def commit(_: object) -> int:
        raise CheckpointError("ranks 0 and 1 both saved a file")

    outcomes = meet(Outcome(files(0)), Outcome(files(1)), commit=commit)
    assert outcomes == [Outcome(None, "CheckpointError", "ranks 0 and 1 both saved a file")] * 2


def test_a_rank_that_does_not_come_is_named_to_all() -> None:
    """After a deadline, on every rank that waits."""
    store = dist.HashStore()
    came = [CommitRendezvous(store, "one", rank, size=4, patience_seconds=0.2) for rank in (0, 2)]
    with ThreadPoolExecutor(2) as ranks:
        outcomes = list(ranks.map(lambda m: m.commit(Outcome(files(0)), len), came))
    assert {outcome.error_type for outcome in outcomes} == {"DeadlineExceeded"}
    (message,) = {outcome.message for outcome in outcomes}
    assert message.startswith(
        "a checkpoint could not be committed: rank 1, 3 has not stored its part 0.2 s after rank 0"
    )


def test_without_rank_0_nobody_waits_for_ever() -> None:
    """Twice as long, since rank 0 may itself have waited."""
    alone = CommitRendezvous(dist.HashStore(), "one", rank=1, size=2, patience_seconds=0.1)
    outcome = alone.commit(Outcome(files(1)), len)
    assert "rank 0 has not committed it 0.2 s after rank 1 had stored its own" in outcome.message


def test_more_files_than_the_store_takes_at_once() -> None:
    """torch's TCP store ends the connection of who gives it more than 8 MiB; and what was told
    through it does not stay there."""
    many = files(1, 12_000, name="n" * 900)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    assert meet(
        Outcome(files(0)), Outcome(many), store=store, commit=lambda all_: len(all_[1])
    ) == [
        Outcome(12_000),
        Outcome(12_000),
    ]
    assert not store.check(["trialflow/one/rank-1/0"])


def test_a_name_that_is_no_text_can_be_told() -> None:
    """The bytes of a file's name that are no UTF-8 become question marks."""
    odd = Outcome(None, "CheckpointError", "cannot store 'caf\udce9'")
    assert meet(odd) == [Outcome(None, "CheckpointError", "rank 0: cannot store 'caf?'")]


def test_a_store_that_is_gone() -> None:
    """It lives on rank 0: the rank that notices says so."""

    class Gone(dist.HashStore):
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("Broken pipe")

    with pytest.raises(SlotsError, match=r"^rank 0, .* cannot be reached, .*: Broken pipe$"):
        meet(Outcome(files(0)), store=Gone())
