"""Checkpoints on their way from ranks to the storage and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.slots import Driven, drive, toy_config
from trial_core.checkpoint.images import is_image
from trial_core.messages import SaveCheckpoint, Saved
from trial_core.slots.group import SlotGroup

pytestmark = pytest.mark.slots

Warm = Callable[[int], SlotGroup]


def trained(slots: SlotGroup, folder: Path, **changes: Any) -> Driven:
    config = toy_config(
        folder, 6, resources={"slots_per_trial": slots.world_size}, scheduling_unit=3, **changes
    )
    return drive(slots, config, folder / "run", persist=True)


def test_shards_are_staged_in_memory(warm_slots: Warm, tmp_path: Path) -> None:
    """And stand in the staging folder as files, which whoever looks there can read."""
    slots = warm_slots(2)
    trained(slots, tmp_path)
    saved = slots.request(SaveCheckpoint(uuid="one-more"), Saved)
    shards = [path for rank in saved for path in Path(rank.staging).rglob("model0/*.pt")]
    assert shards
    assert all(is_image(path) and path.read_bytes()[:2] == b"PK" for path in shards)


@pytest.mark.parametrize("memory_gib", [None, 0], ids=["memory", "disk"])
def test_a_restart_fetches_only_what_is_not_here(
    warm_slots: Warm, tmp_path: Path, memory_gib: float | None
) -> None:
    """Files that were staged on disk are still there; what was in memory went with its rank."""
    slots = warm_slots(2)
    first = trained(slots, tmp_path, checkpointing={"memory_gib_per_rank": memory_gib})
    shards = list((tmp_path / "checkpoints").rglob("model0/*.pt"))
    for path in shards:
        path.write_bytes(b"\0" * path.stat().st_size)  # whoever reads the store will notice
    config = toy_config(tmp_path, 8)
    if memory_gib is None:
        with pytest.raises(AssertionError, match="damaged"):
            drive(slots, config, tmp_path / "run", resume=first)
    else:
        assert drive(slots, config, tmp_path / "run", resume=first).stages[0] == "train [6→8]"


def test_only_the_newest_checkpoint_is_kept_on_disk(warm_slots: Warm, tmp_path: Path) -> None:
    """Staging takes the room of one committed checkpoint, and of the one on its way."""
    slots = warm_slots(2)
    run = trained(
        slots, tmp_path, min_checkpoint_period={"batches": 3},
        checkpointing={"memory_gib_per_rank": 0},
    )  # fmt: skip
    assert len(run.checkpoints) == 2
    kept = [path.name for path in (tmp_path / "run" / "kept").iterdir()]
    assert kept == run.checkpoints[-1:]
    assert not any((tmp_path / "run" / "staging").rglob("*.pt"))
