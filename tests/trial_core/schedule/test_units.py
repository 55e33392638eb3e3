"""Lengths and periods in batches and epochs."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from trial_core.errors import ConfigError
from trial_core.schedule.units import Batch, Epoch, EpochLength, TrainUnit, in_batches

epoch_lengths = st.builds(EpochLength, st.integers(1, 50), st.integers(1, 60))
numbers = st.integers(1, 20)
number_sets = st.frozensets(st.integers(1, 40), min_size=1, max_size=5)
periods = st.one_of(
    st.builds(Batch, numbers),
    st.builds(Epoch, numbers),
    st.builds(Batch, number_sets),
    st.builds(Epoch, number_sets),
)


@given(epoch_lengths, st.integers(1, 100))
def test_an_epoch_ends_with_the_batch_of_its_last_sample(epoch: EpochLength, epochs: int) -> None:
    """`batches_until` rounds up, once: one batch fewer lacks micro-batches."""
    batches = epoch.batches_until(epochs)
    wanted = epochs * epoch.micro_batches
    assert (batches - 1) * epoch.micro_batches_per_batch < wanted
    assert wanted <= batches * epoch.micro_batches_per_batch
    assert epoch.epochs_completed(batches) >= epochs > epoch.epochs_completed(batches - 1)


@given(epoch_lengths, st.integers(0, 200))
def test_a_batch_belongs_to_the_epoch_in_which_it_begins(
    epoch: EpochLength, batch_idx: int
) -> None:
    """Its first micro-batch decides."""
    first_micro_batch = batch_idx * epoch.micro_batches_per_batch
    begins = epoch.epoch_of(batch_idx) * epoch.micro_batches
    assert begins <= first_micro_batch < begins + epoch.micro_batches


def test_epochs_of_fractional_batches_do_not_drift() -> None:
    """10 micro-batches in batches of 4: epochs end at batches 3, 5, 8, 10, not 3, 6, 9, 12."""
    epoch = EpochLength(micro_batches=10, micro_batches_per_batch=4)
    assert [epoch.batches_until(k) for k in (1, 2, 3, 4)] == [3, 5, 8, 10]
    assert [b for b in range(11) if Epoch(1).is_due(b, epoch)] == [3, 5, 8, 10]


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 1)])
def test_an_empty_epoch_is_refused(sizes: tuple[int, int]) -> None:
    """An epoch has at least one micro-batch."""
    with pytest.raises(ValueError, match="at least one micro-batch"):
        EpochLength(*sizes)


@given(
    st.one_of(st.builds(Batch, numbers), st.builds(Epoch, numbers)),
    epoch_lengths,
    st.integers(0, 100),
)
def test_last_due_and_times_due_agree_with_is_due(
    period: TrainUnit, epoch: EpochLength, trained: int
) -> None:
    """Several epochs may end in one batch, so `times_due` may be more than the due batches."""
    due = [batch for batch in range(1, trained + 1) if period.is_due(batch, epoch)]
    assert period.last_due(trained, epoch) == (due[-1] if due else 0)
    assert period.times_due(trained, epoch) >= len(due)


@given(periods, epoch_lengths, st.integers(0, 100), st.integers(0, 60))
def test_next_due_agrees_with_is_due(
    period: TrainUnit, epoch: EpochLength, trained: int, ahead: int
) -> None:
    """It is the first batch for which `is_due` is true."""
    until = trained + ahead
    one_by_one = (b for b in range(trained + 1, until + 1) if period.is_due(b, epoch))
    assert period.next_due(trained, until, epoch) == next(one_by_one, None)


def test_a_container_is_due_at_its_members_only() -> None:
    """Batch([5, 30]) is due after 5 and 30, Epoch([2]) after the second epoch."""
    assert [b for b in range(100) if Batch([5, 30]).is_due(b)] == [5, 30]
    assert [b for b in range(100) if Epoch([2]).is_due(b, EpochLength(7, 1))] == [14]


def test_an_epoch_shorter_than_a_batch_is_not_missed() -> None:
    """Every epoch that ends in a batch is due at that batch."""
    epoch = EpochLength(micro_batches=3, micro_batches_per_batch=10)  # 3, 6, 10, 13 … epochs
    assert [b for b in range(5) if Epoch([5]).is_due(b, epoch)] == [2]
    assert Epoch(4).next_due(0, 10, epoch) == 2


@given(periods, epoch_lengths)
def test_nothing_is_due_before_the_first_batch(period: TrainUnit, epoch: EpochLength) -> None:
    """0 is a multiple of every period, but no period has ended."""
    assert not period.is_due(0, epoch)


@pytest.mark.parametrize("unit", [Batch, Epoch])
@pytest.mark.parametrize("value", ["100", b"100", 1.5, None, True])
def test_a_unit_takes_only_numbers(unit: type[Batch] | type[Epoch], value: object) -> None:
    """Batch("100") is refused, although a str is a container."""
    with pytest.raises(TypeError, match="takes a positive int or a container"):
        unit(value)  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize("value", [0, -3])
def test_a_unit_must_be_positive(value: int) -> None:
    """0 and negative numbers are refused."""
    with pytest.raises(ValueError, match=f"positive number, got {value}"):
        Batch(value)


def test_batches_and_epochs_do_not_compare() -> None:
    """Different units have no order and are never equal."""
    with pytest.raises(TypeError, match="their units differ"):
        _ = Batch(1) < Epoch(2)
    with pytest.raises(TypeError, match="their units differ"):
        _ = Epoch(1) > Batch(2)
    assert Batch(1) != Epoch(1)
    assert Batch(1) < Batch(2)


def test_containers_have_no_order() -> None:
    """Comparing a container raises."""
    with pytest.raises(TypeError, match="only single numbers"):
        _ = Batch([1]) < Batch(2)


def test_equal_units_have_equal_hashes() -> None:
    """Also for equal containers of different types."""
    assert Batch({1, 2}) == Batch(frozenset({2, 1}))
    assert hash(Batch({1, 2})) == hash(Batch(frozenset({2, 1})))
    assert {Epoch(3): "x"}[Epoch(3)] == "x"


def test_epochs_need_a_loader_with_a_length() -> None:
    """Epochs are refused if the length of an epoch is unknown; batches are not."""
    for question in (Epoch(1).is_due, lambda _: Epoch(1).next_due(0, 9)):
        with pytest.raises(ConfigError, match=r"Epoch\(1\) needs the length of an epoch"):
            question(5)
    with pytest.raises(ConfigError, match="has no length"):
        in_batches(Epoch(2), None)
    assert in_batches(Batch(7), None) == 7
    assert in_batches(Epoch(2), EpochLength(10, 4)) == 5


def test_a_maximum_length_is_one_number() -> None:
    """A container is refused."""
    with pytest.raises(TypeError, match="a maximum length must be one number"):
        in_batches(Batch([1, 2]), None)
