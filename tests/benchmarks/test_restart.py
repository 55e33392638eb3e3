"""That the benchmark of restarts runs and ends as promised."""

from __future__ import annotations

import pytest

from benchmarks.restart import Killer, Turn, figures_of, turn_of
from tests.benchmarks.outcome import outcome_of

TIMES = {"killed": 20.0, "restarting": 21.0, "joined": 23.0, "built": 27.0, "restored": 35.0}


@pytest.mark.slots
@pytest.mark.long
def test_the_restart_benchmark_ends_with_one_line_of_json() -> None:
    """One pair with a tiny model on one rank measures every figure."""
    outcome = outcome_of("restart --pairs 1 --ranks 1 --model tiny")
    assert outcome["targets"].keys() < outcome["figures"].keys()
    assert all(value > 0 for value in outcome["figures"].values())


def test_a_restart_ends_with_the_first_batch_of_the_new_ranks() -> None:
    """Not with a batch that the old ranks finished after the kill; its phases add up."""
    turn = turn_of(3.0, TIMES, [10.0, 20.5, 51.0, 60.0])
    assert turn == Turn(launch=7, notice=1, start=2, build=4, restore=8, train=16)
    assert turn.restart == 51.0 - 20.0


def test_a_run_without_a_restart_is_not_measured() -> None:
    """Its times would be those of the first launch."""
    with pytest.raises(RuntimeError, match="no rank was killed"):
        turn_of(3.0, {"joined": 23.0, "built": 27.0, "restored": 35.0}, [51.0])
    with pytest.raises(RuntimeError, match="no batch was trained after the restart; before it 2"):
        turn_of(3.0, TIMES, [10.0, 20.5])


def test_one_rank_is_killed_after_a_checkpoint() -> None:
    """Once, when training has gone beyond the checkpoint, so that there is something to restore."""
    killed_at: list[int] = []
    killer = Killer(lambda: killed_at.append(batches))
    for batches in (4, 5, 6):
        killer.batches_trained(batches)
    killer.checkpoint_committed("uuid", 6, 1)
    for batches in (6, 8, 9):
        killer.batches_trained(batches)
    assert killed_at == [8]


def test_a_ratio_is_of_the_turns_of_a_pair() -> None:
    """Turns of one pair met the same machine: the median of ratios is not a ratio of medians."""
    turns = {
        True: [turn_lasting(seconds) for seconds in (2.0, 3.0, 40.0)],
        False: [turn_lasting(seconds) for seconds in (4.0, 15.0, 80.0)],
    }
    figures = figures_of(turns)
    assert figures["ratio"] == 0.5
    assert (figures["ratio_low"], figures["ratio_high"]) == (0.2, 0.5)
    assert figures["restart_seconds_with_preload"] == 3.0


def turn_lasting(seconds: float) -> Turn:
    """A turn whose restart takes so long."""
    return Turn(launch=1, notice=seconds, start=0, build=0, restore=0, train=0)
