"""Several ranks train as one does: equal weights on all, from the gradients of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.alone import train_alone
from tests.support.slots import ONE_TWO_FOUR, Driven, drive, lines, toy_config
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]
Weights = list[dict[str, torch.Tensor]]
TRIALS = "pytorch_trials:"


def train(
    slots: SlotGroup, folder: Path, name: str, batches: int, optimizations: Any, **hparams: Any
) -> Driven:
    """Train a trial of `pytorch_trials` on the ranks of `slots`."""
    config = toy_config(
        folder, batches, entrypoint=TRIALS + name, optimizations=optimizations,
        resources={"slots_per_trial": slots.world_size},
        hyperparameters={"global_batch_size": 4, "record": str(folder), **hparams},
    )  # fmt: skip
    return drive(slots, config, folder)


def assert_ranks_equal(
    folder: Path, world_size: int, expected: Weights, **tolerance: float
) -> None:
    """All ranks have the same weights, bit for bit, and those are `expected`."""
    first, *others = (torch.load(folder / f"weights-{rank}.pt") for rank in range(world_size))
    for model, wanted in enumerate(expected):
        assert first[model].keys() == wanted.keys()
        for name, weight in wanted.items():
            assert all(torch.equal(first[model][name], rank[model][name]) for rank in others), name
            torch.testing.assert_close(first[model][name], weight, **tolerance)


@pytest.mark.parametrize("world_size", ONE_TWO_FOUR)
@pytest.mark.parametrize("averages", [True, False])
def test_accumulation_equals_one_big_batch(
    warm_slots: Warm, tmp_path: Path, world_size: int, averages: bool
) -> None:
    """6 batches of 4 samples with a step in every third, as 2 batches of 12 samples.

    Without averaging, as with a loss that is three times as large. Before a step, each rank has
    the gradients of its samples, because nothing was sent to other ranks.
    """
    optimizations = {"aggregation_frequency": 3, "average_aggregated_gradients": averages}
    train(warm_slots(world_size), tmp_path, "Small", 6, optimizations)
    factor = 1.0 if averages else 3.0
    big = {"global_batch_size": 12, "loss_factor": factor}
    assert_ranks_equal(tmp_path, world_size, train_alone(TRIALS + "Small", 2, big))
    by_batch = zip(*(lines(tmp_path, "gradients", rank) for rank in range(world_size)), strict=True)
    distinct = [len({gradient for _, gradient in ranks}) for ranks in by_batch]
    assert distinct == [world_size, world_size, 1] * 2


@dataclass
class Case:
    """A trial whose forward and backward passes are in an unusual order."""

    trial: str
    hparams: dict[str, Any] = field(default_factory=dict)
    aggregation: int = 1


ORDERS = {
    "a GAN": Case("Gan"),
    "a GAN with accumulation": Case("Gan", aggregation=2),
    "two backward passes": Case("TwoBackwards"),
    "two backward passes, declared": Case("TwoBackwards", {"passes": 2}),
    "two backward passes with accumulation": Case("TwoBackwards", aggregation=2),
    "two forward passes": Case("TwoForwards"),
    "another method": Case("OtherMethod"),
    "another method with accumulation": Case("OtherMethod", aggregation=2),
    "unused parameters": Case("UnusedParameters", {"unused": True}),
    "heads in turn": Case("HeadsInTurn", {"unused": True}),
    "heads in turn, declared": Case("HeadsInTurn", {"passes": 2}),
    "heads in turn, by parts": Case("HeadsInTurn", {"by_parts": True}),
    "a frozen model": Case("FrozenTeacher"),
    "an optimizer of a frozen model": Case("FrozenTeacher", {"steps_teacher": True}),
    "late unfreezing": Case("LateUnfreeze"),
    "evaluation mode": Case("InEvaluationMode"),
    "a recomputed layer": Case("Recomputes", {"unused": True}),
    "sparse gradients": Case("SparseEmbedding"),
    "a gradient penalty": Case("Penalised"),
    "two optimizers": Case("TwoOptimizers"),
    "no backward pass": Case("SkipsBackward", aggregation=3),
}
BY_DEFAULT = {
    "a GAN with accumulation", "two backward passes", "another method", "unused parameters",
    "a frozen model", "late unfreezing",
}  # fmt: skip


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.long) for name in ORDERS],
)
def test_any_order_of_passes_equals_a_single_rank(
    warm_slots: Warm, tmp_path: Path, world_size: int, name: str
) -> None:
    """Four batches on several ranks, and on a single one with the same global batches."""
    case, slots = ORDERS[name], warm_slots(world_size)
    optimizations = {"aggregation_frequency": case.aggregation}
    hparams = {"global_batch_size": 8, **case.hparams}
    train(slots, tmp_path, case.trial, 4, optimizations, **hparams)
    expected = train_alone(TRIALS + case.trial, 4, hparams, optimizations=optimizations)
    assert_ranks_equal(tmp_path, world_size, expected)


@pytest.mark.parametrize(
    ("setting", "unused"),
    [
        ("experiment", False),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("experiment", True),
                                                                   ("trial", False))),
    ],
)  # fmt: skip
def test_gradients_are_sent_in_16_bits(
    warm_slots: Warm, tmp_path: Path, setting: str, unused: bool
) -> None:
    """Near to the exact result, and not equal to it. Before the step, or in the backward pass."""
    by_experiment = {"gradient_compression": setting == "experiment"}
    hparams = {"unused": unused, "compression": True if setting == "trial" else None}
    train(warm_slots(2), tmp_path, "Small", 4, by_experiment, **hparams)
    expected = train_alone(TRIALS + "Small", 4, {"global_batch_size": 4})
    assert_ranks_equal(tmp_path, 2, expected, rtol=1e-2, atol=1e-3)
    weights = torch.load(tmp_path / "weights-0.pt")[0]["0.weight"]
    assert (weights - expected[0]["0.weight"]).abs().max() > 1e-7
