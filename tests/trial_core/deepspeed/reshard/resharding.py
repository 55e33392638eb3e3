"""Restores and saves checkpoints on other ranks, and with other ZeRO stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from tests.support.consolidated import consolidated, export_weights
from tests.support.slots import Driven, build, toy_config
from trial_core.config import ExperimentConfig
from trial_core.messages import (
    BuildLoadersAndRestore,
    FetchCheckpoint,
    Fetched,
    PersistCheckpoint,
    Persisted,
    ReadyToTrain,
    SaveCheckpoint,
    Saved,
)
from trial_core.processes.slots.slot_group import SlotGroup


def config(storage: Path, batches: int, stage: int, **hparams: Any) -> ExperimentConfig:
    """An experiment of the topology toy, with checkpoints below `storage`."""
    return toy_config(
        storage, batches, entrypoint="topology_trials:AnyTopology", scheduling_unit=3,
        hyperparameters={"zero_stage": stage, **hparams},
    )  # fmt: skip


def restore(slots: SlotGroup, run: Driven) -> None:
    """Fetch and load a run's last checkpoint into the trial that is built."""
    uuid = run.checkpoints[-1]
    request = FetchCheckpoint(uuid=uuid, files=run.files[uuid], saved_by=run.topology)
    assert slots.request(request, Fetched) == [Fetched()] * slots.world_size
    load(slots, run)


def load(slots: SlotGroup, run: Driven) -> None:
    """Load a run's last checkpoint, which has been fetched."""
    uuid, begin = run.checkpoints[-1], run.progress.batches_trained
    slots.request(
        BuildLoadersAndRestore(batches_trained=begin, checkpoint=uuid, saved_by=run.topology),
        ReadyToTrain,
    )


def save(slots: SlotGroup, run: Driven) -> Driven:
    """Save the trial that is built and was restored from `run`."""
    uuid = str(uuid4())
    slots.request(SaveCheckpoint(uuid=uuid), Saved)
    stored = slots.request(PersistCheckpoint(uuid=uuid), Persisted)
    return replace(
        run, checkpoints=[uuid], files={uuid: [entry for rank in stored for entry in rank.files]}
    )


def resharded(slots: SlotGroup, settings: ExperimentConfig, run_dir: Path, run: Driven) -> Driven:
    """`run` with its last checkpoint loaded and saved, untrained, with another topology."""
    built = build(slots, settings, run_dir)
    restore(slots, run)
    return replace(save(slots, run), topology=built.topology)


def files(storage: Path, uuid: str) -> Path:
    """The folder of a checkpoint's files."""
    return storage / "checkpoints" / "checkpoints" / uuid


def contents(stored: Path, work: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The trained parameters with their moments; and all weights and buffers of the module.

    Args:
        work: a new folder to work in.
    """
    named = consolidated(stored / "model0", work)
    trained = {Path(name).parent for name in named if name.endswith("/exp_avg")}
    parameters = {name: tensor for name, tensor in named.items() if Path(name).parent in trained}
    return parameters, export_weights(stored)
