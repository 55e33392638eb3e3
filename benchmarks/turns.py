"""Measures the cost of an observer: the same ranks train in turns, with it and without.

A turn is some workloads of a trial whose batches take about 50 ms. The turns of a pair follow each
other, and pairs begin alternately with one and the other, so that a drift of the machine's speed
cancels out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.figures import Estimate
from benchmarks.ranks import ROOT, case_name, experiment
from trial_core.observe.events.observers import Observer

if TYPE_CHECKING:
    from trial_core.config import ExperimentConfig
    from trial_core.driver.run import Launch

BATCH_SECONDS = 0.05


@dataclass(frozen=True)
class Plan:
    """The size of a benchmark.

    Attributes:
        pairs: the number of pairs of turns; one more warms up.
        workloads, batches: workloads per turn, and batches per workload.
    """

    pairs: int
    workloads: int
    batches: int

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser, pairs: int) -> None:
        """Add the arguments for the size."""
        parser.add_argument("--pairs", type=int, default=pairs, help="pairs of turns in each case")
        parser.add_argument("--workloads", type=int, default=5, help="workloads per turn")
        parser.add_argument("--batches", type=int, default=20, help="batches per workload")
        parser.add_argument("--ranks", type=int, nargs="+", default=[1])

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Plan:
        """Return the plan of the arguments."""
        return cls(arguments.pairs, arguments.workloads, arguments.batches)

    @property
    def total_batches(self) -> int:
        """The number of batches of all turns."""
        return 2 * (self.pairs + 1) * self.workloads * self.batches


@dataclass(frozen=True)
class Turn:
    """The times of one turn.

    Attributes:
        seconds: wall time.
        driver_seconds: processor time of all threads of the driver.
    """

    seconds: float
    driver_seconds: float


@dataclass(frozen=True)
class Pair:
    """A turn with the observer and a bare turn, one right after the other."""

    observed: Turn
    bare: Turn


class Relay(Observer):
    """Forwards the ranks' reports to the present observer."""

    def __init__(self) -> None:
        self.target = Observer()

    def batches_trained(self, batches: int) -> None:
        self.target.batches_trained(batches)

    def rank_logged(self, rank: int, line: str) -> None:
        self.target.rank_logged(rank, line)


class Turns:
    """Runs turns with an observer and without.

    Args:
        relay: the observer of the run's ranks.
        observer: gives the observer for the block of a turn. Entering and leaving are not timed.
        train: the stage train-workload.
    """

    def __init__(
        self,
        launch: Launch,
        relay: Relay,
        observer: Callable[[], AbstractContextManager[Observer]],
        train: Callable[[Launch, int, int], int],
        plan: Plan,
    ) -> None:
        self._launch = launch
        self._relay = relay
        self._observer = observer
        self._train = train
        self._plan = plan
        self._trained = 0

    def measure(self) -> list[Pair]:
        """Return all pairs of the plan, after one that warms up."""
        self._pair(bare_first=True)
        return [self._pair(bare_first=bool(i % 2)) for i in range(self._plan.pairs)]

    def _pair(self, bare_first: bool) -> Pair:
        if bare_first:
            bare = self._turn(_bare)
            return Pair(self._turn(self._observer), bare)
        observed = self._turn(self._observer)
        return Pair(observed, self._turn(_bare))

    def _turn(self, observer: Callable[[], AbstractContextManager[Observer]]) -> Turn:
        with observer() as self._relay.target:
            self._launch.run.observer = self._relay.target
            process = psutil.Process()
            began, used = time.perf_counter(), sum(process.cpu_times()[:2])
            for _ in range(self._plan.workloads):
                until = self._trained + self._plan.batches
                self._trained = self._train(self._launch, self._trained, until)
            return Turn(time.perf_counter() - began, sum(process.cpu_times()[:2]) - used)


@contextmanager
def _bare() -> Iterator[Observer]:
    yield Observer()


def paced_experiment(world_size: int, plan: Plan, chatty: Path, folder: Path) -> ExperimentConfig:
    """Return the experiment whose batches take `BATCH_SECONDS`.

    Args:
        chatty: a file that makes the trial print while it exists.
    """
    hyperparameters = {
        "model": "tiny", "bare_batches": 1, "batch_seconds": BATCH_SECONDS, "chatty": str(chatty)
    }  # fmt: skip
    length = {"batches": plan.total_batches}
    return experiment(
        "",
        world_size,
        f"file://{folder}/checkpoints",
        entrypoint="benchmarks.report_trial:ReportedTrial",
        code=str(ROOT),
        hyperparameters=hyperparameters,
        searcher={"name": "single", "metric": "seconds", "max_length": length},
    )


def figures_of(pairs: list[Pair], plan: Plan, world_size: int, what: str) -> dict[str, float]:
    """Compute and print the figures of `pairs`.

    Args:
        what: the observer, for people.
    """
    case, batches = case_name(world_size), plan.workloads * plan.batches
    ratio = Estimate.of([pair.observed.seconds / pair.bare.seconds for pair in pairs])
    seconds, used = attrgetter("seconds"), attrgetter("driver_seconds")
    batch_ms = Estimate.of([seconds(pair.bare) / batches * 1e3 for pair in pairs])
    driver = [(used(pair.observed) - used(pair.bare)) / seconds(pair.bare) for pair in pairs]
    share = Estimate.of([100 * each for each in driver])
    print(
        f"{case}: batch {batch_ms.shown(1)} ms; with {what} {ratio.shown(4)} times as long; "
        f"the driver uses {share.shown(2)} % of a core more",
        flush=True,
    )
    return {
        f"ratio_{case}": ratio.median,
        f"ratio_low_{case}": ratio.low,
        f"ratio_high_{case}": ratio.high,
        f"batch_ms_{case}": batch_ms.median,
        f"driver_percent_of_a_core_{case}": share.median,
    }
