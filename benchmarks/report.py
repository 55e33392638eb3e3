"""What the live report and the forwarding of logs cost a run whose batch takes 50 ms.

The same ranks train in turns of the flow's own tasks, on a real Prefect server: in one turn a
`Report` watches and every batch prints a line, which goes all the way to Prefect; in the other
nobody watches and nothing is printed. A turn is as long as an update period, so each watched one
has its share of the artifact's updates. Between turns the report is left to finish, untimed.
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
from trial_core.run.observer import Observer

if TYPE_CHECKING:
    from trial_core.config import ExperimentConfig
    from trialflow.tasks.report import Report
    from trialflow.tasks.run import TrialRun

TARGET_RATIO = 1.01
BATCH_SECONDS = 0.05
# Longer than the report waits between two updates.
PAUSE_SECONDS = 6.0


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        pairs: of turns; one more warms up.
        workloads: in a turn, and `batches` in each of them.
        pause_seconds: after a turn that is watched.
    """

    pairs: int
    workloads: int
    batches: int
    pause_seconds: float

    @property
    def batches_in_all(self) -> int:
        """Of all turns."""
        return 2 * (self.pairs + 1) * self.workloads * self.batches


@dataclass(frozen=True)
class Turn:
    """Some train-workloads.

    Attributes:
        seconds: wall time.
        driver_seconds: processor time of the driver, all its threads.
    """

    seconds: float
    driver_seconds: float


@dataclass(frozen=True)
class Pair:
    """A turn that is watched, and one that is not, right after each other."""

    watched: Turn
    bare: Turn


class Relay(Observer):
    """Passes on what the ranks say to whoever watches at the moment."""

    def __init__(self) -> None:
        self.watching = Observer()

    def batches_trained(self, batches: int) -> None:
        self.watching.batches_trained(batches)

    def rank_logged(self, rank: int, line: str) -> None:
        self.watching.rank_logged(rank, line)


class Turns:
    """A run whose turns are watched, or not.

    Args:
        relay: what the run's ranks talk to.
        chatty: the file that has the trial print.
    """

    def __init__(
        self, run: TrialRun, relay: Relay, report: Report, chatty: Path, plan: Plan
    ) -> None:
        self._run = run
        self._relay = relay
        self._report = report
        self._chatty = chatty
        self._plan = plan
        self._trained = 0

    def pair(self, bare_first: bool) -> Pair:
        """One turn of each."""
        if bare_first:
            bare = self._turn(is_watched=False)
            return Pair(self._turn(is_watched=True), bare)
        watched = self._turn(is_watched=True)
        return Pair(watched, self._turn(is_watched=False))

    def _turn(self, is_watched: bool) -> Turn:
        from trialflow.tasks.train_workload import train_workload

        if is_watched:
            self._chatty.touch()
        self._run.observer = self._relay.watching = self._report if is_watched else Observer()
        process = psutil.Process()
        began, used = time.perf_counter(), sum(process.cpu_times()[:2])
        for _ in range(self._plan.workloads):
            until = self._trained + self._plan.batches
            self._trained = train_workload(self._run, self._trained, until)
        turn = Turn(time.perf_counter() - began, sum(process.cpu_times()[:2]) - used)
        if is_watched:
            self._chatty.unlink()
            time.sleep(self._plan.pause_seconds)  # its last update, and the last lines of the log
        return turn


def measure(world_size: int, plan: Plan, folder: Path) -> list[Pair]:
    """Train in turns; the first pair warms up and is not counted."""
    from prefect import flow  # Prefect reads its settings when it is imported

    from trial_core.checkpoint.resume_point import ResumePoint
    from trial_core.checkpoint.store import CheckpointStore
    from trialflow.flows.train import launch_slots
    from trialflow.tasks.build import build_loaders, build_trial
    from trialflow.tasks.report import Report
    from trialflow.tasks.run import TrialRun

    name = case_name(world_size)
    trial, run_dir, chatty = f"report-{name}", folder / name, folder / f"{name}-chatty"
    run_dir.mkdir()
    config = _experiment(world_size, plan.batches_in_all, chatty, folder)
    store = CheckpointStore(config.checkpoint_storage.url)

    @flow(name="report-in-turns")
    def turns() -> list[Pair]:
        with Report(config, trial, run_dir, Observer(), store) as report:
            run = TrialRun(config, trial, run_dir, store, relay := Relay())
            with launch_slots(run) as run.slots:
                build_trial(run)
                build_loaders(run, ResumePoint())
                report.run_started(trial, plan.batches_in_all, 0, run.batch_samples)
                in_turns = Turns(run, relay, report, chatty, plan)
                in_turns.pair(bare_first=True)
                # Who goes first alternates: a drift of the machine's speed cancels as well.
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
    """What `pairs` come to, printed as well.

    Args:
        batches: in a turn.
    """
    ratio = Estimate.of([pair.watched.seconds / pair.bare.seconds for pair in pairs])
    seconds, used = attrgetter("seconds"), attrgetter("driver_seconds")
    batch_ms = Estimate.of([seconds(pair.bare) / batches * 1e3 for pair in pairs])
    driver = [(used(pair.watched) - used(pair.bare)) / seconds(pair.bare) for pair in pairs]
    share = Estimate.of([100 * each for each in driver])
    print(
        f"{case}: batch {batch_ms.shown(1)} ms; watched, {ratio.shown(4)} times that; "
        f"the driver's processor busier by {share.shown(2)} % of one core",
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
    parser.add_argument("--pairs", type=int, default=20, help="of turns, in each case")
    parser.add_argument("--workloads", type=int, default=5, help="in a turn")
    parser.add_argument("--batches", type=int, default=20, help="in a workload")
    parser.add_argument("--pause", type=float, default=PAUSE_SECONDS, help="between turns, in s")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    arguments = parser.parse_args()
    plan = Plan(arguments.pairs, arguments.workloads, arguments.batches, arguments.pause)
    figures: dict[str, float] = {}
    with temporary_homes() as folder:
        from trialflow.flows.server.embedded import prefect_api

        with prefect_api():
            for world_size in arguments.ranks:
                pairs = measure(world_size, plan, folder)
                batches = plan.workloads * plan.batches
                figures |= figures_of(pairs, batches, case_name(world_size))
    targets = {f"ratio_{case_name(ranks)}": TARGET_RATIO for ranks in arguments.ranks}
    conclude(figures, targets)


if __name__ == "__main__":
    main()
