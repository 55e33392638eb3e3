"""Lengths and periods of training, in batches or epochs. Pure: no torch, no I/O.

An epoch need not be a whole number of batches: with gradient accumulation and several ranks, a
batch may begin in one epoch and end in the next. So `EpochLength` counts micro-batches and rounds
up, once: epoch *k* ends with the first batch that contains its last sample.

Comparing a `Batch` to an `Epoch` raises `TypeError`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass

from trial_core.errors import ConfigError


@dataclass(frozen=True)
class EpochLength:
    """The length of an epoch.

    Attributes:
        micro_batches: micro-batches in one pass over the data, on all data-parallel ranks together.
        micro_batches_per_batch: micro-batches in one batch, on all ranks together
            (gradient accumulation steps x data-parallel ranks).
        first_epoch, first_batch: epochs are counted from here: epoch `first_epoch` begins with
            batch `first_batch`. Not 0 if batches have had another size before, or the data
            another length. Had they only in the first part of that epoch, it is where the epoch
            would have begun with this size.
    """

    micro_batches: int
    micro_batches_per_batch: int
    first_epoch: int = 0
    first_batch: int = 0

    def __post_init__(self) -> None:
        if self.micro_batches < 1 or self.micro_batches_per_batch < 1:
            raise ValueError(
                f"an epoch has at least one micro-batch, got {self.micro_batches} "
                f"in batches of {self.micro_batches_per_batch}"
            )

    def batches_until(self, epochs: int) -> int:
        """Batches trained at the end of epoch number `epochs`."""
        micro_batches = (epochs - self.first_epoch) * self.micro_batches
        return self.first_batch + -(-micro_batches // self.micro_batches_per_batch)

    def epoch_of(self, batch_idx: int) -> int:
        """The epoch in which batch `batch_idx` (0-based) begins."""
        return self.place(batch_idx)[0]

    def epochs_completed(self, batches_trained: int) -> int:
        """Whole epochs trained after `batches_trained` batches."""
        return self.place(batches_trained)[0]

    def place(self, batches_trained: int) -> tuple[int, int]:
        """Whole epochs trained after so many batches, and micro-batches of the next one."""
        micro_batches = (batches_trained - self.first_batch) * self.micro_batches_per_batch
        epochs, rest = divmod(micro_batches, self.micro_batches)
        return self.first_epoch + epochs, rest

    def next_whole(self, batches_trained: int) -> int:
        """The next batch that ends exactly with an epoch, no sample of the next one trained."""
        period = self.micro_batches // math.gcd(self.micro_batches, self.micro_batches_per_batch)
        return batches_trained + period - (batches_trained - self.first_batch) % period


class _TrainUnit:
    """A number of batches or epochs, or the container of numbers at which something is due."""

    unit: str

    def __init__(self, value: int | Container[int]) -> None:
        # A str is a container, too: Batch("100") is a mistake.
        if isinstance(value, (bool, str, bytes)) or not isinstance(value, (int, Container)):
            raise TypeError(
                f"{type(self).__name__} takes a positive int or a container of ints, got {value!r}"
            )
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{type(self).__name__} takes a positive number, got {value}")
        self.value = value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.value == self.value

    def __hash__(self) -> int:
        # Equal containers may have different hashes, so only numbers are hashed.
        return hash((type(self), self.value if isinstance(self.value, int) else None))

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, _TrainUnit):
            return NotImplemented
        if type(other) is not type(self):
            raise TypeError(f"cannot compare {self!r} to {other!r}: their units differ")
        if not isinstance(self.value, int) or not isinstance(other.value, int):
            raise TypeError(f"cannot compare {self!r} to {other!r}: only single numbers have order")
        return self.value < other.value

    def is_due(self, batches_trained: int, epoch: EpochLength | None = None) -> bool:
        """Return whether a period of this length ends exactly at `batches_trained` batches.

        Raises:
            ConfigError: the period is in epochs, but the loader has no length.
        """
        before = self._reached(max(batches_trained - 1, 0), epoch)
        # Several counts when epochs are shorter than a batch.
        counts = range(before + 1, self._reached(batches_trained, epoch) + 1)
        if isinstance(self.value, int):
            return any(count % self.value == 0 for count in counts)
        return any(count in self.value for count in counts)

    def next_due(
        self, batches_trained: int, until: int, epoch: EpochLength | None = None
    ) -> int | None:
        """The first due batch after `batches_trained` and up to `until`, or None."""
        if not isinstance(self.value, int):
            candidates: Iterable[int] = range(batches_trained + 1, until + 1)
            return next((b for b in candidates if self.is_due(b, epoch)), None)
        times = self.times_due(batches_trained, epoch)
        due = self._batches_until((times + 1) * self.value, epoch)
        return due if due <= until else None

    def last_due(self, batches_trained: int, epoch: EpochLength | None = None) -> int:
        """The last due batch up to `batches_trained`; 0 without one, and for a container."""
        if not isinstance(self.value, int):
            return 0
        times = self.times_due(batches_trained, epoch)
        return self._batches_until(times * self.value, epoch)

    def times_due(self, batches_trained: int, epoch: EpochLength | None = None) -> int:
        """How often the period has ended by `batches_trained` batches; 0 for a container."""
        if not isinstance(self.value, int):
            return 0
        return self._reached(batches_trained, epoch) // self.value

    def _reached(self, batches_trained: int, epoch: EpochLength | None) -> int:
        """How many of this unit are complete after `batches_trained` batches."""
        raise NotImplementedError

    def _batches_until(self, count: int, epoch: EpochLength | None) -> int:
        """The number of batches after which `count` of this unit are complete."""
        raise NotImplementedError


class Batch(_TrainUnit):
    """A number of batches: ``Batch(100)`` is every 100, ``Batch([5, 30])`` after 5 and after 30."""

    unit = "batches"

    def _reached(self, batches_trained: int, epoch: EpochLength | None) -> int:
        return batches_trained

    def _batches_until(self, count: int, epoch: EpochLength | None) -> int:
        return count


class Epoch(_TrainUnit):
    """A number of epochs: ``Epoch(1)`` is every epoch, ``Epoch([2, 7])`` after the 2nd and 7th."""

    unit = "epochs"

    def _reached(self, batches_trained: int, epoch: EpochLength | None) -> int:
        return _require(epoch, self).epochs_completed(batches_trained)

    def _batches_until(self, count: int, epoch: EpochLength | None) -> int:
        return _require(epoch, self).batches_until(count)


TrainUnit = Batch | Epoch


def _require(epoch: EpochLength | None, unit: _TrainUnit) -> EpochLength:
    if epoch is None:
        raise ConfigError(
            f"{unit!r} needs the length of an epoch, but the training loader has no length; "
            "give the period in batches, or return a loader that has a len()"
        )
    return epoch


def in_batches(length: TrainUnit, epoch: EpochLength | None) -> int:
    """A maximum length as a number of batches. Raises ConfigError if it is in epochs, but the
    loader has no length, and TypeError if it is a container."""
    if not isinstance(length.value, int):
        raise TypeError(f"a maximum length must be one number, got {length!r}")
    return length._batches_until(length.value, epoch)
