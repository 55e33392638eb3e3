"""Commits a checkpoint of all ranks from their upload threads, without a collective.

Only the main thread may run collectives. The upload threads meet in torch.distributed's store
instead. Each rank posts the files it has stored, or its error. Rank 0 commits once all have posted
their files, and posts the result for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from trial_core.checkpoint.manifest import FileEntry
from trial_core.controller.collective_errors import Outcome, outcome_of
from trial_core.decoding import decoder
from trial_core.distributed import DistributedContext
from trial_core.errors import DeadlineExceeded, SlotsError
from trial_core.transfer.upload import prefix_rank

# The longest time between the ends of different ranks' uploads of one checkpoint.
TIMEOUT_SECONDS = 3600.0
# The pause between two checks of the store grows: most ranks end at about the same time.
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.01, 1.0
# The store closes the connection of a client that sends more than 8 MiB at once. A character takes
# up to four bytes.
PART_CHARACTERS = 2**20

_Posted = tuple[list[FileEntry] | int | None, str | None, str]
_posted_decoder: msgspec.json.Decoder[_Posted] = decoder(_Posted)


class CommitRendezvous:
    """One rank's side of the commit of one checkpoint. For any thread.

    Args:
        store: a store that all ranks see.
        name: unique to this rendezvous.
        rank, size: this rank, and the number of ranks.
        timeout_seconds: how long a rank waits for the others.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._store = store
        self._rank = rank
        self._ranks = [f"trialflow/{name}/rank-{each}" for each in range(size)]
        self._begun = f"trialflow/{name}/begun"
        self._failed = f"trialflow/{name}/failed"
        self._result = f"trialflow/{name}/result"
        self._timeout_seconds = timeout_seconds

    @classmethod
    def of(cls, distributed: DistributedContext, name: str) -> CommitRendezvous:
        """A rendezvous of all ranks. With several, torch.distributed must be initialised."""
        size = distributed.get_size()
        store = HashStore() if size == 1 else _get_default_store()
        return cls(store, name, distributed.get_rank(), size)

    def begin(self, begin: Callable[[], None]) -> None:
        """Do `begin` on rank 0 before any rank stores its part. Every rank calls this.

        Raises:
            TrialflowError: on every rank, if `begin` failed.
            SlotsError: the store cannot be reached.
        """
        if self._rank == 0:
            begun = outcome_of(begin)
            self._post(self._begun, begun)
        else:
            with self._store_errors():
                self._wait_for(
                    lambda: self._store.check([self._begun]),
                    self._timeout_seconds,
                    lambda: "rank 0 has not begun it",
                )
                begun = self._read(self._begun)
        begun.raise_error()

    def commit(self, stored: Outcome, commit: Callable[[list[list[FileEntry]]], int]) -> Outcome:
        """Commit the files of all ranks. Every rank calls this once.

        Args:
            stored: this rank's files, or its error.
            commit: commits the files of all ranks, in the order of ranks; called on rank 0 alone.

        Returns:
            The same on every rank: the result of `commit`, or the first failure.

        Raises:
            SlotsError: the store cannot be reached.
        """
        self._post(self._ranks[self._rank], stored)
        if stored.error_type is not None:
            with self._store_errors():
                self._store.compare_set(self._failed, "", str(self._rank))  # keeps the first
        if self._rank != 0:
            return outcome_of(self._wait_for_result)
        result = outcome_of(lambda: commit(self._gather()))
        self._post(self._result, result)
        return result

    def _gather(self) -> list[list[FileEntry]]:
        """The files of every rank, once all have posted; raises the first rank's error instead."""
        with self._store_errors():
            self._wait_for(
                lambda: self._store.check(self._ranks) or self._store.check([self._failed]),
                self._timeout_seconds,
                lambda: f"rank {', '.join(self._absent())} has not stored its part",
            )
            ranks = range(len(self._ranks))
            if self._store.check([self._failed]):
                ranks = range(first := int(self._store.get(self._failed)), first + 1)
            outcomes = {rank: self._read(self._ranks[rank], delete=True) for rank in ranks}
        for rank, outcome in outcomes.items():
            outcome._replace(message=prefix_rank(rank, outcome.message)).raise_error()
        return [outcome.result for outcome in outcomes.values()]

    def _wait_for_result(self) -> int:
        with self._store_errors():
            # Rank 0 may be the last to arrive, and then waits for other ranks as long again.
            self._wait_for(
                lambda: self._store.check([self._result]),
                2 * self._timeout_seconds,
                lambda: "rank 0 has not committed it",
            )
            result = self._read(self._result)
        result.raise_error()
        return int(result.result)

    def _absent(self) -> list[str]:
        return [str(rank) for rank, key in enumerate(self._ranks) if not self._store.check([key])]

    def _wait_for(
        self, is_there: Callable[[], bool], seconds: float, describe: Callable[[], str]
    ) -> None:
        # Polls: waiting inside the store would block this rank's other threads.
        deadline, pause = time.monotonic() + seconds, FIRST_PAUSE_SECONDS
        while not is_there():
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"a checkpoint could not be committed: {describe()} {seconds:g} s after rank "
                    f"{self._rank} had stored its part; check whether the storage of the missing "
                    "rank is slow or does not answer"
                )
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_SECONDS)

    def _post(self, key: str, outcome: Outcome) -> None:
        # An error message may contain a file name that is not valid text.
        message = outcome.message.encode("utf-8", "replace").decode()
        text = msgspec.json.encode(outcome._replace(message=message)).decode()
        starts = range(0, len(text), PART_CHARACTERS)
        with self._store_errors():
            for index, start in enumerate(starts):
                self._store.set(f"{key}/{index}", text[start : start + PART_CHARACTERS])
            self._store.set(key, str(len(starts)))  # last: it says that all parts are there

    def _read(self, key: str, delete: bool = False) -> Outcome:
        parts = [f"{key}/{index}" for index in range(int(self._store.get(key)))]
        posted = b"".join(self._store.get(part) for part in parts)
        if delete:
            for part in parts:
                self._store.delete_key(part)
        return Outcome(*_posted_decoder.decode(posted))

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # the store raises it for every failure
            raise SlotsError(
                "a checkpoint cannot be committed: torch.distributed's store on rank 0 cannot be "
                f"reached: {error}"
            ) from error
