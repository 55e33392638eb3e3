"""Which files a rank needs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.support.manifests import new_manifest
from trial_core.checkpoint.manifest import FileEntry, Manifest, Topology
from trial_core.deepspeed.shard_selection import files_needed

DIGEST = "sha256:" + "0" * 64
COMMON = ("latest", "model0/layer_01-model_states.pt", "vocabulary.json")


@dataclass
class Saved:
    """A checkpoint of plain data parallelism: 1 MB a shard and rank, and little besides."""

    ranks: int
    stage: int

    @property
    def topology(self) -> Topology:
        return Topology(world_size=self.ranks, data_parallel_size=self.ranks, zero_stage=self.stage)

    def manifest(self) -> Manifest:
        entries = [(name, 0, 100) for name in COMMON]
        for rank in range(self.ranks):
            prefix = f"model0/zero_pp_rank_{rank}_mp_rank_00"
            entries.append((f"trialflow/rank-{rank:05d}.pt", rank, 5000))
            entries.append((f"{prefix}_optim_states.pt", rank, 1_000_000))
            if self.stage == 3:
                entries.append((f"{prefix}_model_states.pt", rank, 1000))
        if self.stage < 3:
            entries.append(("model0/mp_rank_00_model_states.pt", 0, 400_000))
        files = [
            FileEntry(path=path, rank=rank, size_bytes=size, digest=DIGEST)
            for path, rank, size in entries
        ]
        return new_manifest(topology=self.topology, files=files)


def paths(saved: Saved, rank: int, now: Topology) -> set[str]:
    return {file.path for file in files_needed(saved.manifest().files, saved.topology, [rank], now)}


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_of_four_needs_a_quarter_of_zero_3(rank: int) -> None:
    """Its own shards and state, and what belongs to nobody."""
    saved = Saved(4, 3)
    whole = saved.manifest()
    needed = files_needed(whole.files, saved.topology, [rank], saved.topology)
    assert sum(file.size_bytes for file in needed) <= 0.27 * whole.total_bytes
    assert {file.rank for file in needed if file.path not in COMMON} == {rank}
    assert {file.path for file in needed} >= set(COMMON)


def test_weights_that_one_rank_wrote_are_needed_by_all() -> None:
    """Under ZeRO 1 the module lies in one file."""
    saved = Saved(2, 1)
    assert paths(saved, 1, saved.topology) == {
        *COMMON,
        "model0/mp_rank_00_model_states.pt",
        "model0/zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "trialflow/rank-00001.pt",
    }


@pytest.mark.parametrize(("ranks", "stage"), [(4, 3), (1, 3), (2, 1)])
def test_with_another_topology_all_shards_are_needed(ranks: int, stage: int) -> None:
    """And of ranks' own states that of the same rank, and the first one's."""
    saved, now = Saved(2, 3), Saved(ranks, stage)
    rank = ranks - 1
    everything = {file.path for file in saved.manifest().files}
    left_out = {f"trialflow/rank-{other:05d}.pt" for other in range(1, 2) if other != rank}
    assert paths(saved, rank, now.topology) == everything - left_out


def test_a_model_parallel_rank_needs_its_peers_outlines() -> None:
    """DeepSpeed looks for this data-parallel rank's part of the model on all of them."""
    names = [
        (f"model0/zero_pp_rank_{data}_mp_rank_{model:02d}_{kind}_states.pt", 2 * data + model)
        for data in range(2)
        for model in range(2)
        for kind in ("model", "optim")
    ]
    topology = Topology(world_size=4, data_parallel_size=2, model_parallel_size=2, zero_stage=3)
    files = [FileEntry(path=n, rank=r, size_bytes=1, digest=DIGEST) for n, r in names]
    needed = files_needed(files, topology, [3], topology)
    assert [file.path for file in needed] == [
        "model0/zero_pp_rank_1_mp_rank_00_model_states.pt",
        "model0/zero_pp_rank_1_mp_rank_01_model_states.pt",
        "model0/zero_pp_rank_1_mp_rank_01_optim_states.pt",
    ]


def test_a_machine_needs_what_its_ranks_need_together() -> None:
    """Each file once."""
    saved = Saved(4, 3)
    files = saved.manifest().files
    both = files_needed(files, saved.topology, [1, 2], saved.topology)
    assert {file.path for file in both} == paths(saved, 1, saved.topology) | paths(
        saved, 2, saved.topology
    )
    assert len(both) == len({file.path for file in both})
