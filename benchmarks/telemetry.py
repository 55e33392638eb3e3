"""Measures the cost of telemetry, for batches of 50 ms.

The same ranks train in alternating turns, without Prefect. In one turn the run is reported to
OpenTelemetry: a trace and metrics, which go over HTTP to a receiver in another process. The bare
turn has no observer. Metrics are exported every second; the default is every minute.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.figures import conclude
from benchmarks.otlp_receiver import receiving
from benchmarks.ranks import case_name
from benchmarks.turns import Pair, Plan, Relay, Turns, figures_of, paced_experiment
from benchmarks.workload import temporary_homes
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.driver.drive import launch_slots
from trial_core.driver.placement import ThisMachine
from trial_core.driver.run import Launch, Run
from trial_core.driver.stages.build import build_loaders, build_trial
from trial_core.driver.stages.train_workload import train_workload
from trial_core.observe.events.observers import Observer
from trial_core.observe.ledger.run_clock import RunClock
from trial_core.observe.telemetry.run_telemetry import run_telemetry
from trial_core.processes.slots.fork_server import ForkServer
from trial_core.schedule.ending import Ending
from trial_core.schedule.stop_requests import StopHandler

TARGET_RATIO = 1.002
EXPORT_MILLISECONDS = "1000"
logger = logging.getLogger("benchmarks.telemetry")


def measure(world_size: int, plan: Plan, folder: Path) -> list[Pair]:
    """Train all pairs of turns."""
    name = case_name(world_size)
    trial, run_dir = f"telemetry-{name}", folder / name
    run_dir.mkdir()
    config = paced_experiment(world_size, plan, folder / "never", folder)
    store = CheckpointStore(config.checkpoint_storage.url)
    launch = Launch(Run(config, trial, run_dir, store, observer=(relay := Relay())))
    clock = RunClock()

    @contextmanager
    def exported() -> Iterator[Observer]:
        stopping = StopHandler(1.0)
        with run_telemetry(config, trial, clock, stopping, Ending(stopping), logger) as observer:
            observer.trial_owned(1)
            observer.run_started(trial, plan.total_batches, 0, launch.answers.batch_samples)
            yield observer

    with (
        ForkServer() as fork_server,
        launch_slots(launch, ThisMachine(fork_server)) as launch.slots,
    ):
        build_trial(launch)
        build_loaders(launch, ResumePoint())
        return Turns(launch, relay, exported, train_workload, plan).measure()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.telemetry", description=__doc__)
    Plan.add_arguments(parser, pairs=60)
    arguments = parser.parse_args()
    plan = Plan.of(arguments)
    figures: dict[str, float] = {}
    with temporary_homes() as folder, receiving() as address:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = address
        os.environ["OTEL_METRIC_EXPORT_INTERVAL"] = EXPORT_MILLISECONDS
        for world_size in arguments.ranks:
            pairs = measure(world_size, plan, folder)
            figures |= figures_of(pairs, plan, world_size, "telemetry")
        requests = int(httpx.get(address).text)
    if requests < 2 * (plan.pairs + 1):  # each turn sends traces and metrics at its end
        sys.exit(f"the receiver got {requests} requests only: telemetry was not on")
    targets = {f"ratio_{case_name(ranks)}": TARGET_RATIO for ranks in arguments.ranks}
    conclude({**figures, "requests": requests}, targets)


if __name__ == "__main__":
    main()
