"""A rank's state from a checkpoint of another number of ranks."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trial_core.checkpoint.manifest import Topology
from trial_core.errors import CheckpointDamaged, CheckpointError
from trial_core.rank.rank_state import (
    RankRemap,
    capture_rng,
    read_remapped_state,
    restore_rng,
    write_rank_state,
)
from trial_core.rank.state_files.safe_load import Reader

TWO, FOUR = (Topology(world_size=n, data_parallel_size=n, zero_stage=1) for n in (2, 4))


def write_states(folder: Path, loader: Any = None, **data: Any) -> None:
    """The states of two ranks."""
    for rank in range(2):
        state = {
            "training_data": {"drawn": 3, "per_batch": 1, "loader": loader, **data},
            "callbacks": {"counter": rank},
            "rng": capture_rng(),
        }
        write_rank_state(folder, rank, state, Reader())


def read(
    folder: Path, rank: int = 0, seed: int = 7, now: Topology = FOUR, **more: Any
) -> dict[str, Any]:
    return read_remapped_state(folder, rank, Reader(), RankRemap(TWO, now, seed), **more)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


@pytest.mark.parametrize(("rank", "callbacks_of"), [(0, 0), (1, 1), (2, 0), (3, 0)])
def test_callbacks_get_their_ranks_state_or_rank_0s(
    tmp_path: Path, rank: int, callbacks_of: int
) -> None:
    """4 ranks restore a checkpoint of 2."""
    write_states(tmp_path)
    state = read(tmp_path, rank)
    assert state["callbacks"] == {"counter": callbacks_of}
    assert state["training_data"]["drawn"] == 3


def test_random_generators_are_seeded_again(tmp_path: Path) -> None:
    """By the given seed; and reading the state draws nothing."""
    write_states(tmp_path)

    def draws_after(seed: int) -> tuple[float, ...]:
        restore_rng(read(tmp_path, seed=seed)["rng"])
        return draws()

    assert draws_after(7) == draws_after(7) != draws_after(8)
    torch.manual_seed(1)
    undisturbed = draws()
    torch.manual_seed(1)
    random.seed(3)
    read(tmp_path)
    assert torch.rand(1).item() == undisturbed[2]


def test_the_same_number_of_ranks_keeps_its_states(tmp_path: Path) -> None:
    """If only the ZeRO stage changes, generators, callbacks and loaders continue."""
    write_states(tmp_path, loader={"next": 3})
    expected = capture_rng()
    other_stage = Topology(world_size=2, data_parallel_size=2, zero_stage=3)
    state = read(tmp_path, rank=1, now=other_stage)
    assert torch.equal(state["rng"]["torch"], expected["torch"])
    assert state["training_data"]["loader"] == {"next": 3}


def test_a_custom_loaders_state_cannot_be_resharded(tmp_path: Path) -> None:
    """A new trial does not need it."""
    write_states(tmp_path, loader={"next": 3}, loader_type="Drawing")
    with pytest.raises(CheckpointError, match=r"own training loader \(Drawing\) on each of 2 data"):
        read(tmp_path)
    read(tmp_path, restore="state")


def test_a_loaders_global_state_is_given_to_all_ranks(tmp_path: Path) -> None:
    """If the loader has said so."""
    write_states(tmp_path, loader={"next": 3}, loader_is_global=True)
    assert read(tmp_path)["training_data"]["loader"] == {"next": 3}


def test_a_checkpoint_without_rank_0s_state_is_damaged(tmp_path: Path) -> None:
    """Every remap needs it."""
    with pytest.raises(CheckpointDamaged, match="no trialflow/rank-00000"):
        read(tmp_path, rank=2)


def test_seeds_differ_by_data_shard_and_batch() -> None:
    """Ranks of one data shard, which hold parts of one model, have the same seed."""

    def seed(shard: int, batches: int) -> int:
        adapter: Any = SimpleNamespace(topology=lambda: FOUR, data_parallel_rank=shard)
        remap = RankRemap.of(TWO, adapter, 42, batches)
        assert remap is not None
        return remap.seed

    assert len({seed(shard, batches) for shard in range(4) for batches in (10, 20)}) == 8
    assert seed(1, 10) == seed(1, 10)


def test_an_unchanged_topology_needs_no_remap() -> None:
    """Nor does a run that restores nothing. The batch size alone does not count."""
    same = Topology(world_size=2, data_parallel_size=2, zero_stage=1, batch_samples=8)
    adapter: Any = SimpleNamespace(topology=lambda: same, data_parallel_rank=0)
    assert RankRemap.of(TWO, adapter, 42, 10) is None
    assert RankRemap.of(None, adapter, 42, 10) is None
