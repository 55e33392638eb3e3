"""AutoTP and Ulysses: an engine says which ranks share samples, without `set_mpu`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from tests.support.consolidated import export_weights
from tests.support.slots import build, drive, lines, toy_config
from tests.support.tensors import differing, tensors
from tests.trial_core.deepspeed.reshard.resharding import files, resharded
from tests.trial_core.deepspeed.resuming import resumed_bit_for_bit
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]
LAYOUTS = {"AutoTP": {"tp": 2}, "Ulysses": {"sp": 2}}
MUON = {
    "sp": 1,
    "optimizer": {"type": "Muon", "params": {"lr": 1e-2}},
    "zero": {"reduce_scatter": False},
}


def long_unless(is_default: bool) -> tuple[pytest.MarkDecorator, ...]:
    return () if is_default else (pytest.mark.long,)


@pytest.mark.parametrize(
    ("layout", "stage"),
    [
        pytest.param(
            layout, stage,
            marks=long_unless((layout, stage) in (("AutoTP", 1), ("Ulysses", 3))),
        )
        for layout in LAYOUTS
        for stage in range(4)
    ],
)  # fmt: skip
def test_two_ranks_of_a_group_train_the_same_samples(
    warm_slots: Warm, tmp_path: Path, layout: str, stage: int
) -> None:
    """They are counted once, and a resumed run is the same bit for bit."""
    slots, hparams = warm_slots(2), {**LAYOUTS[layout], "zero_stage": stage, "accumulation": 2}
    config = toy_config(tmp_path, 3, entrypoint=f"mesh_trials:{layout}", hyperparameters=hparams)
    built = build(slots, config, tmp_path)
    assert (built.topology.world_size, built.topology.data_parallel_size) == (2, 1)
    assert built.batch_samples == 2 * built.topology.micro_batch_samples == 4
    whole, _ = resumed_bit_for_bit(slots, tmp_path, f"mesh_trials:{layout}", **hparams)
    validated = whole.validation[-1]
    assert validated["indices"] == sorted(set(validated["indices"]))  # of rank 0 alone
    assert validated["rank"] == 0
    first, second = (lines(tmp_path / "straight", "samples", rank) for rank in (0, 1))
    assert first == second
    assert len(first) > 9


@pytest.mark.parametrize(
    ("trial", "stage", "two", "one"),
    [
        *(
            pytest.param("Ulysses", stage, {"sp": 2}, {"sp": 1}, marks=long_unless(stage == 1))
            for stage in range(4)
        ),
        *(pytest.param("Ulysses", stage, MUON, MUON, marks=pytest.mark.long) for stage in range(4)),
    ],
)
def test_from_two_ranks_to_one_and_back(
    warm_slots: Warm,
    tmp_path: Path,
    trial: str,
    stage: int,
    two: dict[str, Any],
    one: dict[str, Any],
) -> None:
    """Ulysses divides no model, so that each rank may have the whole sequence. And with Muon."""

    def settings(ranks: int, hparams: dict[str, Any]) -> Any:
        copies = ranks // hparams.get("sp", 1)
        return toy_config(
            tmp_path, 3, entrypoint=f"mesh_trials:{trial}",
            reproducibility={"experiment_seed": ranks},
            hyperparameters={
                "zero_stage": stage, "seed": ranks, "accumulation": 4 // copies, **hparams
            },
        )  # fmt: skip

    before = drive(warm_slots(2), settings(2, two), tmp_path, persist=True)
    between = resharded(warm_slots(1), settings(1, one), tmp_path / "between", before)
    after = resharded(warm_slots(2), settings(2, two), tmp_path / "after", between)
    expected, seen = (
        {
            name: tensor
            for name, tensor in tensors(files(tmp_path, run.checkpoints[-1])).items()
            if name.startswith("model0")
        }
        for run in (before, after)
    )
    assert len(expected) >= 6
    assert differing(expected, seen) == []
    exported = [export_weights(files(tmp_path, run.checkpoints[-1])) for run in (before, between)]
    assert differing(*exported) == []
    if stage:  # DeepSpeed's converter finds the same weights under each name
        named = [
            get_fp32_state_dict_from_zero_checkpoint(files(tmp_path, run.checkpoints[-1]), "model0")
            for run in (before, between)
        ]
        assert len(named[0]) == 6
        assert differing(*named) == []
