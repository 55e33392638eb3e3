"""Weights out of a checkpoint: of another trial's, whatever the ZeRO stages of both."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trial_core.deepspeed.export.weights_file import export_weights

from tests.support.slots import build, drive, toy_config
from trial_core.deepspeed.weights import load_engine
from trial_core.errors import CheckpointError
from trial_core.messages import (
    BuildLoaders,
    FetchCheckpoint,
    Fetched,
    LoadersBuilt,
    SaveCheckpoint,
    Saved,
)
from trial_core.slots.group import SlotGroup

pytestmark = pytest.mark.slots


Warm = Callable[[int], SlotGroup]


def assert_weights_move(
    source: SlotGroup, target: SlotGroup, folder: Path, stages: tuple[int, int]
) -> None:
    """A trial of 3 batches on `source`; a new one on `target` begins with its weights."""
    of_source, of_target = (
        toy_config(folder, 3, hyperparameters={"zero_stage": stage}) for stage in stages
    )
    trained = drive(source, of_source, folder, persist=True)
    uuid = trained.checkpoints[-1]
    build(target, of_target, folder)
    assert trained.topology is not None
    fetched = target.request(
        FetchCheckpoint(
            uuid=uuid, files=trained.files[uuid], saved_by=trained.topology, restore="weights"
        ),
        Fetched,
    )
    assert fetched == [Fetched()] * target.world_size
    target.request(
        BuildLoaders(batches_trained=0, checkpoint=uuid, restore="weights"), LoadersBuilt
    )  # fmt: skip
    saved = target.request(SaveCheckpoint(uuid="after"), Saved)
    merged = folder / "merged"
    for rank in saved:
        shutil.copytree(rank.staging, merged, dirs_exist_ok=True)

    expected = export_weights(folder / "checkpoints" / "checkpoints" / uuid)
    seen = export_weights(merged)
    assert expected.keys() == seen.keys()
    assert [name for name in expected if not torch.equal(expected[name], seen[name])] == []


@pytest.mark.parametrize("source", [0, 2, 3])
@pytest.mark.parametrize("target", [0, 2, 3])
def test_weights_move_between_zero_stages(
    warm_slots: Warm, tmp_path: Path, source: int, target: int
) -> None:
    """The new trial's weights are the source's, bit for bit, on 1 rank."""
    assert_weights_move(warm_slots(1), warm_slots(1), tmp_path, (source, target))


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [
        ((1, 4), (0, 2)),
        ((1, 4), (2, 3)),
        ((2, 1), (3, 2)),
        ((4, 2), (3, 2)),
        ((4, 2), (3, 3)),
    ],
)
def test_weights_move_between_numbers_of_ranks(
    warm_slots: Warm, tmp_path: Path, ranks: tuple[int, int], stages: tuple[int, int]
) -> None:
    """More ranks, or fewer, than the source had, from whole weights or shards, into either."""
    source, target = (warm_slots(world_size) for world_size in ranks)
    assert_weights_move(source, target, tmp_path, stages)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (1, "it lacks nothing, and has besides 1.bias, 1.weight"),
        (3, "it lacks 2.bias, 2.weight, and has besides nothing"),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path: Path, layers: int, message: str) -> None:
    """Frozen weights may be missing; what else is missing, or is too much, is named."""

    def model(layers: int) -> torch.nn.Module:
        linear = [torch.nn.Linear(1, 1) for _ in range(layers)]
        linear[0].requires_grad_(False)
        return torch.nn.Sequential(*linear)

    saved, own = model(2).state_dict(), model(layers)
    del saved["0.weight"], saved["0.bias"]
    engine: Any = SimpleNamespace(
        module=own,
        load_checkpoint=lambda folder, tag, custom_load_fn: custom_load_fn(src=saved, dst=own),
    )
    (tmp_path / "model0").mkdir()
    (tmp_path / "model0" / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError) as refusal:
        load_engine(engine, tmp_path, "model0")
    assert str(refusal.value) == f"the checkpoint is not of this model: {message}"
