"""What the driver knows of a rank's process and log."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from trial_core.errors import LaunchError
from trial_core.processes.slots import slot_group, stacks
from trial_core.processes.slots.rank_handle import RankHandle, wait_for_end
from trial_core.processes.slots.slot_group import SlotGroup


class SilentRank(RankHandle):
    """A rank that no signal reaches."""

    def signal(self, number: int) -> None:
        pass

    def written_bytes(self) -> int:
        return 0


def silent_rank(folder: Path, rank: int = 0) -> SilentRank:
    return SilentRank(rank, "here", folder / f"rank-{rank}.log", lambda rank, code: None)


def test_ranks_that_do_not_end_share_a_deadline(tmp_path: Path) -> None:
    """As those of eight GPUs whose driver hangs: they are not waited for one after the other."""
    ranks = [silent_rank(tmp_path, rank) for rank in range(4)]
    ranks[1].ended(0)
    began = time.monotonic()
    assert wait_for_end(ranks, 1.0) == [ranks[0], ranks[2], ranks[3]]
    assert time.monotonic() - began < 1.9


def test_the_end_of_a_log_is_shown_and_a_deleted_log_has_none(tmp_path: Path) -> None:
    """A user who needs room may delete it while the rank runs."""
    rank = silent_rank(tmp_path)
    assert (rank.log_size(), rank.log_from(3), rank.log_tail()) == (0, "", "")
    rank.log_path.write_text("".join(f"{line}\n" for line in range(10_000)))
    assert rank.log_tail().split("\n") == [str(line) for line in range(9_980, 10_000)]


def test_a_rank_that_hangs_at_its_start_is_the_failure_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a run that has trained launches the ranks again. The hung one is asked for its stack."""
    monkeypatch.setattr(slot_group, "JOIN_SECONDS", 0.1)
    monkeypatch.setattr(stacks, "DUMP_SECONDS", 0.1)
    signals = []

    class HungRank(SilentRank):
        def signal(self, number: int) -> None:
            signals.append(number)
            if number == signal.SIGKILL:
                self.ended(-number)

    def launch(request: Any, ranks: list[RankHandle]) -> Any:
        ranks.append(HungRank(0, "node-1", tmp_path / "rank-0.log"))

    with pytest.raises(LaunchError, match=r"^rank 0 did not join within 0.1 s; see the") as raised:
        SlotGroup(1, working_dir=tmp_path, log_dir=tmp_path, launcher=launch)
    assert raised.value.node == "node-1"
    assert signals == [stacks.STACK_SIGNAL, signal.SIGKILL]
