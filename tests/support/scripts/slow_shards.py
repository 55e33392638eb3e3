"""A Core API script whose second rank stores slowly: ``slow_shards.py FOLDER``, under torchrun."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import trial_core
from trial_core.checkpoint.manifest import FileEntry
from trial_core.rank.checkpoint_files import CheckpointFiles

STORE_SECONDS = 20.0


def main(folder: Path) -> None:
    """Store one checkpoint in parts."""
    dist.init_process_group("gloo")
    rank, persist = dist.get_rank(), CheckpointFiles.persist

    def slow(files: CheckpointFiles, *arguments: Any) -> list[FileEntry]:
        time.sleep(STORE_SECONDS * rank)
        return persist(files, *arguments)

    CheckpointFiles.persist = slow  # type: ignore[method-assign]
    experiment = {"name": "slow", "checkpoint_storage": str(folder / "stored")}
    with (
        trial_core.init(exp_conf=experiment) as context,
        context.checkpoint.store_path({"steps_completed": 1}, shard=True) as (path, _),
    ):
        (path / f"part-{rank}").touch()
    (folder / f"stored-{rank}").touch()


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
