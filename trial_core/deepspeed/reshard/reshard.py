"""Engines restored from a checkpoint of another number of ranks, or of another ZeRO stage.

DeepSpeed is given what it would have read, had engines of the present topology saved the
checkpoint: each rank's shards are put together in memory, out of those parts of the saved ones that
the rank needs, and handed over through DeepSpeed's own seam, the checkpoint engine. All the rest
(schedules, counters, loss scales, a client's state) is loaded by DeepSpeed as ever.

DeepSpeed's own way would be a universal checkpoint: every parameter and moment in a file of its
own, beside the shards, so twice the disk. Loading one leaves buffers and frozen weights as they
were initialised, gives all groups of a ZeRO-3 optimizer the first one's learning rate, knows no
optimizer but Adam, and does not lead from ZeRO 1 or 2 to ZeRO-3 or back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine

from trial_core.deepspeed.reshard.source_engine import (
    MODEL_STATES,
    OPTIMIZER_STATES,
    Read,
    SavedEngine,
)
from trial_core.deepspeed.reshard.target_engine import (
    check_engine,
    frozen_fragments,
    module_state,
    partitions,
    shapes_by_group,
    whole_optimizer,
)
from trial_core.errors import TrialError


@contextmanager
def reshaped(engines: Sequence[DeepSpeedEngine], folder: Path, read: Read) -> Iterator[Path]:
    """Inside the block the engines load a checkpoint of another topology as if it were of theirs.

    Args:
        folder: the checkpoint's files: all shards of this rank's model-parallel rank at least.
        read: what a file holds; its tensors mapped, if this rank is not to need memory for all.

    Yields:
        The folder to load from. It has the names of shards that are made when they are loaded, and
        takes no room.

    Raises:
        CheckpointError: an engine's state cannot be shared out in another way; says why.
    """
    own = [engine.checkpoint_engine for engine in engines]
    with TemporaryDirectory(prefix="trialflow-") as view:
        try:
            for i, engine in enumerate(engines):
                files, there = folder / f"model{i}", Path(view) / f"model{i}"
                engine.checkpoint_engine = _Reshaped(engine, files, there, read)
            yield Path(view)
        finally:
            for engine, replaced in zip(engines, own, strict=True):
                engine.checkpoint_engine = replaced


class _Reshaped(CheckpointEngine):
    """Loads shards that nobody has saved.

    Args:
        files: the folder of those that somebody has.
        view: the folder that the others seem to be in; is made here.
    """

    def __init__(self, engine: DeepSpeedEngine, files: Path, view: Path, read: Read) -> None:
        super().__init__()
        check_engine(engine)
        self._engine = engine
        self._inner = engine.checkpoint_engine
        self._files = files
        self._read = read
        self._has_shards = False
        self._names: dict[int, str] = {}
        self._saved: SavedEngine | None = None
        self._model: dict[str, Any] | None = None
        view.mkdir()
        for file in files.iterdir() if files.is_dir() else ():
            if match := MODEL_STATES.fullmatch(file.name):
                # DeepSpeed counts them: one for each model-parallel rank.
                name = engine._get_ckpt_name(str(view.parent), view.name, mp_placeholder=match[2])
                Path(name).touch()
                self._names[int(match[2])] = file.name
            elif OPTIMIZER_STATES.fullmatch(file.name):
                self._has_shards = True
            else:
                (view / file.name).symlink_to(file.resolve())  # a pipeline's layers

    def load(self, path: str, map_location: Any = None) -> Any:
        """What the file of that name would hold on this rank."""
        name = Path(path).name
        if match := MODEL_STATES.fullmatch(name):
            if int(match[2]) != self._engine.checkpoint_mp_rank:
                # DeepSpeed looks at another rank's for nothing but the number of them.
                return self._read(self._files / self._names[int(match[2])])
            if self._model is None:  # DeepSpeed asks twice
                self._model = self._model_states()
            return self._model
        if OPTIMIZER_STATES.fullmatch(name):
            return {"optimizer_state_dict": self._optimizer_states()}
        return self._inner.load(path, map_location)

    def create(self, info: Any) -> None:
        """Refuse: this is for loading."""
        raise TrialError("the trial's load saves a checkpoint; let its save do that")

    def save(self, state_dict: Any, path: str) -> None:
        """Refuse: this is for loading."""
        self.create(path)

    def commit(self, info: Any) -> None:
        """Refuse: this is for loading."""
        self.create(info)

    def _model_states(self) -> dict[str, Any]:
        engine = self._engine
        ranks = {"dp_world_size": engine.seq_dp_world_size}
        if not engine.zero_optimization() and not self._has_shards:
            # Every data-parallel rank has it whole, and had.
            whole = self._read(self._files / self._names[engine.checkpoint_mp_rank])
            return {**whole, **ranks}
        saved = self._the_saved
        changes = {"module": module_state(engine, saved), "frozen_param_fragments": None}
        if engine.zero_optimization_partition_weights():
            changes["frozen_param_fragments"] = frozen_fragments(engine, saved)
        if not engine.zero_optimization():
            changes["optimizer"] = whole_optimizer(engine, saved)
        return {**saved.model, **ranks, **changes}

    def _optimizer_states(self) -> dict[str, Any]:
        saved = self._the_saved
        present: dict[str, Any] = self._engine.optimizer.state_dict()
        kept = {key: value for key, value in saved.global_state.items() if key in present}
        return {**present, **kept, **partitions(self._engine, present, saved)}

    @property
    def _the_saved(self) -> SavedEngine:
        if self._saved is None:
            present, rank = shapes_by_group(self._engine), self._engine.checkpoint_mp_rank
            self._saved = SavedEngine(self._files, rank, present, self._read)
        return self._saved
