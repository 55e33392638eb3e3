"""Which of a checkpoint's files a rank needs to restore it.

DeepSpeed's shards are known by their names: those of a data-parallel rank are needed by the very
rank that wrote them, as long as there are as many ranks, with the same ZeRO stage. After that each
rank puts its own together out of all of them. Files of any other name may be needed by any rank,
as far as names tell: the ranks know more (see `trial_core.deepspeed.restore_reads`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from trial_core.checkpoint.manifest import FileEntry, Topology

_SHARD = re.compile(
    r"(?:.*/)?(?:bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_\d+_(?P<kind>model|optim)_states\.pt"
)
_RANK_STATE = re.compile(r"trialflow/rank-(?P<rank>\d+)\.pt")


def files_needed(
    files: list[FileEntry], saved_by: Topology, ranks: Iterable[int], now: Topology
) -> list[FileEntry]:
    """Those of a checkpoint's files that some of `ranks` need to restore all of their state.

    Args:
        saved_by, now: how the ranks divided the work that saved it, and how this run's do.
    """
    same = saved_by.spreads_like(now)
    shards = {rank: _shard_written_by(rank, files) for rank in ranks}
    return [
        file
        for file in files
        if any(_is_needed(file, rank, same, shard) for rank, shard in shards.items())
    ]


def is_rank_state(file: FileEntry) -> bool:
    """Whether it holds what a rank has of its own: random state, callbacks, its place in the data.

    Nobody needs that who takes the weights alone.
    """
    return _RANK_STATE.fullmatch(file.path) is not None


def _is_needed(file: FileEntry, rank: int, same: bool, shard: str | None) -> bool:
    if match := _RANK_STATE.fullmatch(file.path):
        # A rank that nobody was before goes on with what the first one had.
        return int(match["rank"]) == rank or (not same and int(match["rank"]) == 0)
    match = _SHARD.fullmatch(file.path)
    if match is None or not same or file.rank == rank:
        return True
    # DeepSpeed looks at this data-parallel rank's part of the model on all model-parallel ranks.
    return match["kind"] == "model" and match["rank"] == shard


def _shard_written_by(rank: int, files: list[FileEntry]) -> str | None:
    """Which data-parallel rank it was, if it wrote a shard."""
    matches = (_SHARD.fullmatch(file.path) for file in files if file.rank == rank)
    return next((match["rank"] for match in matches if match), None)
