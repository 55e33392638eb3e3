"""Starting from another trial's weights alone, whatever the ZeRO stages of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.slots import build, drive, toy_config
from trial_core.deepspeed.export import export_weights
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


@pytest.mark.parametrize("source", [0, 2, 3])
@pytest.mark.parametrize("target", [0, 2, 3])
def test_weights_move_between_zero_stages(
    warm_slots: Callable[[int], SlotGroup], tmp_path: Path, source: int, target: int
) -> None:
    """The new trial's weights are the source's, bit for bit, on 1 rank."""
    slots = warm_slots(1)
    trained = drive(
        slots, toy_config(tmp_path, 3, hyperparameters={"zero_stage": source}), tmp_path,
        persist=True,
    )  # fmt: skip
    uuid = trained.checkpoints[-1]
    build(slots, toy_config(tmp_path, 3, hyperparameters={"zero_stage": target}), tmp_path)
    slots.request(FetchCheckpoint(uuid=uuid, files=trained.files[uuid]), Fetched)
    slots.request(
        BuildLoaders(batches_trained=0, checkpoint=uuid, restore="weights"), LoadersBuilt
    )  # fmt: skip
    saved = slots.request(SaveCheckpoint(uuid="after"), Saved)[0]

    expected = export_weights(tmp_path / "checkpoints" / "checkpoints" / uuid)
    seen = export_weights(Path(saved.staging))
    assert expected.keys() == seen.keys()
    assert [name for name in expected if not torch.equal(expected[name], seen[name])] == []
