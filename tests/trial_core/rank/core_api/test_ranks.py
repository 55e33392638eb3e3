"""`trial_core.init` under torchrun: two ranks, which join a driver."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.fitting import Launcher, start, watched_ranks
from tests.support.processes import kill
from tests.support.slots import lines
from trial_core.checkpoint.store import CheckpointStore

pytestmark = [pytest.mark.slots, pytest.mark.long]

SCRIPT = Path(__file__).parents[3] / "support" / "scripts" / "core_ranks.py"
WATCHED = SCRIPT.with_name("core_watched.py")
COLLECTIVE_SECONDS = 10


@pytest.mark.parametrize(("mode", "reporter"), [("WORKERS_ASK_CHIEF", "1"), ("CHIEF_ONLY", "0")])
def test_ranks_stop_at_one_step_store_their_parts_and_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, reporter: str
) -> None:
    """SIGTERM to one rank stops all. Each stores its part, and each downloads all parts.

    The rank that gets the signal is not the one that asks, if rank 0 alone does. Any rank reports.
    """
    monkeypatch.setenv("PREEMPT_MODE", mode)
    monkeypatch.setenv("REPORTER", reporter)
    for _ in range(2):
        output = start("torchrun", tmp_path, 2, str(SCRIPT), str(tmp_path))
    (first, second), (other_first, other_second) = (lines(tmp_path, "seen", r) for r in (0, 1))
    assert first == other_first, output
    assert {**second, "own": None} == {**other_second, "own": None}
    assert (first["resumed"], first["parts"]) == (None, {})
    reached = first["step"]
    assert reached >= 5
    assert (second["trial"], second["resumed"]) == (first["trial"], first["stored"])
    assert second["parts"] == {"part-0": f"0 at {reached}", "part-1": f"1 at {reached}"}
    assert (second["own"], other_second.pop("own")) == (["part-0"], ["part-1"])
    assert second["step"] > reached
    stored = CheckpointStore(str(tmp_path / "stored")).list()
    metadata = json.loads((tmp_path / "shared" / "metadata.json").read_text())
    assert metadata == {"steps_completed": reached, "rank": 1}
    assert [each.progress.batches_trained for each in stored] == [reached, second["step"]]
    assert [each.topology.world_size for each in stored] == [2, 2]
    assert [each.metrics["validation"] for each in stored] == [{"loss": 0.5}] * 2


def test_an_upload_may_last_longer_than_the_deadline_of_collectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose part is stored waits for the driver, not in a collective for the other one."""
    monkeypatch.setenv("TRIALFLOW_COLLECTIVE_SECONDS", str(COLLECTIVE_SECONDS))
    script = SCRIPT.with_name("slow_shards.py")
    output = start("torchrun", tmp_path, 2, str(script), str(tmp_path))
    assert sorted(path.name for path in tmp_path.glob("stored-*")) == ["stored-0", "stored-1"], (
        output
    )
    (stored,) = CheckpointStore(str(tmp_path / "stored")).list()
    assert {entry.path: entry.rank for entry in stored.files}["part-1"] == 1


@pytest.mark.parametrize("asks", [True, False])
def test_a_killed_rank_is_named_and_no_process_is_left(tmp_path: Path, asks: bool) -> None:
    """The other rank raises in its step. One that never calls its context ends by itself."""
    with watched_ranks(tmp_path, script=WATCHED, asks=asks) as ranks:
        ranks.until_batch(3, rank=0)
        pids = ranks.pids()
        ranks.processes[1].kill()
        assert ranks.left(pids) == []
        if asks:
            assert ranks.ended(0)["error"] == "RankFailed"
        assert "rank 1 on " in (tmp_path / "rank-0.log").read_text()
        assert "**failed: rank 1 on " in ranks.report()


def test_without_its_driver_every_rank_ends(tmp_path: Path) -> None:
    """SIGKILL to the driver."""
    with watched_ranks(tmp_path, script=WATCHED) as ranks:
        ranks.until_batch(3, rank=1)
        ranks.until_batch(3, rank=0)
        pids = ranks.pids()
        kill([ranks.driver()])
        for rank in (0, 1):
            ended = ranks.ended(rank)
            assert (ended["error"], ended["text"]) == ("SlotsError", "the driver is gone")
        assert ranks.left(pids) == []


@pytest.mark.parametrize("calls", ["report", "store"])
def test_without_its_driver_a_script_that_never_asks_raises_in_its_next_call(
    tmp_path: Path, calls: str
) -> None:
    """Also where it waits for an upload."""
    with watched_ranks(tmp_path, "python", script=WATCHED, asks=False, calls=calls) as ranks:
        ranks.until_batch(3)
        kill([ranks.driver()])
        ended = ranks.ended(0)
        assert (ended["error"], ended["text"]) == ("SlotsError", "the driver is gone")


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_ctrl_c_is_a_request_to_stop(tmp_path: Path, launcher: Launcher) -> None:
    """To the terminal's foreground group: the script, or torchrun."""
    with watched_ranks(tmp_path, launcher, script=WATCHED) as ranks:
        ranks.until_batch(3)
        pids = ranks.pids()
        os.killpg(ranks.processes[0].pid, signal.SIGINT)
        ended = ranks.ended(0)
        (stored,) = CheckpointStore(f"file://{tmp_path}/checkpoints").list()
        assert stored.uuid == ended.get("checkpoint_uuid"), ranks.logs()
        assert stored.progress.batches_trained == ended["batches_trained"] > 3
        assert "stopped: interrupted (SIGINT)" in ranks.report()
        assert ranks.left(pids) == []
