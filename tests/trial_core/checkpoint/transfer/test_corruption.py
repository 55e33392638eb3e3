"""Real ranks find damage in a stored checkpoint before they train on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.manifests import entry, stored_files
from tests.support.slots import build, drive, toy_config
from trial_core.messages import FetchCheckpoint, Fetched
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]


def test_damage_is_found_before_training_continues(warm_slots: Warm, tmp_path: Path) -> None:
    """An intact checkpoint is fetched. Of a damaged one, a rank names the file and its rank.

    The damage is one file replaced by the same rank's file of the checkpoint before (the ballast
    has the same size in all checkpoints, so only its digest differs), then a missing file.
    """
    slots = warm_slots(2)
    config = toy_config(
        tmp_path, 8, scheduling_unit=4, min_checkpoint_period={"batches": 4},
        hyperparameters={"record": str(tmp_path), "ballast_mib": 1},
    )  # fmt: skip
    run = drive(slots, config, tmp_path / "run", persist=True)
    older, newer = run.checkpoints[-2:]
    stored = tmp_path / "checkpoints" / "checkpoints"
    ballast = next(each for each in run.files[newer] if "ballast-" in each.path and each.rank == 1)
    optimizer = next(each for each in run.files[newer] if "optim_states" in each.path)
    request = FetchCheckpoint(uuid=newer, files=run.files[newer])

    def fetch(machine: str) -> list[Fetched]:
        build(slots, config, tmp_path / machine)
        return slots.request(request, Fetched)

    def reported(machine: str) -> str:
        fetched = fetch(machine)
        assert [each.problem for each in fetched] == [None, None]
        return "; ".join(each.damage for each in fetched if each.damage)

    assert fetch("first") == [Fetched(), Fetched()]
    shutil.copyfile(stored / older / ballast.path, stored / newer / ballast.path)
    seen = entry(ballast.path, (stored / newer / ballast.path).read_bytes()).digest
    assert seen != ballast.digest
    expected = f"has digest {seen}, expected {ballast.digest}"
    assert f"{ballast.path}, written by rank 1, {expected}" in reported("second")
    assert not [path for path in stored_files(tmp_path / "second") if path.endswith(ballast.path)]

    (stored / newer / optimizer.path).unlink()
    missing = f"{optimizer.path}, written by rank {optimizer.rank}, is missing"
    assert missing in reported("third")
