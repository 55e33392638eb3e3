"""Measures the cost of the live report and of log forwarding, for batches of 50 ms.

The same ranks train in alternating turns of the flow's tasks, on a real Prefect server. In a
reported turn a `Report` is updated, and every batch prints a line that reaches Prefect. A bare turn
has neither report nor output. A turn is as long as an update period, so each reported turn contains
updates of the artifact. Between turns the report finishes, untimed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.figures import conclude
from benchmarks.ranks import case_name
from benchmarks.turns import Pair, Plan, Relay, Turns, figures_of, paced_experiment
from benchmarks.workload import temporary_homes
from trial_core.observe.events.observers import Observer

TARGET_RATIO = 1.01
# Longer than the report waits between two updates.
PAUSE_SECONDS = 6.0


def measure(world_size: int, plan: Plan, pause_seconds: float, folder: Path) -> list[Pair]:
    """Train all pairs of turns.

    Args:
        pause_seconds: after a reported turn.
    """
    from prefect import flow  # Prefect reads its settings when it is imported
    from prefect.logging import get_run_logger

    from trial_core.checkpoint.resume_point import ResumePoint
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.driver.drive import launch_slots
    from trial_core.driver.placement import ThisMachine
    from trial_core.driver.run import Launch, Run
    from trial_core.driver.stages.build import build_loaders, build_trial
    from trial_core.driver.stages.train_workload import train_workload
    from trial_core.observe.report.live_report import Report
    from trial_core.processes.slots.fork_server import ForkServer
    from trialflow.tasks.artifact import ReportArtifact
    from trialflow.tasks.client_retries import NO_ANSWER
    from trialflow.tasks.stages import as_prefect_task

    name = case_name(world_size)
    trial, run_dir, chatty = f"report-{name}", folder / name, folder / f"{name}-chatty"
    run_dir.mkdir()
    config = paced_experiment(world_size, plan, chatty, folder)
    store = CheckpointStore(config.checkpoint_storage.url)

    @flow(name="report-in-turns")
    def turns() -> list[Pair]:
        report = Report(
            config, trial, run_dir, store,
            logger=get_run_logger(), publish=ReportArtifact(trial).write,
            publish_errors=NO_ANSWER,
        )  # fmt: skip

        @contextmanager
        def reported() -> Iterator[Observer]:
            chatty.touch()
            yield report
            chatty.unlink()
            time.sleep(pause_seconds)  # for the last update and the last log lines

        with report:
            relay = Relay()
            launch = Launch(
                Run(config, trial, run_dir, store, observer=relay, execute=as_prefect_task)
            )
            with (
                ForkServer() as fork_server,
                launch_slots(launch, ThisMachine(fork_server)) as launch.slots,
            ):
                build_trial(launch)
                build_loaders(launch, ResumePoint())
                report.run_started(trial, plan.total_batches, 0, launch.answers.batch_samples)
                pairs = Turns(launch, relay, reported, train_workload, plan).measure()
            report.run_ended("completed")
        return pairs

    return turns()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.report", description=__doc__)
    Plan.add_arguments(parser, pairs=20)
    parser.add_argument("--pause", type=float, default=PAUSE_SECONDS, help="seconds between turns")
    arguments = parser.parse_args()
    plan = Plan.of(arguments)
    figures: dict[str, float] = {}
    with temporary_homes() as folder:
        from trialflow.flows.server.embedded_server import prefect_api

        with prefect_api():
            for world_size in arguments.ranks:
                pairs = measure(world_size, plan, arguments.pause, folder)
                figures |= figures_of(pairs, plan, world_size, "the report")
    targets = {f"ratio_{case_name(ranks)}": TARGET_RATIO for ranks in arguments.ranks}
    conclude(figures, targets)


if __name__ == "__main__":
    main()
