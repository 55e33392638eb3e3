"""A checkpoint of any number of ranks and ZeRO stage goes on with any other, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.slots import Driven, build, drive
from tests.support.tensors import differing
from tests.trial_core.deepspeed.reshard.moving import config, contents, files, restore, save
from trial_core.slots.group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]

TOPOLOGIES = list(itertools.product((1, 2, 4), (1, 2, 3)))
"""Numbers of ranks, and ZeRO stages."""


@dataclass
class Source:
    """A checkpoint, and what is in it."""

    run: Driven
    parameters: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    facts: dict[str, Any]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of these tests' checkpoints are."""
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def source(
    warm_slots: Warm, storage: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, int], Source]:
    """Checkpoints by topology, each of other weights and after another number of batches."""
    known: dict[tuple[int, int], Source] = {}

    def made(ranks: int, stage: int) -> Source:
        if (ranks, stage) not in known:
            place, folder = TOPOLOGIES.index((ranks, stage)), tmp_path_factory.mktemp("source")
            settings = config(storage, 2 + place, stage, seed=place)
            run = drive(warm_slots(ranks), settings, folder, persist=True)
            stored = files(storage, run.checkpoints[-1])
            known[ranks, stage] = Source(run, *contents(stored, folder / "named"), facts(stored))
        return known[ranks, stage]

    return made


@pytest.mark.parametrize(("ranks", "stage"), TOPOLOGIES)
def test_every_parameter_and_moment_is_the_same(
    warm_slots: Warm,
    source: Callable[[int, int], Source],
    storage: Path,
    tmp_path: Path,
    ranks: int,
    stage: int,
) -> None:
    """Consolidated by DeepSpeed's own converter, fp32 weights and both moments are those of each
    checkpoint of another topology; so are all other weights, buffers, schedules and counters."""
    others = {before: source(*before) for before in TOPOLOGIES if before != (ranks, stage)}
    slots = warm_slots(ranks)
    build(slots, config(storage, 2, stage, seed=99), tmp_path)
    for before, expected in others.items():
        restore(slots, expected.run)
        uuid = save(slots, expected.run).checkpoints[-1]
        stored = files(storage, uuid)
        parameters, weights = contents(stored, tmp_path / uuid)
        assert len(parameters) == 15
        assert differing(expected.parameters, parameters) == [], before
        assert differing(expected.weights, weights) == [], before
        assert facts(stored) == expected.facts, before


def facts(stored: Path) -> dict[str, Any]:
    """What DeepSpeed keeps besides tensors: counters, schedules, the groups of the optimizer."""
    state = torch.load(next((stored / "model0").glob("*_model_states.pt")), weights_only=False)
    shard = torch.load(next((stored / "model0").glob("*_optim_states.pt")), weights_only=False)
    optimizer = shard["optimizer_state_dict"]
    base = optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in base["param_groups"]
    ]
    names = ("global_steps", "global_samples", "skipped_steps", "lr_scheduler")
    return {**{name: state[name] for name in names}, "groups": groups}
