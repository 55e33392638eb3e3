"""Lengths and periods: what is due when, in batches and in epochs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trial_core.errors import ConfigError
from trial_core.units import Batch, Epoch, EpochLength, TrainUnit, in_batches

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
def test_an_epoch_is_over_with_the_first_batch_that_holds_its_last_sample(
    epoch: EpochLength, epochs: int
) -> None:
    """Rounding is upwards and once: one batch fewer has not seen all its micro-batches."""
    batches = epoch.batches_until(epochs)
    wanted = epochs * epoch.micro_batches
    assert (batches - 1) * epoch.micro_batches_per_batch < wanted
    assert wanted <= batches * epoch.micro_batches_per_batch
    assert epoch.epochs_completed(batches) >= epochs > epoch.epochs_completed(batches - 1)


@given(epoch_lengths, st.integers(0, 200))
def test_a_batch_belongs_to_the_epoch_of_its_first_micro_batch(
    epoch: EpochLength, batch_idx: int
) -> None:
    """A batch that straddles two epochs counts for the one it begins in."""
    first_micro_batch = batch_idx * epoch.micro_batches_per_batch
    begins = epoch.epoch_of(batch_idx) * epoch.micro_batches
    assert begins <= first_micro_batch < begins + epoch.micro_batches


def test_epochs_that_are_no_whole_number_of_batches_do_not_drift() -> None:
    """10 micro-batches in batches of 4: epochs end in batches 3, 5, 8 and 10, not 3, 6, 9, 12."""
    epoch = EpochLength(micro_batches=10, micro_batches_per_batch=4)
    assert [epoch.batches_until(k) for k in (1, 2, 3, 4)] == [3, 5, 8, 10]
    assert [b for b in range(11) if Epoch(1).is_due(b, epoch)] == [3, 5, 8, 10]


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 1)])
def test_an_epoch_of_nothing_is_refused(sizes: tuple[int, int]) -> None:
    """An epoch without micro-batches has no length to count in."""
    with pytest.raises(ValueError, match="at least one micro-batch"):
        EpochLength(*sizes)


@given(periods, epoch_lengths, st.integers(0, 100), st.integers(0, 60))
def test_next_due_is_the_first_batch_at_which_is_due(
    period: TrainUnit, epoch: EpochLength, trained: int, ahead: int
) -> None:
    """The shortcut that looks ahead and the question asked batch by batch agree."""
    until = trained + ahead
    one_by_one = (b for b in range(trained + 1, until + 1) if period.is_due(b, epoch))
    assert period.next_due(trained, until, epoch) == next(one_by_one, None)


def test_a_container_is_due_at_its_members_only() -> None:
    """Batch([5, 30]) is after 5 and 30; Epoch([2]) after the second epoch."""
    assert [b for b in range(100) if Batch([5, 30]).is_due(b)] == [5, 30]
    assert [b for b in range(100) if Epoch([2]).is_due(b, EpochLength(7, 1))] == [14]


def test_an_epoch_shorter_than_a_batch_is_not_missed() -> None:
    """When a batch holds several epochs, each that ends in it counts."""
    epoch = EpochLength(micro_batches=3, micro_batches_per_batch=10)  # 3, 6, 10, 13 … epochs
    assert [b for b in range(5) if Epoch([5]).is_due(b, epoch)] == [2]
    assert Epoch(4).next_due(0, 10, epoch) == 2


@given(periods, epoch_lengths)
def test_nothing_is_due_before_the_first_batch(period: TrainUnit, epoch: EpochLength) -> None:
    """Zero is a multiple of everything, and yet no period has ended."""
    assert not period.is_due(0, epoch)


@pytest.mark.parametrize("unit", [Batch, Epoch])
@pytest.mark.parametrize("value", ["100", b"100", 1.5, None, True])
def test_a_unit_of_something_else_than_numbers_is_refused(
    unit: type[Batch] | type[Epoch], value: object
) -> None:
    """Text is a container in Python, but Batch("100") is a mistake."""
    with pytest.raises(TypeError, match="takes a positive int or a container"):
        unit(value)  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize("value", [0, -3])
def test_a_unit_that_is_not_positive_is_refused(value: int) -> None:
    """A period of no length would be due for ever."""
    with pytest.raises(ValueError, match=f"positive number, got {value}"):
        Batch(value)


def test_batches_and_epochs_do_not_compare() -> None:
    """Numbers of different units have no order, and are never equal."""
    with pytest.raises(TypeError, match="their units differ"):
        _ = Batch(1) < Epoch(2)
    with pytest.raises(TypeError, match="their units differ"):
        _ = Epoch(1) > Batch(2)
    assert Batch(1) != Epoch(1)
    assert Batch(1) < Batch(2)


def test_containers_have_no_order() -> None:
    """A set of batches is neither longer nor shorter than a number of them."""
    with pytest.raises(TypeError, match="only single numbers"):
        _ = Batch([1]) < Batch(2)


def test_equal_units_have_equal_hashes() -> None:
    """Also where equal containers look different."""
    assert Batch({1, 2}) == Batch(frozenset({2, 1}))
    assert hash(Batch({1, 2})) == hash(Batch(frozenset({2, 1})))
    assert {Epoch(3): "x"}[Epoch(3)] == "x"


def test_epochs_need_a_loader_with_a_length() -> None:
    """Epochs are refused where an epoch's length is unknown; batches are not."""
    for question in (Epoch(1).is_due, lambda _: Epoch(1).next_due(0, 9)):
        with pytest.raises(ConfigError, match=r"Epoch\(1\) needs to know how long an epoch is"):
            question(5)
    with pytest.raises(ConfigError, match="has no length"):
        in_batches(Epoch(2), None)
    assert in_batches(Batch(7), None) == 7


def test_a_maximum_length_is_one_number() -> None:
    """A container cannot say where training ends."""
    with pytest.raises(TypeError, match="a length is one number"):
        in_batches(Batch([1, 2]), None)


def test_a_length_in_epochs_ends_with_the_whole_epoch() -> None:
    """Two epochs of 10 micro-batches in batches of 4 are 5 batches."""
    assert in_batches(Epoch(2), EpochLength(10, 4)) == 5
