"""Where batches of another size may begin, and where epochs of another length."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, strategies as st

from trial_core.errors import CheckpointError
from trial_core.rank.data.resized_batches import (
    counted_on,
    has_other_length,
    with_other_length,
)
from trial_core.schedule.units import EpochLength

few = st.integers(1, 6)


def length(samples: int, micro_batch: int, per_batch: int) -> EpochLength:
    return EpochLength(-(-samples // micro_batch), per_batch)


def place(batches: int, per_batch: int = 1) -> dict[str, Any]:
    return {"drawn": batches * per_batch, "ranks": 1}


@given(samples=st.integers(1, 60), before=st.tuples(few, few), now=st.tuples(few, few),
       batches=st.integers(0, 40))  # fmt: skip
def test_they_begin_at_the_same_sample(
    samples: int, before: tuple[int, int], now: tuple[int, int], batches: int
) -> None:
    """Of the same epoch. Else the error names a batch at which they do, with any size."""
    then, epoch = length(samples, *before), length(samples, *now)
    sizes = (before[0] * before[1], now[0] * now[1])
    try:
        counted = counted_on(epoch, then, sizes, batches, place(batches, before[1]))
    except CheckpointError as error:
        batches = int(re.findall(r"a max_length of (\d+) batches", str(error))[0])
        counted = counted_on(epoch, then, sizes, batches, place(batches, before[1]))
        assert then.place(batches)[1] == 0
    epochs, micro_batches = then.place(batches)
    assert counted.place(batches) == (epochs, micro_batches * before[0] // now[0])
    assert counted.place(batches + 1) > (epochs, micro_batches * before[0] // now[0])


def test_sizes_may_change_again() -> None:
    """240 samples: an epoch in batches of 24, half of one in 30, the rest in 60, then in 48."""
    counted, at = length(240, 24, 1), 0
    for batches, sizes in ((10, (24, 30)), (14, (30, 60)), (16, (60, 48))):
        now = length(240, sizes[1], 1)
        counted = counted_on(now, counted, sizes, batches, place(batches - counted.first_batch))
        at = batches
    assert counted.place(at) == (2, 0)
    assert counted.batches_until(3) == 21


@given(samples=st.integers(1, 60), other=st.integers(1, 60), micro=few, per_batch=few,
       batches=st.integers(0, 40))  # fmt: skip
def test_earlier_epochs_keep_their_numbers(
    samples: int, other: int, micro: int, per_batch: int, batches: int
) -> None:
    """If the data are longer or shorter. Less than a batch comes again, except that the present
    epoch still ends with a batch."""
    then, epoch = length(samples, micro, per_batch), length(other, micro, per_batch)
    counted = with_other_length(epoch, then, batches)
    (epochs, before), (still, place) = then.place(batches), counted.place(batches)
    assert still == epochs
    assert place <= before < place + per_batch or place + per_batch >= counted.micro_batches
    assert counted.batches_until(epochs + 1) > batches
    assert has_other_length(epoch, then) == (epoch != then)


@given(samples=st.integers(1, 200), micro=few, parts=few, per_batch=few, drops=st.booleans())
def test_other_micro_batches_are_no_other_length(
    samples: int, micro: int, parts: int, per_batch: int, drops: bool
) -> None:
    """The last micro-batch of a pass may be smaller, or left out."""
    sizes = (micro * parts, micro)
    counts = [samples // each if drops else -(-samples // each) for each in sizes]
    large = EpochLength(max(counts[0], 1), per_batch)
    small = EpochLength(max(counts[1], parts), per_batch * parts)
    assert not has_other_length(small, large)
    assert not has_other_length(large, small)


def test_another_size_and_other_data() -> None:
    """5 of 10 batches of 24; then a pass has 4 batches of 12, and the last one ends the epoch."""
    counted = counted_on(length(48, 12, 1), length(240, 24, 1), (24, 12), 15, place(15))
    assert (counted.place(15), counted.batches_until(3)) == ((1, 3), 20)


@pytest.mark.parametrize(
    ("then", "saved", "text"),
    [
        (EpochLength(10, 1), place(10, 2), "its batches have not always taken"),
        (None, place(10), "the length of an epoch is not known"),
    ],
)
def test_a_place_that_is_not_known_is_refused(
    then: EpochLength | None, saved: dict[str, Any], text: str
) -> None:
    """Also at what would be an epoch's end."""
    with pytest.raises(CheckpointError, match=text):
        counted_on(EpochLength(5, 1), then, (24, 48), 10, saved)
