"""That the benchmark of loading runs and ends as promised; how fast anything is, no test says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checkpoint import MIB
from benchmarks.loading import CHECK, TARGETS, Bench, Load, figures_of
from benchmarks.memory import Resident
from tests.benchmarks.outcome import outcome_of
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import RankFailed
from trial_core.processes.slots.fork_server import ForkServer


def test_the_first_turn_gives_the_memory_alone() -> None:
    """The other figures are medians of the later turns, the ratios those of pairs."""
    ours = [Load(90.0, 80.0, 90.0, Resident(3 * MIB, MIB)), *_timed((1.0, 2.0), (3.0, 6.0))]
    peer = [Load(90.0, 0.0, 90.0, Resident(5 * MIB, MIB)), *_timed((4.0, 4.0), (4.0, 4.0))]
    figures = figures_of({("trialflow", "2_to_2"): ours, ("dcp", "2_to_2"): peer})
    assert figures["trialflow_memory_mib_2_to_2"] == 3.0
    assert figures["trialflow_seconds_2_to_2"] == 2.0
    assert figures["time_ratio_dcp_2_to_2"] == 0.5
    assert figures["processor_ratio_dcp_2_to_2"] == 1.0


@pytest.mark.long
@pytest.mark.slots
def test_ranks_that_loaded_nothing_are_noticed(tmp_path: Path) -> None:
    """Doing nothing would be the fastest of all."""
    with ForkServer() as server:
        store = CheckpointStore(f"file://{tmp_path}/stored")
        bench = Bench(store, {}, layers=1, fork_servers={1: server}, folder=tmp_path)
        with (
            pytest.raises(RankFailed, match="on rank 0 is not what was saved"),
            bench.ranks(1, "trialflow", 1, tmp_path / "run") as (slots, _),
        ):
            slots.submit(CHECK).result()


@pytest.mark.long
@pytest.mark.slots
@pytest.mark.timeout(1800)
def test_it_ends_with_one_line_of_json() -> None:
    """Every library loads what it saved, in each case; every target has a figure."""
    outcome = outcome_of("loading --server moto --mib 32 --repeats 1")
    assert outcome["targets"] == TARGETS
    assert TARGETS.keys() | {"kept_seconds_2_to_2"} <= outcome["figures"].keys()


def _timed(*costs: tuple[float, float]) -> list[Load]:
    return [Load(seconds, 0.0, processor_seconds, None) for seconds, processor_seconds in costs]
