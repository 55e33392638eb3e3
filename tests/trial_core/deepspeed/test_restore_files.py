"""Which of a checkpoint's files engines read; those that load them are in `test_own_share`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.support.manifests import entry
from trial_core.checkpoint.manifest import FileEntry, Topology
from trial_core.deepspeed.deepspeed_engine import DeepSpeedTrialEngine
from trial_core.deepspeed.restore_reads import read_by_load, read_by_load_weights

TWO = Topology(world_size=2, data_parallel_size=2, zero_stage=1)


def files(*tags: str) -> list[FileEntry]:
    """What two ranks save of engines under ZeRO-1."""
    found = [entry(f"trialflow/rank-0000{rank}.pt", rank=rank) for rank in (0, 1)]
    for tag in tags:
        found.append(entry(f"{tag}/mp_rank_00_model_states.pt"))
        found += [
            entry(f"{tag}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", rank=rank)
            for rank in (0, 1)
        ]
    return found


def engine(stage: int, elastic: bool = False) -> Any:
    return SimpleNamespace(
        module=None,
        zero_optimization_partition_weights=lambda: stage == 3,
        zero_elastic_checkpoint=lambda: elastic,
    )


def test_an_elastic_checkpoint_is_read_by_every_rank_whole() -> None:
    """DeepSpeed merges the shards of all ranks there."""
    saved = files("model0")
    assert read_by_load([engine(1, elastic=True)], saved, TWO, [1], TWO) == saved
    assert read_by_load([engine(1)], saved, TWO, [1], TWO) == [
        file for file in saved if file.rank == 1 or file.path.endswith("model_states.pt")
    ]


def test_each_engine_has_its_own_way_to_its_weights() -> None:
    """Of two that ZeRO-1 has saved, one is cut by ZeRO-3 now, whose parts are taken from shards."""
    saved = files("model0", "model1")
    read = {file.path for file in read_by_load_weights([engine(1), engine(3)], saved, [0])}
    assert read == {
        "model0/mp_rank_00_model_states.pt",
        "model1/mp_rank_00_model_states.pt",
        "model1/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "model1/zero_pp_rank_1_mp_rank_00_optim_states.pt",
    }


class OwnWay:
    """As far as it matters here, a trial that loads weights in a way that only it knows."""

    def load_weights(self, context: Any, load_path: Any) -> None: ...


def test_a_trial_with_its_own_way_to_load_weights_gets_every_file() -> None:
    """It may read any of them."""
    own: Any = object.__new__(DeepSpeedTrialEngine)
    own._trial = OwnWay()
    own._context = SimpleNamespace(models=[engine(1)])
    own.topology = lambda: TWO
    saved = files("model0")
    assert own.files_read(saved, TWO, "weights", [0]) == saved
