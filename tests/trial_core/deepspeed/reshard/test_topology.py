"""A checkpoint of any number of ranks and ZeRO stage is restored with any other, bit for bit."""

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
from tests.trial_core.deepspeed.reshard.resharding import config, contents, files, restore, save
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.rank.state_files.safe_load import Reader

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]
RanksAndStage = tuple[int, int]

TOPOLOGIES = list(itertools.product((1, 2, 4), (1, 2, 3)))
"""Numbers of ranks, and ZeRO stages."""


@dataclass
class Source:
    """A checkpoint and its content."""

    run: Driven
    parameters: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    facts: dict[str, Any]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storage of all checkpoints of these tests."""
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def source_of(
    warm_slots: Warm, storage: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[RanksAndStage], Source]:
    """Checkpoints by topology, each with other weights and after another number of batches."""
    sources: dict[RanksAndStage, Source] = {}

    def source(topology: RanksAndStage) -> Source:
        if topology not in sources:
            ranks, stage = topology
            seed, folder = TOPOLOGIES.index(topology), tmp_path_factory.mktemp("source")
            settings = config(storage, 2 + seed, stage, seed=seed)
            run = drive(warm_slots(ranks), settings, folder, persist=True)
            stored = files(storage, run.checkpoints[-1])
            sources[topology] = Source(run, *contents(stored, folder / "named"), facts(stored))
        return sources[topology]

    return source


def all_sources(target: RanksAndStage) -> Any:
    sources = [topology for topology in TOPOLOGIES if topology != target]
    return pytest.param(target, sources, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("target", "sources"),
    [
        ((1, 1), [(2, 1)]),
        pytest.param((4, 3), [(2, 3)], marks=pytest.mark.long),
        ((2, 3), [(2, 1)]),
        *map(all_sources, TOPOLOGIES),
    ],
)
def test_every_parameter_and_moment_is_the_same(
    warm_slots: Warm, source_of: Callable[[RanksAndStage], Source], storage: Path, tmp_path: Path,
    target: RanksAndStage, sources: list[RanksAndStage],
) -> None:  # fmt: skip
    """DeepSpeed's own converter finds the same fp32 weights and moments before and after; all other
    weights, buffers, schedules and counters are the same too."""
    ranks, stage = target
    expected = {topology: source_of(topology) for topology in sources}
    slots = warm_slots(ranks)
    build(slots, config(storage, 2, stage, seed=99), tmp_path)
    for topology, source in expected.items():
        restore(slots, source.run)
        uuid = save(slots, source.run).checkpoints[-1]
        stored = files(storage, uuid)
        parameters, weights = contents(stored, tmp_path / uuid)
        assert len(parameters) == 15
        assert differing(source.parameters, parameters) == [], topology
        assert differing(source.weights, weights) == [], topology
        assert facts(stored) == source.facts, topology


def facts(stored: Path) -> dict[str, Any]:
    """What DeepSpeed saves besides tensors: counters, schedules, the optimizer's groups."""
    state = Reader(trusted=True).load(next((stored / "model0").glob("*_model_states.pt")))
    shard = torch.load(next((stored / "model0").glob("*_optim_states.pt")), weights_only=False)
    optimizer = shard["optimizer_state_dict"]
    base = optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in base["param_groups"]
    ]
    names = ("global_steps", "global_samples", "skipped_steps", "lr_scheduler")
    return {**{name: state[name] for name in names}, "groups": groups}
