"""DeepSpeed's shards on their way into memory, and what does not fit there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trial_core.deepspeed.shard_files import ShardFiles
from trial_core.transfer.memory_files import MemoryFiles, is_memory_file

TENSOR_BYTES = 2**18


@pytest.mark.parametrize("limit_bytes", [0, 100, 5 * TENSOR_BYTES // 2, 4 * TENSOR_BYTES + 10])
def test_a_shard_that_does_not_fit_into_memory_is_saved(tmp_path: Path, limit_bytes: int) -> None:
    """Wherever in its archive the limit is met: torch notices nothing, and reads it back."""
    state = {str(n): torch.full((TENSOR_BYTES // 4,), float(n)) for n in range(4)}
    images = MemoryFiles(limit_bytes)
    images.begin()
    files = ShardFiles(tmp_path, images, None)
    files.save(state, str(tmp_path / "shard.pt"))
    images.end()
    assert not is_memory_file(tmp_path / "shard.pt")
    loaded = files.load(str(tmp_path / "shard.pt"))
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    images.close()
