"""Takes checkpoints to other ranks, and other ZeRO stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from trial_core.deepspeed.export.weights_file import export_weights

from tests.support.consolidated import consolidated
from tests.support.slots import Driven, build, toy_config
from trial_core.config import ExperimentConfig
from trial_core.messages import (
    BuildLoaders,
    FetchCheckpoint,
    Fetched,
    LoadersBuilt,
    PersistCheckpoint,
    Persisted,
    SaveCheckpoint,
    Saved,
)
from trial_core.slots.group import SlotGroup


def config(
    storage: Path, batches: int, stage: int, trial: str = "AnyTopology", **hparams: Any
) -> ExperimentConfig:
    """An experiment of one of the topology toys, whose checkpoints go below `storage`."""
    return toy_config(
        storage, batches, entrypoint=f"topology_trials:{trial}", scheduling_unit=3,
        hyperparameters={"zero_stage": stage, **hparams},
    )  # fmt: skip


def restore(slots: SlotGroup, run: Driven) -> None:
    """Fetch and load a run's last checkpoint into the trial that is built."""
    uuid = run.checkpoints[-1]
    request = FetchCheckpoint(uuid=uuid, files=run.files[uuid], saved_by=run.topology)
    fetched = slots.request(request, Fetched)
    assert fetched == [Fetched()] * slots.world_size
    load(slots, run)


def load(slots: SlotGroup, run: Driven) -> None:
    """Load a run's last checkpoint, which has been fetched."""
    uuid, begin = run.checkpoints[-1], run.progress.batches_trained
    slots.request(
        BuildLoaders(batches_trained=begin, checkpoint=uuid, saved_by=run.topology), LoadersBuilt
    )


def save(slots: SlotGroup, run: Driven) -> Driven:
    """Save the trial that is built, and was restored from `run`."""
    uuid = str(uuid4())
    slots.request(SaveCheckpoint(uuid=uuid), Saved)
    stored = slots.request(PersistCheckpoint(uuid=uuid), Persisted)
    return replace(
        run, checkpoints=[uuid], files={uuid: [entry for rank in stored for entry in rank.files]}
    )


def moved(slots: SlotGroup, settings: ExperimentConfig, run_dir: Path, run: Driven) -> Driven:
    """`run` as if other ranks had saved its last checkpoint: loaded and saved, not trained."""
    built = build(slots, settings, run_dir)
    restore(slots, run)
    return replace(save(slots, run), topology=built.topology)


def files(storage: Path, uuid: str) -> Path:
    """Where a checkpoint's files are."""
    return storage / "checkpoints" / "checkpoints" / uuid


def contents(stored: Path, work: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters with their moments, and all of the module: frozen and tied weights, buffers.

    Args:
        work: a new folder to work in.
    """
    named = consolidated(stored / "model0", work)
    trained = {Path(name).parent for name in named if name.endswith("/exp_avg")}
    kept = {name: tensor for name, tensor in named.items() if Path(name).parent in trained}
    return kept, export_weights(stored)
