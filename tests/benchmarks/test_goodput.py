"""That the benchmark of failures plans and counts rightly; what it measures, no test says."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from benchmarks.goodput.failures import KINDS, planned, repeated
from benchmarks.goodput.figure import drawn
from benchmarks.goodput.harness import Line, Record, first_difference, summed_up
from benchmarks.goodput.workload import Job, MicroBatches, dataset
from tests.benchmarks.outcome import outcome_of

JOB = Job("/nowhere", "s3://none", 10, 0.1, 5, 20.0)


def lines(*batches: int, seconds: float = 0.5) -> list[Line]:
    """A rank's record from second 100 on: one batch each `seconds`; the digest is the batch."""
    return [Line(batch, 100 + seconds * i, 1, batch) for i, batch in enumerate(batches, 1)]


def test_each_failure_comes_once_and_the_change_of_ranks_last() -> None:
    """The same seed gives the same list; the storage is back before the next failure."""
    failures = planned([*KINDS], 1000, 7, outage_batches=300)
    assert failures == planned([*KINDS], 1000, 7, outage_batches=300)
    assert failures != planned([*KINDS], 1000, 8, outage_batches=300)
    assert sorted(each.kind for each in failures) == sorted(KINDS)
    assert failures[-1].kind == "ranks"
    at = [each.batch for each in failures]
    storage = [each.kind for each in failures].index("storage")
    assert at == sorted(at)
    assert at[storage + 1] - at[storage] > 300


def test_a_run_that_is_too_short_is_refused() -> None:
    """The outage of the storage alone would be longer than the run."""
    with pytest.raises(ValueError, match="200 batches are too few for 7 failures"):
        planned([*KINDS], 200, 0, outage_batches=300)


def test_what_failures_cost_adds_up_to_the_time_that_was_lost() -> None:
    """Batches 3 and 4 are trained twice after a pause of 5 s; the second failure costs nothing."""
    undisturbed = summed_up(lines(*range(1, 11)))
    before, after = lines(1, 2, 3, 4), lines(3, 4, 5, 6, 7, 8, 9, 10)
    record = before + [line._replace(at=line.at + 7.0) for line in after]
    run = summed_up(record, [("rank", 102.0), ("storage", 109.0)])
    assert run.failed == [("rank", 1.5, 4), ("storage", 8.5, 6)]
    assert (run.trained, run.twice) == (12, 2)
    costs = run.costs(undisturbed)
    assert costs == pytest.approx({"rank": 6.0, "storage": 0.0})
    assert sum(costs.values()) == pytest.approx(run.seconds - undisturbed.seconds)


def test_the_first_batch_that_differs_is_found() -> None:
    """Only the last training of a batch counts."""
    undisturbed = {1: 10, 2: 20, 3: 30, 4: 40}
    assert first_difference(dict(undisturbed), undisturbed) is None
    assert first_difference({1: 10, 2: 20, 3: 31, 4: 41}, undisturbed) == 3


@pytest.mark.parametrize("start", [0, JOB.batches_per_epoch - 1])
def test_one_rank_reads_what_two_ranks_read(start: int) -> None:
    """Also from the end of an epoch on."""
    one, first, second = (
        iter(DataLoader(dataset(), batch_sampler=MicroBatches(JOB, rank, ranks, start)))
        for rank, ranks in ((0, 1), (0, 2), (1, 2))
    )
    for _ in range(2):
        for turn in (first, second):
            assert next(one)[0].equal(next(turn)[0])


def test_repeated_failures_kill_one_rank_each_time() -> None:
    """Each so long after the one before; the seed draws the ranks."""
    failures = repeated(15.0, 601.0, 4, 3)
    assert len(failures) == 40
    assert {each.kind for each in failures} == {"rank"}
    assert {each.after_seconds for each in failures} == {15.0}
    assert {each.rank for each in failures} == {0, 1, 2, 3}


def test_other_weights_of_a_batch_that_is_trained_again_are_seen() -> None:
    """The first batch after which they differ; and the time until a new process has trained one."""
    again = [line._replace(at=line.at + 5.0, pid=2) for line in lines(3, 4, 5)]
    record = lines(1, 2, 3, 4) + again
    run = summed_up(record, [("rank", 101.6)])  # the other rank: this one ends its batch
    assert (run.changed, run.gaps) == (None, [again[0].at - 101.6])
    record[-2] = record[-2]._replace(weights=99)
    assert summed_up(record).changed == 4


def test_a_record_is_read_as_it_grows(tmp_path: Path) -> None:
    """An unfinished line counts once it is whole; a file that is not there yet has none."""
    path = tmp_path / "rank-0.txt"
    record = Record(path)
    assert record.lines() == []
    path.write_text("1 10.5 7 77\n2 11")
    assert record.lines() == [Line(1, 10.5, 7, 77)]
    with path.open("a") as file:
        file.write(".5 7 78\n")
    assert record.lines() == [Line(1, 10.5, 7, 77), Line(2, 11.5, 7, 78)]


def test_the_figure_names_each_contestant_with_its_goodput() -> None:
    """The best comes first."""
    results = {
        name: {"goodput": goodput, "seconds_with_failures": 9.0, "curve": [(0.0, 1)]}
        for name, goodput in (("slow", 0.25), ("fast", 0.75))
    }
    svg = drawn(results, 10)
    assert svg.index("fast 0.75") < svg.index("slow 0.25")


@pytest.mark.long
@pytest.mark.slots
@pytest.mark.server
@pytest.mark.gateway
def test_it_ends_with_one_line_of_json() -> None:
    """trialflow alone, with one rank killed: no hand, the same weights, no process left."""
    outcome = outcome_of("goodput --only trialflow --failures rank --batches 60 --save-every 10")
    figures = outcome["figures"]
    assert outcome["targets"].keys() < figures.keys()
    assert 0 < figures["goodput_trialflow"] < 1
    for name in ("hands", "departed", "processes_left"):
        assert figures[f"{name}_trialflow"] == 0
