"""DeepSpeed's shards on their way out and in: through its own seam, the checkpoint engine.

While a trial saves, what DeepSpeed would write with `torch.save` goes into images in memory, which
costs a copy; serialising for storage and uploading are left to another process. While a trial
loads, what DeepSpeed would unpickle is read with `torch.load(weights_only=True)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.utils.serialization import config as serialization

from trial_core.controller.safe_load import Reader
from trial_core.deepspeed.checkpoint_classes import CHECKPOINT_CLASSES
from trial_core.transfer.memory_files import MemoryFiles


class ShardFiles(TorchCheckpointEngine):
    """Writes shards below one folder into images, and reads with care.

    Args:
        folder: the staging folder, or the one that files were fetched into.
        images: where to write; None writes files.
        reader: reads files; None: one that trusts nobody.
    """

    def __init__(self, folder: Path, images: MemoryFiles | None, reader: Reader | None) -> None:
        CheckpointEngine.__init__(self)
        self.name = "trialflow"
        self._folder = folder
        self._images = images
        self.reader = reader or Reader(classes=CHECKPOINT_CLASSES)

    def create(self, info: Any) -> None:
        """Nothing is to be prepared."""

    def save(self, state_dict: Any, path: str) -> None:
        """Write one shard. Called by DeepSpeed on the ranks that have one."""
        name = Path(path).relative_to(self._folder).as_posix() if self._is_below(path) else None
        if self._images is None or name is None:
            torch.save(state_dict, path)
        else:
            self._images.write(self._folder, name, lambda file: copy_out(state_dict, file))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one shard, of a fetched and verified checkpoint."""
        return self.reader.load(Path(path), map_location)

    def commit(self, info: Any) -> bool:
        """The commit is the manifest's."""
        return True

    def _is_below(self, path: str) -> bool:
        return Path(path).is_relative_to(self._folder)


def reader_of(engine: DeepSpeedEngine) -> Reader:
    """What reads the engine's files now: inside `shard_files`, the reader given there."""
    files = engine.checkpoint_engine
    return files.reader if isinstance(files, ShardFiles) else Reader(classes=CHECKPOINT_CLASSES)


def copy_out(state: Any, file: IO[bytes]) -> None:
    """Write `state` as `torch.save` does: at the speed of a copy, from pinned memory where there
    is an accelerator."""
    # No CRC: the manifest's digest covers every byte, and is computed where it blocks nobody.
    changes = {"save.compute_crc32": False, "save.use_pinned_memory_for_d2h": True}
    with serialization.patch(changes):  # type: ignore[attr-defined]  # added at run time
        torch.save(state, file)


@contextmanager
def shard_files(
    engines: Sequence[DeepSpeedEngine],
    folder: Path,
    *,
    images: MemoryFiles | None = None,
    reader: Reader | None = None,
) -> Iterator[None]:
    """Inside the block the engines read and write shards below `folder` in our way.

    An engine whose DeepSpeed configuration chooses a checkpoint writer keeps it.
    """
    own = [engine.checkpoint_engine for engine in engines]
    for engine, replaced in zip(engines, own, strict=True):
        if type(replaced) is TorchCheckpointEngine:
            engine.checkpoint_engine = ShardFiles(folder, images, reader)
    try:
        yield
    finally:
        for engine, replaced in zip(engines, own, strict=True):
            engine.checkpoint_engine = replaced
