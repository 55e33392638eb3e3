"""Layers that are frozen, thawed or set in mid-training, in checkpoints without frozen weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.slots import Driven, drive, toy_config
from tests.support.tensors import differing, tensors
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]

LONG = pytest.mark.long
CHANGES = ["freezes", "thaws", "sets"]


@pytest.mark.parametrize(
    ("change", "ranks", "sharding"),
    [
        ("all", 2, "none"),
        *(
            pytest.param(change, *ranks_and_sharding, marks=LONG)
            for change in CHANGES
            for ranks_and_sharding in ((1, "none"), (2, "none"), (2, "fsdp2"))
        ),
    ],
)
@pytest.mark.parametrize("excludes", [True, pytest.param(False, marks=LONG)])
def test_a_layer_that_changes_is_stored(
    warm_slots: Warm, tmp_path: Path, change: str, ranks: int, sharding: str, excludes: bool
) -> None:
    """Although frozen parameters are left out; a resumed run is the uninterrupted one."""
    stored = _assert_resumes(
        warm_slots(ranks), tmp_path, "freezing_trials:Freezing", excludes,
        optimizations={"sharding": sharding}, change=change, global_batch_size=4,
    )  # fmt: skip
    state = torch.load(stored / "state_dict.pth", weights_only=True)["training_weights"][0]
    changed = range(2, 5 if change == "all" else 3)
    assert ("0.bias" in state) == (not excludes)
    assert {f"{layer}.bias" for layer in (*changed, changed.stop)} <= state.keys()


@pytest.mark.parametrize("excludes", [True, pytest.param(False, marks=LONG)])
@pytest.mark.parametrize(
    ("change", "stage"),
    [
        ("freezes", 3),
        ("sets", 2),
        *(
            pytest.param(change, stage, marks=LONG)
            for change in CHANGES
            for stage in range(4)
            if (change, stage) not in (("freezes", 3), ("sets", 2))
        ),
    ],
)
def test_a_layer_of_an_engine_that_changes_is_stored(
    warm_slots: Warm, tmp_path: Path, change: str, stage: int, excludes: bool
) -> None:
    """As in a PyTorchTrial. DeepSpeed leaves out all frozen parameters, or none."""
    stored = _assert_resumes(
        warm_slots(2), tmp_path, "freezing_trials:FreezingEngine", excludes,
        change=change, zero_stage=stage,
    )  # fmt: skip
    has_first = any("/0.bias" in name for name in tensors(stored))
    assert has_first == (not excludes or change == "sets")


def _assert_resumes(
    slots: SlotGroup,
    folder: Path,
    entrypoint: str,
    excludes: bool,
    optimizations: dict[str, Any] | None = None,
    **hparams: Any,
) -> Path:
    """6 batches equal 4 + 2. Returns the files of the last checkpoint."""

    def run(part: str, batches: int, resume: Driven | None = None) -> Driven:
        (folder / part).mkdir(exist_ok=True)
        config = toy_config(
            folder / part, batches, entrypoint=entrypoint, optimizations=optimizations or {},
            resources={"slots_per_trial": slots.world_size}, hyperparameters=hparams,
            checkpointing={"exclude_frozen_parameters": excludes},
        )  # fmt: skip
        return drive(slots, config, folder / part, resume=resume, persist=True)

    def stored(part: str, run: Driven) -> Path:
        return folder / part / "checkpoints" / "checkpoints" / run.checkpoints[-1]

    whole, first = run("straight", 6), run("parts", 4)
    rest = run("parts", 6, first)
    places = stored("straight", whole), stored("parts", rest)
    expected, seen = (
        {name: each for name, each in tensors(place).items() if not each.is_meta}
        for place in places
    )
    assert differing(expected, seen) == []
    assert rest.validation[-1] == whole.validation[-1]
    return places[1]
