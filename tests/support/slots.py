"""Warm ranks for tests, and a driver for them that needs no Prefect.

Starting ranks costs seconds (they import torch), so tests share groups of 1, 2 and 4: each test
builds its own trial on them. A test that breaks its ranks takes a group of its own.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.messages import (
    BuildLoaders,
    BuildTrial,
    FetchCheckpoint,
    Fetched,
    HookDone,
    LoadersBuilt,
    PersistCheckpoint,
    Persisted,
    RunHook,
    RunValidation,
    SaveCheckpoint,
    Saved,
    TrainBatches,
    Trained,
    TrialBuilt,
    Validated,
)
from trial_core.sequencer import Checkpoint, Finish, Progress, Train, Validate, next_workload
from trial_core.slots.group import SlotGroup

TOY = Path(__file__).with_name("toy")


def toy_config(folder: Path, batches: int = 10, **changes: Any) -> ExperimentConfig:
    """An experiment that trains the toy trial for some batches, all it writes below `folder`.

    Keyword arguments change fields of the experiment; `hyperparameters` add to the toy's own.
    """
    fields: dict[str, Any] = {
        "name": "toy",
        "entrypoint": "toy_trial:ToyTrial",
        "code": str(TOY),
        "resources": {"slots_per_trial": 2},
        "searcher": {
            "name": "single",
            "metric": "loss",
            "smaller_is_better": True,
            "max_length": {"batches": batches},
        },
        "checkpoint_storage": f"file://{folder}/checkpoints",
        "max_restarts": 0,
    }
    return ExperimentConfig(**{**fields, **changes})


@dataclass
class Driven:
    """What a run has said of itself."""

    progress: Progress
    stages: list[str] = field(default_factory=list)
    training: list[dict[str, Any]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    files: dict[str, list[FileEntry]] = field(default_factory=dict)


def build(slots: SlotGroup, config: ExperimentConfig, run_dir: Path) -> TrialBuilt:
    """Build the trial of `config` on warm ranks."""
    return slots.request(
        BuildTrial(
            trial="toy-0000beef",
            experiment=config.model_dump(mode="json"),
            run_dir=str(run_dir),
            storage=CheckpointStore(config.checkpoint_storage.url).spec,
        ),
        TrialBuilt,
    )[0]


def drive(
    slots: SlotGroup,
    config: ExperimentConfig,
    run_dir: Path,
    *,
    resume: Driven | None = None,
    persist: bool = False,
) -> Driven:
    """Carry out a whole schedule, as the flow does, with neither Prefect nor manifests.

    Args:
        resume: an earlier run; goes on from its last checkpoint, which was persisted.
        persist: upload what is saved.
    """
    built = build(slots, config, run_dir)
    run = Driven(resume.progress.stopping(False) if resume else Progress())
    uuid_to_restore = resume.checkpoints[-1] if resume else None
    if resume is not None and uuid_to_restore is not None:
        request = FetchCheckpoint(uuid=uuid_to_restore, files=resume.files[uuid_to_restore])
        assert slots.request(request, Fetched) == [Fetched()] * slots.world_size
    begin = run.progress.batches_trained
    loaders = BuildLoaders(batches_trained=begin, checkpoint=uuid_to_restore)
    epoch = slots.request(loaders, LoadersBuilt)[0].epoch
    schedule = config.schedule()
    while not isinstance(work := next_workload(run.progress, schedule, epoch), Finish):
        trained = run.progress.batches_trained
        if isinstance(work, Train):
            results = slots.request(TrainBatches(until=work.until), Trained)
            run.training.append(results[0].metrics)
            run.stages.append(f"train [{trained}→{work.until}]")
            run.progress = run.progress.after_training(results[0].batches_trained).stopping(
                any(result.stop_requested for result in results)
            )
            _hook(slots, built, "on_training_workload_end")
        elif isinstance(work, Validate):
            validated = slots.request(RunValidation(), Validated)
            run.validation.append(validated[0].metrics)
            run.stages.append(f"validate @{trained}")
            metric = float(validated[0].metrics[config.searcher.metric])
            run.progress = run.progress.after_validation(metric, schedule.smaller_is_better)
        elif isinstance(work, Checkpoint):
            checkpoint = str(uuid.uuid4())
            slots.request(SaveCheckpoint(uuid=checkpoint), Saved)
            if persist:
                persisted = slots.request(PersistCheckpoint(uuid=checkpoint), Persisted)
                run.files[checkpoint] = [entry for rank in persisted for entry in rank.files]
            run.checkpoints.append(checkpoint)
            run.stages.append(f"checkpoint @{trained}")
            run.progress = run.progress.after_checkpoint()
    return run


def _hook(slots: SlotGroup, built: TrialBuilt, hook: str) -> None:
    if hook in built.hooks:
        slots.request(RunHook(hook=hook), HookDone)


def lines(folder: Path, name: str, rank: int) -> list[Any]:
    """What a rank of the toy trial has recorded."""
    path = folder / f"{name}-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="session")
def warm_slots() -> Iterator[Callable[[int], SlotGroup]]:
    """Warm groups by number of ranks, each started when first asked for."""
    groups: dict[int, SlotGroup] = {}

    def group(world_size: int) -> SlotGroup:
        if world_size not in groups:
            groups[world_size] = SlotGroup(world_size, working_dir=TOY)
        return groups[world_size]

    yield group
    for started in groups.values():
        started.close()
