"""Which of a checkpoint's files the engines of one machine's ranks read to restore it.

`trial_core.deepspeed.shard_selection` goes by names alone. The engines tell more: the weights alone seldom
take the optimizers' shards, and a stage of a pipeline reads its own layers. This is for DeepSpeed's
way to load: what a trial's own reads, nobody knows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from deepspeed.pipe import PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine

from trial_core.checkpoint.manifest import FileEntry, Topology
from trial_core.deepspeed.shard_selection import files_needed, is_rank_state
from trial_core.deepspeed.weights import reads_shards

_OPTIMIZER = re.compile(r"\w+_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-(?:model_\d+-)?model_states\.pt")


def read_by_load(
    engines: Sequence[DeepSpeedEngine],
    files: list[FileEntry],
    saved_by: Topology,
    ranks: Sequence[int],
    now: Topology,
) -> list[FileEntry]:
    """What restoring the whole state reads, on some of `ranks`.

    Args:
        saved_by, now: how the ranks divided the work that saved it, and how this run's do.
    """
    if any(engine.zero_elastic_checkpoint() for engine in engines):
        return files  # DeepSpeed merges the shards of all ranks
    elsewhere: set[str] = set()
    for i, engine in enumerate(engines):
        elsewhere |= _layers_elsewhere(i, engine, files, ranks)
    needed = files_needed(files, saved_by, ranks, now)
    return [file for file in needed if file.path not in elsewhere]


def read_by_load_weights(
    engines: Sequence[DeepSpeedEngine], files: list[FileEntry], ranks: Sequence[int]
) -> list[FileEntry]:
    """What restoring the models' weights alone reads, on some of `ranks`."""
    left_out = {file.path for file in files if is_rank_state(file)}
    for i, engine in enumerate(engines):
        names = _names(files, i)
        if not reads_shards(engine, names):
            left_out |= {f"model{i}/{name}" for name in names if _OPTIMIZER.fullmatch(name)}
            left_out |= _layers_elsewhere(i, engine, files, ranks)
    return [file for file in files if file.path not in left_out]


def _layers_elsewhere(
    index: int, engine: DeepSpeedEngine, files: list[FileEntry], ranks: Sequence[int]
) -> set[str]:
    """The files of layers that no stage on these ranks has."""
    module = engine.module
    if not isinstance(module, PipelineModule):
        return set()
    stages = {module.topology().get_coord(rank).pipe for rank in ranks}
    here = {
        layer for stage in stages for layer in range(module.parts[stage], module.parts[stage + 1])
    }
    return {
        f"model{index}/{name}"
        for name in _names(files, index)
        if (match := _LAYER.fullmatch(name)) and int(match[1]) not in here
    }


def _names(files: list[FileEntry], index: int) -> list[str]:
    """The names of an engine's files, in the folder of its tag."""
    tag = f"model{index}/"
    return [file.path.removeprefix(tag) for file in files if file.path.startswith(tag)]
