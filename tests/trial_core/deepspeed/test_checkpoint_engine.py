"""DeepSpeed's shards are written into memory files, or to disk if they do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trial_core.deepspeed.checkpoint_engine import SnapshotCheckpointEngine
from trial_core.transfer.memory_files import MemoryFiles, is_memory_file

TENSOR_BYTES = 2**18


@pytest.mark.parametrize("limit_bytes", [0, 100, 5 * TENSOR_BYTES // 2, 4 * TENSOR_BYTES + 10])
def test_a_shard_beyond_the_memory_limit_is_written_to_disk(
    tmp_path: Path, limit_bytes: int
) -> None:
    """Wherever in the file the limit is reached, torch sees no error and can read the shard."""
    state = {str(n): torch.full((TENSOR_BYTES // 4,), float(n)) for n in range(4)}
    memory_files = MemoryFiles(limit_bytes)
    memory_files.begin()
    engine = SnapshotCheckpointEngine(tmp_path, memory_files, None)
    engine.save(state, str(tmp_path / "shard.pt"))
    memory_files.end()
    assert not is_memory_file(tmp_path / "shard.pt")
    loaded = engine.load(str(tmp_path / "shard.pt"))
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    memory_files.close()
