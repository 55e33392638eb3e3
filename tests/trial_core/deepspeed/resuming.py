"""Compares an uninterrupted run with one that resumes, and a checkpoint with what is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.slots import Driven, build, drive, lines, toy_config
from tests.support.tensors import differing, tensors
from trial_core.checkpoint.resume_point import Restore
from trial_core.config import ExperimentConfig
from trial_core.messages import (
    BuildLoadersAndRestore,
    FetchCheckpoint,
    Fetched,
    ReadyToTrain,
    SaveCheckpoint,
    Saved,
)
from trial_core.processes.slots.slot_group import SlotGroup


def assert_resuming_is_bit_identical(*given: Any, **hparams: Any) -> Path:
    """As `resumed_bit_for_bit`; returns the files of the last checkpoint."""
    return resumed_bit_for_bit(*given, **hparams)[1]


def resumed_bit_for_bit(
    slots: SlotGroup,
    folder: Path,
    entrypoint: str,
    optimizations: Mapping[str, Any] | None = None,
    saves_between: bool = False,
    **hparams: Any,
) -> tuple[Driven, Path]:
    """9 batches equal 4 + 5: the same samples, weights, optimizer states and metrics on every rank.

    Args:
        optimizations: this section of the experiment.
        saves_between: whether the uninterrupted run saves, too, where the other one is interrupted.

    Returns:
        The uninterrupted run, and the files of the last checkpoint of the resumed one.
    """

    def run(part: str, batches: int, resume: Driven | None = None) -> Driven:
        (folder / part).mkdir(exist_ok=True)
        config = toy_config(
            folder / part, batches, scheduling_unit=3, entrypoint=entrypoint,
            # Validations may draw random numbers, so both runs have them after the same batches.
            min_validation_period={"batches": 4},
            checkpoint_policy="all" if saves_between else "none",
            optimizations=optimizations or {},
            hyperparameters={"record": str(folder / part), "train_samples": 50, **hparams},
        )  # fmt: skip
        return drive(slots, config, folder / part, resume=resume, persist=True)

    whole, first = run("straight", 9), run("parts", 4)
    rest = run("parts", 9, resume=first)
    for rank in range(slots.world_size):
        seen = [_training(lines(folder / part, "samples", rank)) for part in ("straight", "parts")]
        assert seen[0] == seen[1]
    stored = [
        folder / part / "checkpoints" / "checkpoints" / run.checkpoints[-1]
        for part, run in (("straight", whole), ("parts", rest))
    ]
    expected, restored = map(tensors, stored)
    assert len(expected) > 7  # a single rank has more, so there is something to compare
    assert differing(expected, restored) == []
    assert rest.validation[-1] == whole.validation[-1]
    return whole, stored[1]


def saved_again(
    slots: SlotGroup,
    saved: Driven,
    config: ExperimentConfig,
    folder: Path,
    restore: Restore = "everything",
) -> list[Saved]:
    """What each rank of a trial saves right after it has loaded the last checkpoint of `saved`."""
    uuid = saved.checkpoints[-1]
    build(slots, config, folder)
    fetch = FetchCheckpoint(
        uuid=uuid, files=saved.files[uuid], saved_by=saved.topology, restore=restore
    )
    assert slots.request(fetch, Fetched) == [Fetched()] * slots.world_size
    begin = saved.progress.batches_trained if restore == "everything" else 0
    loaders = BuildLoadersAndRestore(
        batches_trained=begin, checkpoint=uuid, saved_by=saved.topology, restore=restore
    )
    slots.request(loaders, ReadyToTrain)
    return slots.request(SaveCheckpoint(uuid="again"), Saved)


def _training(recorded: list[Any]) -> list[Any]:
    return [line for line in recorded if line[0] != "validation"]
