"""DeepSpeed's shards are written into memory files, or to disk if they do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trial_core.deepspeed.checkpoint_engine import SnapshotCheckpointEngine
from trial_core.processes.machine.memory_files import MemoryFiles, is_memory_file
from trial_core.rank.state_files.safe_load import Reader

TENSOR_BYTES = 2**18


@pytest.mark.parametrize("limit_bytes", [0, 100, 5 * TENSOR_BYTES // 2, 4 * TENSOR_BYTES + 10])
def test_a_shard_beyond_the_memory_limit_is_written_to_disk(
    tmp_path: Path, limit_bytes: int
) -> None:
    """Wherever in the file the limit is reached, torch sees no error and can read the shard."""
    state = {str(n): torch.full((TENSOR_BYTES // 4,), float(n)) for n in range(4)}
    memory_files = MemoryFiles(limit_bytes)
    memory_files.begin()
    engine = SnapshotCheckpointEngine(tmp_path, memory_files, Reader())
    engine.save(state, str(tmp_path / "shard.pt"))
    memory_files.end()
    assert not is_memory_file(tmp_path / "shard.pt")
    loaded = engine.load(str(tmp_path / "shard.pt"))
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    memory_files.close()


def test_a_shard_is_left_in_its_file_until_it_is_used(tmp_path: Path) -> None:
    """DeepSpeed reads model states twice on every rank: neither takes memory for the whole."""
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": {"weight": torch.ones(2**16)}}, path)
    engine = SnapshotCheckpointEngine(tmp_path, None, Reader())
    loaded = engine.load(str(path), map_location=lambda storage, location: storage)
    with path.open("r+b") as file:  # the tensor shows what is in the file now
        file.seek(2**17)
        file.write(bytes(4))
    assert 0 < int((loaded["module"]["weight"] == 0).sum()) <= 2
