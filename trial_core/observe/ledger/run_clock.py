"""The clock of one run: the time that its slots spent in each bucket.

The clock is in one bucket at any time. A change of bucket settles the time since the last one, in
whole milliseconds, so the buckets add up to the run's time exactly. Only work that the slots wait
for has a bucket: an upload in parallel with training has none, and waiting for it is a checkpoint
stall.

=================  ==============================================================================
bucket             activity of the slots
=================  ==============================================================================
queue              nothing: the run waits for devices, for the trial's lock, or for nodes while it
                   has none. It holds no slot, and counts the slots that it launches; later, the
                   ones that it had; one, if it ends before it knows them
launch             start, until all ranks have joined; also fetching the code and deleting
                   leftovers
build              construct the trial and the loaders
restore            fetch and load a checkpoint
train              train batches for the first time
redone             train batches again that an earlier launch has trained and that were lost
validate           validate
checkpoint_stall   wait for a snapshot, or for an upload that must end first
drain              save and end early, to be launched on other nodes
idle               everything else: between the stages, at the end, before a restart; and the time
                   after the last finished batch of ranks that died or hung
=================  ==============================================================================

Each stage declares its bucket (`trial_core.driver.stages.declared_stage`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Bucket = Literal[
    "queue", "launch", "build", "restore", "train", "redone", "validate", "checkpoint_stall",
    "drain", "idle",
]  # fmt: skip
BUCKETS: tuple[Bucket, ...] = get_args(Bucket)


class RunClock:
    """Measures one run, from so many seconds before now, in which it has waited for its devices.
    The run's own thread changes buckets; any thread may report and read. `now` tells seconds that
    never go back."""

    def __init__(
        self, waited_seconds: float = 0.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._since = self._milliseconds() - round(waited_seconds * 1000)
        self._began = self._since
        self._slots: int | None = None
        self._holds_slots = False
        self._bucket: Bucket = "queue"
        self._is_draining = False
        self._spent: Counter[Bucket] = Counter()
        self._trained_before = 0
        self._trained_to = 0
        self._batches = 0

    def switch(self, bucket: Bucket) -> Bucket:
        """Be in `bucket` from now on. Returns the bucket before."""
        with self._lock:
            self._settle_in(self._present())
            if bucket == "launch":
                self._is_draining = False
            before, self._bucket = self._bucket, bucket
            return before

    def drains(self) -> None:
        """Until the next launch, count checkpoint stalls and idle time as drain."""
        with self._lock:
            self._settle_in(self._present())
            self._is_draining = True

    @contextmanager
    def spending(self, bucket: Bucket) -> Iterator[None]:
        """Be in `bucket` during the block, and then in the previous one; blocks may be nested. If
        training fails, the time after the last finished batch is idle. So is a wait for nodes
        while the run holds slots."""
        if bucket == "queue" and self._holds_slots:
            bucket = "idle"
        before = self.switch(bucket)
        try:
            yield
        except BaseException:
            if bucket == "train":
                with self._lock:
                    self._settle_in("idle")
            raise
        finally:
            self.switch(before)

    def count_as(self, bucket: Bucket, seconds: float) -> None:
        """Move the last `seconds` of the present bucket to another one."""
        with self._lock:
            self._settle_in(self._present())
            moved = min(round(seconds * 1000) * self.slots, self._spent[self._bucket])
            self._spent[self._bucket] -= moved
            self._spent[bucket] += moved

    def has_slots(self, slots: int) -> None:
        """Set the number of slots from now on; the first call also sets it for the time waited."""
        with self._lock:
            self._settle_in(self._present())
            if self._slots is None:
                self._spent = Counter({each: slots * ms for each, ms in self._spent.items()})
            self._slots, self._holds_slots = slots, True

    def has_left(self, slots: int) -> None:
        """Note that only `slots` slots are left, and the run waits; 0 keeps the last number."""
        with self._lock:
            self._settle_in(self._present())
            self._holds_slots = slots > 0
            self._slots = slots or self._slots

    def continues(self, trained_to: int) -> None:
        """Earlier runs have trained the batches up to `trained_to`, saved or not."""
        with self._lock:
            self._trained_to = max(self._trained_to, trained_to)

    def starts_at(self, batches: int) -> None:
        """Ranks are about to train from `batches` on, whatever was trained before."""
        with self._lock:
            self._batches, self._trained_before = batches, self._trained_to

    def batches_trained(self, batches: int) -> None:
        """Note that training reached `batches`. New and redone ones share the time by number."""
        with self._lock:
            trained = batches - self._batches
            if trained <= 0:
                return
            if self._bucket == "train":
                spent = self._elapsed()
                again = min(max(self._trained_before - self._batches, 0), trained)
                redone = spent * again // trained
                self._spent["redone"] += redone
                self._spent["train"] += spent - redone
            self._batches = batches
            self._trained_to = max(self._trained_to, batches)

    def slot_milliseconds(self) -> dict[str, int]:
        """Milliseconds of all slots until now, by bucket in the order of `BUCKETS`; no zeros."""
        with self._lock:
            spent = self._spent.copy()
            # Not settled: a failure may still make this time idle.
            spent[self._present()] += (self._milliseconds() - self._since) * self.slots
        return {bucket: ms for bucket in BUCKETS if (ms := spent[bucket])}

    @property
    def slots(self) -> int:
        """The run's slots; 1 before they are known."""
        return self._slots or 1

    @property
    def seconds(self) -> float:
        return (self._milliseconds() - self._began) / 1000

    @property
    def trained_to(self) -> int:
        """How many batches this run and earlier ones have trained, saved or not."""
        return self._trained_to

    # ------------------------------------------------------------------ internals, under the lock

    def _present(self) -> Bucket:
        """The bucket of the time that is not settled yet."""
        if self._is_draining and self._bucket in ("checkpoint_stall", "idle"):
            return "drain"
        redoes = self._bucket == "train" and self._batches < self._trained_before
        return "redone" if redoes else self._bucket

    def _settle_in(self, bucket: Bucket) -> None:
        self._spent[bucket] += self._elapsed()

    def _elapsed(self) -> int:
        """Slot-milliseconds since the last call."""
        since, self._since = self._since, self._milliseconds()
        return (self._since - since) * self.slots

    def _milliseconds(self) -> int:
        return int(self._now() * 1000)
