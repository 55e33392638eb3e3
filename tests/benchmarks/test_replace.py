"""That the benchmark of replacements runs and ends as promised."""

from __future__ import annotations

import pytest

from benchmarks.replace import Turn, figures_of, turn_of
from tests.benchmarks.outcome import outcome_of

TIMES = {
    "killed": 20.0, "restarting": 21.0, "gathered": 23.0, "joined": 27.0, "built": 35.0,
    "fetched": 51.0, "restored": 83.0,
}  # fmt: skip


@pytest.mark.slots
@pytest.mark.long
@pytest.mark.parametrize("case", ["node", "rank"])
def test_the_benchmark_ends_with_one_line_of_json(case: str) -> None:
    """One pair with a tiny model measures every figure."""
    outcome = outcome_of(f"replace --pairs 1 --cases {case} --model tiny")
    assert outcome["targets"].keys() == {f"{case}_ratio", f"{case}_seconds_replaced"}
    assert outcome["targets"].keys() < outcome["figures"].keys()
    assert all(
        value > 0 for name, value in outcome["figures"].items() if not name.startswith("rank_nodes")
    )


def test_a_replacement_ends_with_the_first_batch_of_the_new_ranks() -> None:
    """Its phases add up."""
    turn = turn_of(TIMES, [10.0, 20.5, 147.0, 150.0])
    assert turn == Turn(notice=1, nodes=2, start=4, build=8, fetch=16, restore=32, train=64)
    assert turn.total == 147.0 - 20.0


def test_a_run_on_one_machine_waits_for_no_nodes() -> None:
    """Nor does the time of an earlier launch count."""
    for gathered in ({}, {"gathered": 5.0}):
        times = {**TIMES, **gathered}
        if not gathered:
            del times["gathered"]
        turn = turn_of(times, [147.0])
        assert (turn.nodes, turn.start) == (0, 6)


def test_a_run_that_restored_nothing_is_not_measured() -> None:
    """What was fetched before belongs to an earlier launch."""
    with pytest.raises(RuntimeError, match="nothing was killed and restored"):
        turn_of({**TIMES, "fetched": 5.0}, [147.0])
    with pytest.raises(RuntimeError, match="nothing was killed and restored"):
        turn_of(TIMES, [10.0])


def test_a_ratio_is_of_the_turns_of_a_pair() -> None:
    """Turns of one pair met the same machine."""
    turns = {
        False: [turn_lasting(seconds) for seconds in (2.0, 3.0, 40.0)],
        True: [turn_lasting(seconds) for seconds in (4.0, 15.0, 80.0)],
    }
    figures = figures_of("node", turns)
    assert figures["node_ratio"] == 0.5
    assert (figures["node_seconds_replaced"], figures["node_seconds_all_new"]) == (3.0, 15.0)


def turn_lasting(seconds: float) -> Turn:
    """A turn that takes so long."""
    return Turn(notice=seconds, nodes=0, start=0, build=0, fetch=0, restore=0, train=0)
