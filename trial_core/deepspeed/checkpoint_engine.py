"""trialflow's implementation of DeepSpeed's `CheckpointEngine` interface.

While a trial saves, shards that DeepSpeed would write with `torch.save` are copied into memory
files; another process uploads them. While a trial loads, files that DeepSpeed would unpickle are
read by a `Reader`, which constructs only tensors and plain data unless the checkpoint is trusted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from trial_core.processes.machine.memory_files import MemoryFiles
from trial_core.rank.state_files.frozen_files import (
    KeyPath,
    frozen_names,
    frozen_path,
    without_frozen,
)
from trial_core.rank.state_files.safe_load import Reader
from trial_core.rank.state_files.safe_save import readable
from trial_core.rank.state_files.tensor_files import write_tensors


def _zero_stage(stage: int) -> ZeroStageEnum:
    return ZeroStageEnum(stage)


CHECKPOINT_CLASSES = (
    DynamicLossScaler, LossScaler, fragment_address,
    # By a function: a pickle that may name an enum's class can change its members' attributes.
    (_zero_stage, f"{ZeroStageEnum.__module__}.{ZeroStageEnum.__qualname__}"),
)  # fmt: skip
"""Classes of DeepSpeed that its shards contain. Constructing them runs no code of a checkpoint."""


_MODULE = "module"
_FRAGMENTS = "frozen_param_fragments"
"""Where DeepSpeed has frozen weights in a rank's model states."""


class SnapshotCheckpointEngine(TorchCheckpointEngine):
    """Writes shards into memory files, and reads them with a `Reader`.

    Args:
        folder: the staging folder, or the folder of a fetched checkpoint.
        memory_files: where shards below `folder` are written; None writes files on disk.
        reader: reads files, and will read those that are written.
        frozen: names of the weights that are not trained, written separately: see `frozen_files`.
    """

    def __init__(
        self,
        folder: Path,
        memory_files: MemoryFiles | None,
        reader: Reader,
        frozen: Collection[str] = (),
    ) -> None:
        CheckpointEngine.__init__(self)
        self.name = "trialflow"
        self._folder = folder
        self._memory_files = memory_files
        self._frozen = [(part, name) for part in (_MODULE, _FRAGMENTS) for name in frozen]
        self.reader = reader

    def create(self, info: Any) -> None:
        """Nothing to prepare."""

    def save(self, state_dict: Any, path: str) -> None:
        """Write one shard. Raises TrialError if it holds objects that the reader would not read."""
        state_dict = readable(state_dict, self.reader)
        if self._memory_files is None or not Path(path).is_relative_to(self._folder):
            torch.save(state_dict, path)
            return
        name = Path(path).relative_to(self._folder)
        state_dict, frozen = without_frozen(state_dict, self._frozen)
        files: dict[Path, Any] = {name: state_dict}
        if frozen:
            files[frozen_path(name)] = _once(frozen)
        for file, content in files.items():
            self._memory_files.write(self._folder, file.as_posix(), partial(write_tensors, content))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Tensors stay in the file: DeepSpeed reads some states twice, and copies parts of them."""
        return self.reader.load(Path(path), map_location, mapped=True)

    def commit(self, info: Any) -> bool:
        """Writing the manifest commits the checkpoint."""
        return True


def _once(frozen: dict[KeyPath, torch.Tensor]) -> dict[KeyPath, torch.Tensor]:
    """Frozen weights, each once. From an accelerator, DeepSpeed copies whole ones to the host."""

    def original(keys: KeyPath, tensor: torch.Tensor) -> torch.Tensor:
        whole = frozen.get((_MODULE, *keys[1:]), tensor)
        is_copy = (whole.shape, whole.dtype) == (tensor.shape, tensor.dtype)
        return whole if is_copy else tensor

    return {keys: original(keys, tensor) for keys, tensor in frozen.items()}


def reader_of(engine: DeepSpeedEngine) -> Reader:
    """The reader of the engine's `SnapshotCheckpointEngine`, or one that does not trust."""
    installed = engine.checkpoint_engine
    if isinstance(installed, SnapshotCheckpointEngine):
        return installed.reader
    return Reader(classes=CHECKPOINT_CLASSES)


def snapshot_checkpoint_engines(
    engines: Sequence[DeepSpeedEngine],
    folder: Path,
    *,
    reader: Reader,
    memory_files: MemoryFiles | None = None,
) -> AbstractContextManager[None]:
    """Inside the block, engines read and write shards with a `SnapshotCheckpointEngine`."""
    replacements = (
        SnapshotCheckpointEngine(folder, memory_files, reader, frozen_names(engine.module))
        for engine in engines
    )
    return checkpoint_engines_replaced(engines, replacements)


@contextmanager
def checkpoint_engines_replaced(
    engines: Sequence[DeepSpeedEngine], replacements: Iterable[CheckpointEngine]
) -> Iterator[None]:
    """Inside the block, each engine has its replacement, which is constructed just before."""
    previous = [engine.checkpoint_engine for engine in engines]
    try:
        for engine, replacement in zip(engines, replacements, strict=True):
            engine.checkpoint_engine = replacement
        yield
    finally:
        for engine, checkpoint_engine in zip(engines, previous, strict=True):
            engine.checkpoint_engine = checkpoint_engine
