"""Which files of a checkpoint the ranks of one machine need to restore it.

Names alone tell which data-parallel rank wrote a shard of DeepSpeed's (`files_for_ranks`). The
engines tell more: restoring only the weights seldom needs optimizer shards, and a pipeline stage
reads only its own layers. That holds for DeepSpeed's own loading; a trial that overrides `load` or
`load_weights` may read any file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from deepspeed.pipe import PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine

from trial_core.checkpoint.manifest import FileEntry, Topology
from trial_core.deepspeed.export.pipeline_weights import LAYER
from trial_core.deepspeed.load_engine import needs_optimizer_shards
from trial_core.deepspeed.reshard.reshard_loader import is_of_other_precision
from trial_core.deepspeed.validated_weights import is_validated
from trial_core.rank.state_files.built_settings import FILE

_SHARD = re.compile(
    r"(?:.*/)?(?:bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_\d+_(?P<kind>model|optim)_states(?:_frozen)?\.pt"
)
_RANK_STATE = re.compile(r"trialflow/(?P<kind>rank|buffers)-(?P<rank>\d+)\.pt")
_STATE = re.compile(rf"{_RANK_STATE.pattern}|trialflow/{re.escape(FILE)}")
_OPTIMIZER_STATES = re.compile(r"\w+_optim_states\.pt")


def files_for_ranks(
    files: list[FileEntry],
    saved_by: Topology,
    ranks: Iterable[int],
    now: Topology,
    engines: Sequence[DeepSpeedEngine] = (),
) -> list[FileEntry]:
    """The files that some of `ranks` need to restore the whole state, judged by name.

    A rank needs its own shards; with another topology than saved them, or another precision of the
    `engines`, all shards. Any rank may need a file with an unknown name.
    """
    is_same = saved_by.spreads_like(now) and not any(
        is_of_other_precision(engine, _names(files, i)) for i, engine in enumerate(engines)
    )
    places = [(rank, _data_parallel_rank(rank, files)) for rank in ranks]
    return [file for file in files if any(_is_needed(file, *each, is_same) for each in places)]


def files_for_load(
    engines: Sequence[DeepSpeedEngine],
    files: list[FileEntry],
    saved_by: Topology,
    ranks: Sequence[int],
    now: Topology,
) -> list[FileEntry]:
    """The files that `DeepSpeedTrial.load` reads on some of `ranks`."""
    unread = {
        file.checked_path for file in files if is_validated(file.checked_path, range(len(engines)))
    }
    for i, engine in enumerate(engines):
        unread |= _layers_of_other_stages(i, engine, files, ranks)
    needed = files_for_ranks(files, saved_by, ranks, now, engines)
    return [file for file in needed if file.checked_path not in unread]


def files_for_load_weights(
    engines: Sequence[DeepSpeedEngine], files: list[FileEntry], ranks: Sequence[int]
) -> list[FileEntry]:
    """The files that `DeepSpeedTrial.load_weights` reads on some of `ranks`."""
    unread = {file.checked_path for file in files if _STATE.fullmatch(file.checked_path)}
    for i, engine in enumerate(engines):
        names = _names(files, i)
        if not needs_optimizer_shards(engine, names):
            unread |= {f"model{i}/{name}" for name in names if _OPTIMIZER_STATES.fullmatch(name)}
            unread |= _layers_of_other_stages(i, engine, files, ranks)
    return [file for file in files if file.checked_path not in unread]


def _is_needed(file: FileEntry, rank: int, data_parallel_rank: str | None, is_same: bool) -> bool:
    if match := _RANK_STATE.fullmatch(file.checked_path):
        # A rank that did not exist in the saved topology restores rank 0's state.
        serves_others = not is_same and match["kind"] == "rank"
        return int(match["rank"]) in ((rank, 0) if serves_others else (rank,))
    match = _SHARD.fullmatch(file.checked_path)
    if match is None or not is_same or file.rank == rank:
        return True
    # DeepSpeed reads this data-parallel rank's model states of all model-parallel ranks.
    return match["kind"] == "model" and match["rank"] == data_parallel_rank


def _data_parallel_rank(rank: int, files: list[FileEntry]) -> str | None:
    """The data-parallel rank that `rank` had when it wrote its shards; None if it wrote none."""
    matches = (_SHARD.fullmatch(file.checked_path) for file in files if file.rank == rank)
    return next((match["rank"] for match in matches if match), None)


def _layers_of_other_stages(
    index: int, engine: DeepSpeedEngine, files: list[FileEntry], ranks: Sequence[int]
) -> set[str]:
    """The files of pipeline layers that no stage on these ranks has."""
    module = engine.module
    if not isinstance(module, PipelineModule):
        return set()
    stages = {module.topology().get_coord(rank).pipe for rank in ranks}
    layers = {
        layer for stage in stages for layer in range(module.parts[stage], module.parts[stage + 1])
    }
    return {
        f"model{index}/{name}"
        for name in _names(files, index)
        if (match := LAYER.fullmatch(name)) and int(match[1]) not in layers
    }


def _names(files: list[FileEntry], index: int) -> list[str]:
    tag = f"model{index}/"
    return [path.removeprefix(tag) for file in files if (path := file.checked_path).startswith(tag)]
