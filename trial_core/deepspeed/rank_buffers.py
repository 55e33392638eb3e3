"""Buffers that differ between the ranks of an engine, such as the running means of BatchNorm.

Under ZeRO 0 to 2, of the ranks with the same weights, DeepSpeed stores the buffers of one and gives
them to all. So each rank stores its own differing buffers in a separate file, and gets them back.
On ranks other than the saving ones, all get the buffers that DeepSpeed stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from trial_core.deepspeed.checkpoint_engine import reader_of
from trial_core.deepspeed.fingerprints import bit_sum
from trial_core.rank.state_files.state_guard import persistent_buffers


def record_buffers(engines: Sequence[DeepSpeedEngine], folder: Path, rank: int) -> None:
    """Write this rank's buffers that differ from others'. Collective: every rank calls this.

    Args:
        folder: the checkpoint's folder on this rank.
    """
    own = [_differing(engine) for engine in engines]
    if any(own):
        path = _path(folder, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        places = [_place(engine) for engine in engines]
        engines[0].checkpoint_engine.save({"places": places, "buffers": own}, str(path))


@torch.no_grad()
def restore_buffers(engines: Sequence[DeepSpeedEngine], folder: Path, rank: int) -> None:
    """Restore the buffers of `record_buffers`, on the ranks that wrote them. Not collective."""
    path = _path(folder, rank)
    if not path.is_file():
        return
    saved = reader_of(engines[0]).load(path)
    for engine, place, buffers in zip(engines, saved["places"], saved["buffers"], strict=False):
        if tuple(place) == _place(engine):
            present = dict(persistent_buffers(engine.module))
            for name in buffers.keys() & present.keys():
                present[name].copy_(buffers[name])


def _path(folder: Path, rank: int) -> Path:
    return folder / "trialflow" / f"buffers-{rank:05d}.pt"


def _place(engine: DeepSpeedEngine) -> tuple[Any, ...]:
    """Number of ranks, and this one's place among them."""
    group = engine.seq_data_parallel_group
    alike = dist.get_rank(group), dist.get_world_size(group)
    return dist.get_world_size(), engine.checkpoint_mp_rank, *alike


def _differing(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    buffers = dict(persistent_buffers(engine.module))
    if not buffers or engine.zero_optimization_partition_weights():  # each rank's are stored
        return {}
    sums = torch.stack([bit_sum(each).to(engine.device) for each in buffers.values()])
    group = engine.seq_data_parallel_group
    every = [torch.empty_like(sums) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, sums, group=group)
    is_same = torch.stack(every).eq(sums).all(0).tolist()
    return {
        name: each.detach()
        for (name, each), same in zip(buffers.items(), is_same, strict=True)
        if not same
    }
