"""Which files of a checkpoint a rank needs; `test_restore_files_on_ranks` loads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.manifests import entry
from trial_core.checkpoint.manifest import FileEntry, Topology
from trial_core.deepspeed.deepspeed_adapter import DeepSpeedTrialAdapter
from trial_core.deepspeed.restore_files import (
    files_for_load_weights,
    files_for_ranks,
)

COMMON = ("latest", "model0/layer_01-model_states.pt", "vocabulary.json")


def topology(ranks: int, stage: int) -> Topology:
    return Topology(world_size=ranks, data_parallel_size=ranks, zero_stage=stage)


def saved(ranks: int, stage: int, tags: tuple[str, ...] = ("model0",)) -> list[FileEntry]:
    """The files of data-parallel ranks."""
    files = [entry(name) for name in COMMON]
    for rank in range(ranks):
        files.append(entry(f"trialflow/rank-{rank:05d}.pt", rank=rank))
        files.append(entry(f"trialflow/buffers-{rank:05d}.pt", rank=rank))
        for tag in tags:
            prefix = f"{tag}/zero_pp_rank_{rank}_mp_rank_00"
            files.append(entry(f"{prefix}_optim_states.pt", rank=rank))
            if stage == 3:
                files.append(entry(f"{prefix}_model_states.pt", rank=rank))
    if stage < 3:
        files += [entry(f"{tag}/mp_rank_00_model_states.pt") for tag in tags]
    return files


def needed(ranks: list[int], before: Topology, now: Topology) -> set[str]:
    files = saved(before.world_size, before.zero_stage)
    found = [file.path for file in files_for_ranks(files, before, ranks, now)]
    assert len(found) == len(set(found))
    return set(found)


def test_a_rank_needs_its_own_shards_and_the_common_files() -> None:
    """ZeRO-3: no shard of another rank."""
    four = topology(4, 3)
    assert needed([2], four, four) == {
        *COMMON,
        "model0/zero_pp_rank_2_mp_rank_00_model_states.pt",
        "model0/zero_pp_rank_2_mp_rank_00_optim_states.pt",
        "trialflow/rank-00002.pt",
        "trialflow/buffers-00002.pt",
    }


def test_a_machine_needs_the_files_of_all_its_ranks() -> None:
    """Each file once."""
    four = topology(4, 3)
    assert needed([1, 2], four, four) == needed([1], four, four) | needed([2], four, four)


def test_every_rank_needs_weights_that_rank_0_wrote() -> None:
    """Under ZeRO-1 one file holds the whole module."""
    two = topology(2, 1)
    assert needed([1], two, two) == {
        *COMMON,
        "model0/mp_rank_00_model_states.pt",
        "model0/zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "trialflow/rank-00001.pt",
        "trialflow/buffers-00001.pt",
    }


@pytest.mark.parametrize(("ranks", "stage"), [(4, 3), (1, 3), (2, 1)])
def test_another_topology_needs_all_shards(ranks: int, stage: int) -> None:
    """Of the ranks' own states it needs that of the same rank, and rank 0's; of their own buffers
    those of the same rank alone."""
    rank = ranks - 1
    everything = {file.path for file in saved(2, 3)}
    unneeded = {f"trialflow/buffers-{each:05d}.pt" for each in (0, 1) if each != rank}
    if rank != 1:
        unneeded.add("trialflow/rank-00001.pt")
    assert needed([rank], topology(2, 3), topology(ranks, stage)) == everything - unneeded


@pytest.mark.parametrize("is_bf16", [False, True])
@pytest.mark.parametrize("was_bf16", [False, True])
def test_another_precision_needs_all_shards(was_bf16: bool, is_bf16: bool) -> None:
    """DeepSpeed would look for a rank's own shard under another name."""
    two, files = topology(2, 1), saved(2, 1)
    if was_bf16:
        files = [entry(each.path.replace("zero_", "bf16_zero_"), rank=each.rank) for each in files]
    live: Any = SimpleNamespace(zero_optimization=lambda: True, bfloat16_enabled=lambda: is_bf16)
    found = files_for_ranks(files, two, [1], two, [live])
    assert len([each for each in found if "optim_states" in each.path]) == (
        1 if was_bf16 == is_bf16 else 2
    )
    live.zero_optimization = lambda: False  # the driver reshards a checkpoint with ZeRO
    assert len(files_for_ranks(files, two, [1], two, [live])) == len(
        files_for_ranks(files, two, [1], two)
    )


def test_a_model_parallel_rank_needs_model_states_of_its_peers() -> None:
    """DeepSpeed reads its data-parallel rank's model states of all model-parallel ranks."""
    files = [
        entry(f"model0/zero_pp_rank_{data}_mp_rank_{model:02d}_{kind}_states.pt", rank=rank)
        for rank, (data, model) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)])
        for kind in ("model", "optim")
    ]
    both = Topology(world_size=4, data_parallel_size=2, model_parallel_size=2, zero_stage=3)
    assert [file.path for file in files_for_ranks(files, both, [3], both)] == [
        "model0/zero_pp_rank_1_mp_rank_00_model_states.pt",
        "model0/zero_pp_rank_1_mp_rank_01_model_states.pt",
        "model0/zero_pp_rank_1_mp_rank_01_optim_states.pt",
    ]


def engine(stage: int) -> Any:
    return SimpleNamespace(
        module=None,
        zero_optimization_partition_weights=lambda: stage == 3,
    )


def test_only_zero_3_reads_optimizer_shards_for_the_weights() -> None:
    """Of two engines saved by ZeRO-1, the second now uses ZeRO-3."""
    files = saved(2, 1, ("model0", "model1"))
    read = {file.path for file in files_for_load_weights([engine(1), engine(3)], files, [0])}
    assert read == {
        *COMMON,
        "model0/mp_rank_00_model_states.pt",
        "model1/mp_rank_00_model_states.pt",
        "model1/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "model1/zero_pp_rank_1_mp_rank_00_optim_states.pt",
    }


class OwnFormat:
    """A trial that loads weights itself."""

    def load_weights(self, context: Any, load_path: Any) -> None: ...


def test_a_trial_that_loads_weights_itself_gets_every_file() -> None:
    """It may read any of them."""
    trial_adapter: Any = object.__new__(DeepSpeedTrialAdapter)
    trial_adapter._trial = OwnFormat()
    trial_adapter._context = SimpleNamespace(models=[engine(1)])
    trial_adapter.topology = lambda: topology(2, 1)
    files = saved(2, 1)
    assert trial_adapter.files_read(files, topology(2, 1), "weights", [0]) == files
