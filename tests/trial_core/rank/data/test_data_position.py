"""Where in the data another number of ranks continues, with other micro-batch sizes."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, strategies as st

from trial_core.rank.data.loaders import micro_batches_drawn
from trial_core.schedule.units import EpochLength


def micro_batches(samples: int, size: int) -> int:
    return -(-samples // size)


def begins_at(place: int, samples: int, size: int) -> tuple[int, int]:
    """The pass, and the sample, at which micro-batch number `place` of all ranks begins."""
    passes, within = divmod(place, micro_batches(samples, size))
    return passes, within * size


@given(
    samples=st.integers(1, 60), batches=st.integers(0, 40), size=st.integers(1, 6),
    parts=st.sampled_from([1, 2, 3, 4, 6, 12]), then=st.sampled_from([1, 2, 4]),
    now=st.sampled_from([1, 2, 4]), smaller=st.sampled_from([1, 2, 3]),
)  # fmt: skip
def test_no_sample_is_skipped_and_few_are_repeated(
    samples: int, batches: int, size: int, parts: int, then: int, now: int, smaller: int
) -> None:
    """Training continues at the exact sample, or less than one round of all ranks before it."""
    per_batch, rest = divmod(parts * then * smaller, now)
    assume(not rest)
    size_then, size_now = size * smaller, size
    saved = {
        "drawn": batches * parts, "per_batch": parts, "ranks": then,
        "pass": micro_batches(samples, size_then),
    }  # fmt: skip
    epoch = EpochLength(micro_batches(samples, size_now), per_batch * now)

    drawn = micro_batches_drawn(saved, per_batch, now, epoch)
    reached = begins_at(batches * parts * then, samples, size_then)
    assert begins_at(drawn * now, samples, size_now) <= reached
    assert begins_at((drawn + 1) * now, samples, size_now) > reached
    if samples % size_then == 0 or smaller == 1:
        assert begins_at(drawn * now, samples, size_now) == reached


@pytest.mark.parametrize(("drawn", "warning"), [(8, ""), (10, "samples of 1 micro-batch")])
def test_repeated_samples_are_warned_of(
    caplog: pytest.LogCaptureFixture, drawn: int, warning: str
) -> None:
    """From one rank with micro-batches of 2 to two ranks with 4: 16 samples divide, 20 do not."""
    saved = {"drawn": drawn, "per_batch": 4, "ranks": 1, "pass": 24}
    assert micro_batches_drawn(saved, 1, 2, EpochLength(12, 2)) == 2
    assert warning in caplog.text


def test_a_trial_that_draws_more_than_a_batch_continues_where_it_was() -> None:
    """2 ranks drew 6 micro-batches each, for 2 batches of 2: 12 in all, so 3 on each of 4 ranks."""
    saved = {"drawn": 6, "per_batch": 2, "ranks": 2, "pass": 25}
    assert micro_batches_drawn(saved, 1, 4, EpochLength(25, 4)) == 3


def test_more_micro_batches_a_batch() -> None:
    """6 of 2 a batch are 12 of 4 a batch."""
    saved = {"drawn": 6, "per_batch": 2, "ranks": 2, "pass": None}
    assert micro_batches_drawn(saved, 4, 2, EpochLength(25, 8)) == 12
