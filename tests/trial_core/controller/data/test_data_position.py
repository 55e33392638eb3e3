"""Where in the data other ranks go on, with other micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trial_core.controller.data.data_position import drawn_here
from trial_core.units import EpochLength


def micro_batches(samples: int, size: int) -> int:
    return -(-samples // size)


def begins_at(place: int, samples: int, size: int) -> tuple[int, int]:
    """The pass over the data and the sample with which a micro-batch of all ranks' begins."""
    passes, within = divmod(place, micro_batches(samples, size))
    return passes, within * size


@given(
    samples=st.integers(1, 60), batches=st.integers(0, 40), size=st.integers(1, 6),
    parts=st.sampled_from([1, 2, 3, 4, 6, 12]), then=st.sampled_from([1, 2, 4]),
    now=st.sampled_from([1, 2, 4]), smaller=st.sampled_from([1, 2, 3]),
)  # fmt: skip
def test_nothing_is_left_out_and_little_is_seen_twice(
    samples: int, batches: int, size: int, parts: int, then: int, now: int, smaller: int
) -> None:
    """By global sample index: at the very sample, or less than a round of all ranks before it."""
    per_batch, rest = divmod(parts * then * smaller, now)
    assume(not rest)
    size_then, size_now = size * smaller, size
    saved = {
        "drawn": batches * parts, "per_batch": parts, "ranks": then,
        "pass": micro_batches(samples, size_then),
    }  # fmt: skip
    epoch = EpochLength(micro_batches(samples, size_now), per_batch * now)

    drawn = drawn_here(saved, per_batch, now, epoch)
    reached = begins_at(batches * parts * then, samples, size_then)
    assert begins_at(drawn * now, samples, size_now) <= reached
    assert begins_at((drawn + 1) * now, samples, size_now) > reached
    if samples % size_then == 0 or smaller == 1:
        assert begins_at(drawn * now, samples, size_now) == reached


@pytest.mark.parametrize(("drawn", "said"), [(8, ""), (10, "samples for 1 micro-batch")])
def test_samples_that_are_seen_twice_are_told_of(
    caplog: pytest.LogCaptureFixture, drawn: int, said: str
) -> None:
    """2 ranks with micro-batches of 4 where one had such of 2: 16 samples divide, 20 do not."""
    saved = {"drawn": drawn, "per_batch": 4, "ranks": 1, "pass": 24}
    assert drawn_here(saved, 1, 2, EpochLength(12, 2)) == 2
    assert said in caplog.text


def test_a_trial_that_draws_more_than_a_batch_goes_on_where_it_was() -> None:
    """6 micro-batches for 2 batches of 2, on 2 ranks: 12 of all, so 3 on each of 4 ranks."""
    saved = {"drawn": 6, "per_batch": 2, "ranks": 2, "pass": 25}
    assert drawn_here(saved, 1, 4, EpochLength(25, 4)) == 3


def test_checkpoints_of_earlier_releases_do_not_tell_of_their_ranks() -> None:
    """They are taken to have been as many."""
    assert drawn_here({"drawn": 6, "per_batch": 2}, 4, 2, EpochLength(25, 8)) == 12
