"""Where the ranks' threads meet to commit a checkpoint, without a collective.

Collectives belong to the main thread. What stores a checkpoint beside training meets in
torch.distributed's store instead: each rank posts what it has stored, or why it could not; rank 0
commits once all have, and posts how that ended, for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from trial_core.checkpoint.manifest import FileEntry
from trial_core.controller.collective_errors import Outcome, attempt, raise_error
from trial_core.distributed import DistributedContext
from trial_core.errors import DeadlineExceeded, SlotsError
from trial_core.transfer.upload import prefix_rank

# By how much the ends of different ranks' uploads of one checkpoint may differ.
PATIENCE_SECONDS = 3600.0
# Between two looks into the store: soon at first, since most ranks end at about the same time.
FIRST_LOOK_SECONDS, LAST_LOOK_SECONDS = 0.01, 1.0
# The store breaks its connection with whoever gives it more than 8 MiB at once. A character takes
# up to four bytes.
PART_CHARACTERS = 2**20

_Posted = tuple[list[FileEntry] | int | None, str | None, str]


class CommitRendezvous:
    """All ranks, about one checkpoint. For any thread.

    Args:
        store: one that all ranks see.
        name: the meeting's alone.
        rank, size: who this is, and of how many.
        patience_seconds: by how much ranks may come later than others.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._store = store
        self._rank = rank
        self._ranks = [f"trialflow/{name}/rank-{each}" for each in range(size)]
        self._begun = f"trialflow/{name}/begun"
        self._failed = f"trialflow/{name}/failed"
        self._verdict = f"trialflow/{name}/verdict"
        self._patience_seconds = patience_seconds

    @classmethod
    def of(cls, distributed: DistributedContext, name: str) -> CommitRendezvous:
        """A meeting of all ranks. torch.distributed is initialised, unless there is one rank."""
        size = distributed.get_size()
        store = HashStore() if size == 1 else _get_default_store()
        return cls(store, name, distributed.get_rank(), size)

    def begin(self, begin: Callable[[], None]) -> None:
        """Have rank 0 do what must be done before any rank stores its part. Every rank calls this.

        Raises:
            TrialflowError: on every rank, what `begin` raised; or the store cannot be reached.
        """
        if self._rank == 0:
            begun = attempt(begin)
            self._post(self._begun, begun)
        else:
            with self._reaching_the_store():
                self._wait_for(
                    lambda: self._store.check([self._begun]),
                    self._patience_seconds,
                    lambda: "rank 0 has not begun it",
                )
                begun = self._read(self._begun)
        raise_error(begun)

    def commit(self, stored: Outcome, commit: Callable[[list[list[FileEntry]]], int]) -> Outcome:
        """See this rank's files committed with the others'. Every rank calls this once.

        Args:
            stored: this rank's files, or why they could not be stored.
            commit: commits the files of all ranks, given in their order; called on rank 0 alone.

        Returns:
            What `commit` gave, or else the first failure of all; the same on every rank.

        Raises:
            SlotsError: the store cannot be reached.
        """
        self._post(self._ranks[self._rank], stored)
        if stored.error_type is not None:
            with self._reaching_the_store():
                self._store.compare_set(self._failed, "", str(self._rank))  # the first one stays
        if self._rank != 0:
            return attempt(self._wait_for_the_verdict)
        verdict = attempt(lambda: commit(self._gather()))
        self._post(self._verdict, verdict)
        return verdict

    def _gather(self) -> list[list[FileEntry]]:
        """What every rank has stored, once all have; raises the error of one that has not."""
        with self._reaching_the_store():
            self._wait_for(
                lambda: self._store.check(self._ranks) or self._store.check([self._failed]),
                self._patience_seconds,
                lambda: f"rank {', '.join(self._absent())} has not stored its part",
            )
            ranks = range(len(self._ranks))
            if self._store.check([self._failed]):
                ranks = range(first := int(self._store.get(self._failed)), first + 1)
            outcomes = {rank: self._read(self._ranks[rank], delete=True) for rank in ranks}
        for rank, outcome in outcomes.items():
            raise_error(outcome._replace(message=prefix_rank(rank, outcome.message)))
        return [outcome.result for outcome in outcomes.values()]

    def _wait_for_the_verdict(self) -> int:
        with self._reaching_the_store():
            # Rank 0 may come as late as any, and then waits for others as long again.
            self._wait_for(
                lambda: self._store.check([self._verdict]),
                2 * self._patience_seconds,
                lambda: "rank 0 has not committed it",
            )
            verdict = self._read(self._verdict)
        raise_error(verdict)
        return int(verdict.result)

    def _absent(self) -> list[str]:
        return [str(rank) for rank, key in enumerate(self._ranks) if not self._store.check([key])]

    def _wait_for(
        self, is_there: Callable[[], bool], seconds: float, complaint: Callable[[], str]
    ) -> None:
        # Looks again and again: waiting inside the store would keep this rank's other threads out.
        deadline, pause = time.monotonic() + seconds, FIRST_LOOK_SECONDS
        while not is_there():
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"a checkpoint could not be committed: {complaint()} {seconds:g} s after rank "
                    f"{self._rank} had stored its own; see why its storage is that slow, or does "
                    "not answer"
                )
            time.sleep(pause)
            pause = min(2 * pause, LAST_LOOK_SECONDS)

    def _post(self, key: str, outcome: Outcome) -> None:
        # An error may name a file whose name is no text.
        message = outcome.message.encode("utf-8", "replace").decode()
        text = msgspec.json.encode(outcome._replace(message=message)).decode()
        starts = range(0, len(text), PART_CHARACTERS)
        with self._reaching_the_store():
            for index, start in enumerate(starts):
                self._store.set(f"{key}/{index}", text[start : start + PART_CHARACTERS])
            self._store.set(key, str(len(starts)))  # last: it says that the parts are there

    def _read(self, key: str, delete: bool = False) -> Outcome:
        parts = [f"{key}/{index}" for index in range(int(self._store.get(key)))]
        posted = b"".join(self._store.get(part) for part in parts)
        if delete:
            for part in parts:
                self._store.delete_key(part)
        return Outcome(*msgspec.json.decode(posted, type=_Posted))

    @contextmanager
    def _reaching_the_store(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what the store raises, for whatever reason
            raise SlotsError(
                "rank 0, which keeps the ranks' meeting point, cannot be reached, so a checkpoint "
                f"cannot be committed: {error}"
            ) from error
