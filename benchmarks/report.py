"""Measures the cost of the live report and of log forwarding, for batches of 50 ms.

The same ranks train in alternating turns of the flow's tasks, on a real Prefect server. In a
reported turn a `Report` is updated, and every batch prints a line that reaches Prefect. In a bare
turn there is no report and no output. A turn is as long as an update period, so each reported turn
contains updates of the artifact. Between turns the report finishes, untimed.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.figures import Estimate, conclude
from benchmarks.ranks import ROOT, case_name, experiment
from benchmarks.workload import temporary_homes
from trial_core.driver.observers import Observer

if TYPE_CHECKING:
    from trial_core.config import ExperimentConfig
    from trial_core.driver.run import Launch
    from trial_core.report import Report

TARGET_RATIO = 1.01
BATCH_SECONDS = 0.05
# Longer than the report waits between two updates.
PAUSE_SECONDS = 6.0


@dataclass(frozen=True)
class Plan:
    """The size of the benchmark.

    Attributes:
        pairs: number of pairs of turns; one more warms up.
        workloads, batches: workloads per turn, and batches per workload.
        pause_seconds: after a reported turn.
    """

    pairs: int
    workloads: int
    batches: int
    pause_seconds: float

    @property
    def total_batches(self) -> int:
        """Batches of all turns."""
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
    """A reported turn and a bare turn, one right after the other."""

    reported: Turn
    bare: Turn


class Relay(Observer):
    """Forwards what the ranks report to the present observer."""

    def __init__(self) -> None:
        self.target = Observer()

    def batches_trained(self, batches: int) -> None:
        self.target.batches_trained(batches)

    def rank_logged(self, rank: int, line: str) -> None:
        self.target.rank_logged(rank, line)


class Turns:
    """Runs reported and bare turns.

    Args:
        relay: the observer of the run's ranks.
        chatty: the file that makes the trial print.
    """

    def __init__(
        self, launch: Launch, relay: Relay, report: Report, chatty: Path, plan: Plan
    ) -> None:
        self._launch = launch
        self._relay = relay
        self._report = report
        self._chatty = chatty
        self._plan = plan
        self._trained = 0

    def pair(self, bare_first: bool) -> Pair:
        """A reported and a bare turn."""
        if bare_first:
            bare = self._turn(is_reported=False)
            return Pair(self._turn(is_reported=True), bare)
        reported = self._turn(is_reported=True)
        return Pair(reported, self._turn(is_reported=False))

    def _turn(self, is_reported: bool) -> Turn:
        from trialflow.flows.train import STAGES

        if is_reported:
            self._chatty.touch()
        self._launch.run.observer = self._relay.target = self._report if is_reported else Observer()
        process = psutil.Process()
        began, used = time.perf_counter(), sum(process.cpu_times()[:2])
        for _ in range(self._plan.workloads):
            until = self._trained + self._plan.batches
            self._trained = STAGES.train_workload(self._launch, self._trained, until)
        turn = Turn(time.perf_counter() - began, sum(process.cpu_times()[:2]) - used)
        if is_reported:
            self._chatty.unlink()
            time.sleep(self._plan.pause_seconds)  # for the last update and the last log lines
        return turn


def measure(world_size: int, plan: Plan, folder: Path) -> list[Pair]:
    """Train all pairs of turns; the first pair warms up and is not counted."""
    from prefect import flow  # Prefect reads its settings when it is imported
    from prefect.logging import get_run_logger

    from trial_core.checkpoint.resume_point import ResumePoint
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.driver.launch_ranks import launch_slots
    from trial_core.driver.placement import ThisMachine
    from trial_core.driver.run import Launch, Run
    from trial_core.report import Report
    from trial_core.slots.fork_server import ForkServer
    from trialflow.flows.train import STAGES
    from trialflow.tasks.artifact import ARTIFACT_ERRORS, ReportArtifact

    name = case_name(world_size)
    trial, run_dir, chatty = f"report-{name}", folder / name, folder / f"{name}-chatty"
    run_dir.mkdir()
    config = _experiment(world_size, plan.total_batches, chatty, folder)
    store = CheckpointStore(config.checkpoint_storage.url)

    @flow(name="report-in-turns")
    def turns() -> list[Pair]:
        report = Report(
            config, trial, run_dir, store,
            logger=get_run_logger(), publish=ReportArtifact(trial).write,
            publish_errors=ARTIFACT_ERRORS,
        )  # fmt: skip
        with report:
            launch = Launch(Run(config, trial, run_dir, store, relay := Relay()))
            with (
                ForkServer() as fork_server,
                launch_slots(launch, ThisMachine(fork_server)) as launch.slots,
            ):
                STAGES.build_trial(launch)
                STAGES.build_loaders(launch, ResumePoint())
                report.run_started(trial, plan.total_batches, 0, launch.answers.batch_samples)
                in_turns = Turns(launch, relay, report, chatty, plan)
                in_turns.pair(bare_first=True)
                # The order alternates, so that a drift of the machine's speed cancels out.
                measured = [in_turns.pair(bare_first=bool(i % 2)) for i in range(plan.pairs)]
            report.ended("completed")
        return measured

    return turns()


def _experiment(world_size: int, batches: int, chatty: Path, folder: Path) -> ExperimentConfig:
    hyperparameters = {
        "model": "tiny", "bare_batches": 1, "batch_seconds": BATCH_SECONDS, "chatty": str(chatty)
    }  # fmt: skip
    return experiment(
        "",
        world_size,
        f"file://{folder}/checkpoints",
        entrypoint="benchmarks.report_trial:ReportedTrial",
        code=str(ROOT),
        hyperparameters=hyperparameters,
        searcher={"name": "single", "metric": "seconds", "max_length": {"batches": batches}},
    )


def figures_of(pairs: list[Pair], batches: int, case: str) -> dict[str, float]:
    """Compute and print the figures of `pairs`.

    Args:
        batches: per turn.
    """
    ratio = Estimate.of([pair.reported.seconds / pair.bare.seconds for pair in pairs])
    seconds, used = attrgetter("seconds"), attrgetter("driver_seconds")
    batch_ms = Estimate.of([seconds(pair.bare) / batches * 1e3 for pair in pairs])
    driver = [(used(pair.reported) - used(pair.bare)) / seconds(pair.bare) for pair in pairs]
    share = Estimate.of([100 * each for each in driver])
    print(
        f"{case}: batch {batch_ms.shown(1)} ms; with the report {ratio.shown(4)} times as long; "
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


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.report", description=__doc__)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of turns in each case")
    parser.add_argument("--workloads", type=int, default=5, help="workloads per turn")
    parser.add_argument("--batches", type=int, default=20, help="batches per workload")
    parser.add_argument("--pause", type=float, default=PAUSE_SECONDS, help="seconds between turns")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    arguments = parser.parse_args()
    plan = Plan(arguments.pairs, arguments.workloads, arguments.batches, arguments.pause)
    figures: dict[str, float] = {}
    with temporary_homes() as folder:
        from trialflow.flows.server.embedded_server import prefect_api

        with prefect_api():
            for world_size in arguments.ranks:
                pairs = measure(world_size, plan, folder)
                batches = plan.workloads * plan.batches
                figures |= figures_of(pairs, batches, case_name(world_size))
    targets = {f"ratio_{case_name(ranks)}": TARGET_RATIO for ranks in arguments.ranks}
    conclude(figures, targets)


if __name__ == "__main__":
    main()
