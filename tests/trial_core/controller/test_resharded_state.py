"""What a rank has of its own, after another number of them has saved."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trial_core.checkpoint.manifest import Topology
from trial_core.controller.rank_state import capture_rng, restore_rng, write_rank_state
from trial_core.controller.resharded_state import RankRemap, read_redistributed
from trial_core.controller.safe_load import Reader
from trial_core.errors import CheckpointDamaged, CheckpointError

TWO, FOUR = (Topology(world_size=n, data_parallel_size=n, zero_stage=1) for n in (2, 4))


def states(folder: Path, loader: Any = None) -> None:
    """What two ranks have saved."""
    for rank in range(2):
        state = {
            "training_data": {"drawn": 3, "per_batch": 1, "loader": loader},
            "callbacks": {"counter": rank},
            "rng": capture_rng(),
        }
        write_rank_state(folder, rank, state)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


@pytest.mark.parametrize(("rank", "callbacks_of"), [(0, 0), (1, 1), (2, 0), (3, 0)])
def test_callbacks_have_their_ranks_state_or_the_first_ones(
    tmp_path: Path, rank: int, callbacks_of: int
) -> None:
    """4 ranks go on with what 2 have saved."""
    states(tmp_path)
    state = read_redistributed(tmp_path, rank, Reader(), RankRemap(TWO, FOUR, 7))
    assert state["callbacks"] == {"counter": callbacks_of}
    assert state["training_data"]["drawn"] == 3


def test_generators_begin_anew_by_their_seed(tmp_path: Path) -> None:
    """The same for a seed, others for another; and reading them draws nothing."""
    states(tmp_path)

    def after(seed: int) -> tuple[float, ...]:
        restore_rng(read_redistributed(tmp_path, 0, Reader(), RankRemap(TWO, FOUR, seed))["rng"])
        return draws()

    assert after(7) == after(7) != after(8)
    torch.manual_seed(1)
    undisturbed = draws()
    torch.manual_seed(1)
    random.seed(3)
    read_redistributed(tmp_path, 0, Reader(), RankRemap(TWO, FOUR, 7))
    assert torch.rand(1).item() == undisturbed[2]


def test_ranks_of_the_same_number_keep_all_they_had(tmp_path: Path) -> None:
    """With another ZeRO stage alone generators, callbacks and loaders go on."""
    states(tmp_path, loader={"next": 3})
    expected = capture_rng()
    other_stage = Topology(world_size=2, data_parallel_size=2, zero_stage=3)
    state = read_redistributed(tmp_path, 1, Reader(), RankRemap(TWO, other_stage, 7))
    assert torch.equal(state["rng"]["torch"], expected["torch"])
    assert state["training_data"]["loader"] == {"next": 3}


def test_a_loaders_own_state_is_not_shared_out(tmp_path: Path) -> None:
    """How it counts is known to it alone."""
    states(tmp_path, loader={"next": 3})
    with pytest.raises(CheckpointError, match="own training loader on each of 2 data-parallel"):
        read_redistributed(tmp_path, 0, Reader(), RankRemap(TWO, FOUR, 7))
    read_redistributed(tmp_path, 0, Reader(), RankRemap(TWO, FOUR, 7), "state")  # does not need it


def test_the_first_ranks_state_is_needed(tmp_path: Path) -> None:
    """Without it the checkpoint is damaged."""
    with pytest.raises(CheckpointDamaged, match="no trialflow/rank-00000"):
        read_redistributed(tmp_path, 2, Reader(), RankRemap(TWO, FOUR, 7))


def test_seeds_differ_by_rank_and_by_batch() -> None:
    """Ranks of one data-parallel rank, which hold parts of one model, have the same."""

    def seed(rank: int, batches: int) -> int:
        engine: Any = SimpleNamespace(topology=lambda: FOUR, data_parallel_rank=rank)
        move = RankRemap.of(TWO, engine, 42, batches)
        assert move is not None
        return move.seed

    assert len({seed(rank, batches) for rank in range(4) for batches in (10, 20)}) == 8
    assert seed(1, 10) == seed(1, 10)


def test_there_is_no_move_where_files_can_be_used_as_they_are() -> None:
    """Nor where nothing is restored; another batch size alone is none."""
    same = Topology(world_size=2, data_parallel_size=2, zero_stage=1, batch_samples=8)
    engine: Any = SimpleNamespace(topology=lambda: same, data_parallel_rank=0)
    assert RankRemap.of(TWO, engine, 42, 10) is None
    assert RankRemap.of(None, engine, 42, 10) is None
