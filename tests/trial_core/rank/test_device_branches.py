"""Real ranks on a fake accelerator, which counts what snapshots and restores take."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.slots import Driven, build, drive, toy_config
from trial_core.config import ExperimentConfig
from trial_core.messages import BuildLoadersAndRestore, FetchCheckpoint, Fetched, ReadyToTrain
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.rank.collectives.accelerator import HOST_BUFFER_BYTES

pytestmark = pytest.mark.slots

Warm = Callable[[int], SlotGroup]

LAYER_BYTES = 4 * 65 * 64
MODEL_BYTES = 8 * LAYER_BYTES


def config(folder: Path, batches: int, **hparams: Any) -> ExperimentConfig:
    hparams["measures"] = str(folder)
    return toy_config(
        folder, batches, entrypoint="device_trials:DeviceTrial", hyperparameters=hparams
    )


def measured(folder: Path, what: str, rank: int = 0) -> dict[str, int]:
    """What the ranks' `what` took: its peak of additional memory, and all memory pinned."""
    found: dict[str, int] = json.loads((folder / f"{what}-{rank}.json").read_text())
    return found


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_run_on_an_accelerator_is_saved_and_resumed(
    warm_slots: Warm, tmp_path: Path, stage: int
) -> None:
    """As on the CPU; with one host buffer, and without a second copy of the optimizer's state."""
    slots = warm_slots(2)
    on_cpu, on_device = tmp_path / "cpu", tmp_path / "device"
    runs: list[Driven] = []
    for folder, device in ((on_cpu, False), (on_device, True)):
        folder.mkdir()
        first = drive(
            slots, config(folder, 3, zero_stage=stage, device=device), folder, persist=True
        )
        assert first.progress.batches_trained == 3
        again = config(folder, 6, zero_stage=stage, device=device)
        runs.append(drive(slots, again, folder, resume=first, persist=True))
    cpu, device = (run.training[0] for run in runs)
    assert cpu["loss"] == device["loss"]
    assert device["draws"] == 5  # the mean of batches 4 to 6: the generator was restored
    assert device["pinned"] == 2 / 3 * HOST_BUFFER_BYTES  # from the second batch on
    for rank in range(2):
        assert measured(on_device, "save", rank)["pinned"] == HOST_BUFFER_BYTES
        # ZeRO-1's optimizer is without state until then: two moments of half of the model.
        assert measured(on_device, "restore", rank)["peak"] < MODEL_BYTES + 2 * LAYER_BYTES


def test_weights_are_gathered_a_layer_at_a_time(warm_slots: Warm, tmp_path: Path) -> None:
    """Under ZeRO-3 a model that is larger than a device can be evaluated."""
    slots = warm_slots(2)
    trained = drive(slots, config(tmp_path, 3, zero_stage=3), tmp_path, persist=True)
    uuid = trained.checkpoints[-1]
    build(slots, config(tmp_path, 3, zero_stage=3), tmp_path)
    request = FetchCheckpoint(
        uuid=uuid, files=trained.files[uuid], saved_by=trained.topology, restore="weights"
    )
    assert slots.request(request, Fetched) == [Fetched()] * 2
    slots.request(
        BuildLoadersAndRestore(batches_trained=0, checkpoint=uuid, restore="weights"), ReadyToTrain
    )
    for rank in range(2):
        assert LAYER_BYTES <= measured(tmp_path, "weights", rank)["peak"] < 4 * LAYER_BYTES
