"""`trial_core.init` under torchrun: two ranks, without a driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fitting import start
from tests.support.slots import lines
from trial_core.checkpoint.store import CheckpointStore

pytestmark = [pytest.mark.slots, pytest.mark.long]

SCRIPT = Path(__file__).parents[2] / "support" / "scripts" / "core_ranks.py"


def test_ranks_stop_at_one_step_store_their_parts_and_continue(tmp_path: Path) -> None:
    """SIGTERM to one rank stops all. Each stores its part, and each downloads all parts."""
    for _ in range(2):
        output = start("torchrun", tmp_path, 2, str(SCRIPT), str(tmp_path))
    (first, second), (other_first, other_second) = (lines(tmp_path, "seen", r) for r in (0, 1))
    assert first == other_first, output
    assert second == other_second
    assert (first["resumed"], first["parts"]) == (None, {})
    reached = first["step"]
    assert reached >= 5
    assert (second["trial"], second["resumed"]) == (first["trial"], first["stored"])
    assert second["parts"] == {"part-0": f"0 at {reached}", "part-1": f"1 at {reached}"}
    assert second["step"] > reached
    stored = CheckpointStore(str(tmp_path / "stored")).list()
    assert [each.progress.batches_trained for each in stored] == [reached, second["step"]]
    assert [each.topology.world_size for each in stored] == [2, 2]
    assert [each.metrics["validation"] for each in stored] == [{"loss": 0.5}] * 2
