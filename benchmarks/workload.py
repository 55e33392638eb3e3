"""Measures the overhead of a train-workload: flow, task, channel and controller together.

A trial with negligible cost runs in the flow `train`, on a real Prefect server, with one batch in
each workload. The overhead is the time from the start of one train-workload to the start of the
next, without the time that the trial reports for its batch: the task run's states and logs, the
live report, the request.

The server is the embedded one with a new database, or that of PREFECT_API_URL.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.figures import conclude, percentile
from benchmarks.ranks import case_name, experiment
from trial_core.messages import MetricsKind
from trial_core.observe.events.observers import Observer, observing

TARGET_MS = 100.0


class Stopwatch(Observer):
    """Records the start of each train-workload, and its batch's time inside the trial."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.in_trial: list[float] = []

    def stage_started(self, stage: str, detail: str) -> None:
        if stage == "train-workload":
            self.starts.append(time.perf_counter())

    def metrics_reported(self, kind: MetricsKind, batches: int, metrics: Mapping[str, Any]) -> None:
        if kind == "training":
            self.in_trial.append(float(metrics["seconds"]))

    def overheads(self) -> list[float]:
        """Return the overhead of each workload but the last, in seconds."""
        periods = [end - begin for begin, end in pairwise(self.starts)]
        return [period - batch for period, batch in zip(periods, self.in_trial, strict=False)]


@contextmanager
def temporary_homes() -> Iterator[Path]:
    """Make Prefect and trialflow write to a folder that is deleted after the block."""
    with tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True) as folder:
        os.environ["PREFECT_HOME"] = f"{folder}/prefect"
        os.environ["TRIALFLOW_HOME"] = f"{folder}/runs"
        yield Path(folder)


def measure(world_size: int, workloads: int, folder: Path) -> list[float]:
    """Run the flow with that many train-workloads. Return the overhead of each, in seconds."""
    from trialflow.flows.train import train  # Prefect reads its settings when it is imported

    config = experiment(
        "TimedTrial",
        world_size,
        f"file://{folder}/checkpoints",
        hyperparameters={"model": "tiny", "bare_batches": 1},
        # The first workload warms up, the last has no successor.
        searcher={
            "name": "single", "metric": "seconds", "max_length": {"batches": workloads + 2},
        },
        scheduling_unit=1,
        checkpoint_policy="none",
    )  # fmt: skip
    stopwatch = Stopwatch()
    with observing(stopwatch):
        train(config)
    return stopwatch.overheads()[1:]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.workload", description=__doc__)
    parser.add_argument("--workloads", type=int, default=200, help="workloads in each case")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    with temporary_homes() as folder:
        from trialflow.flows.server.embedded_server import prefect_api

        with prefect_api():
            for world_size in arguments.ranks:
                overheads_ms = [s * 1e3 for s in measure(world_size, arguments.workloads, folder)]
                case = case_name(world_size)
                figures[f"mean_ms_{case}"] = sum(overheads_ms) / len(overheads_ms)
                figures[f"median_ms_{case}"] = percentile(overheads_ms, 50)
                figures[f"p95_ms_{case}"] = percentile(overheads_ms, 95)
                print(
                    f"{case}: mean {figures[f'mean_ms_{case}']:.1f} ms, "
                    f"median {figures[f'median_ms_{case}']:.1f}, "
                    f"p95 {figures[f'p95_ms_{case}']:.1f}",
                    flush=True,
                )
    # The mean, because it includes work that not every workload does, such as writing the report.
    conclude(figures, {name: TARGET_MS for name in figures if name.startswith("mean")})


if __name__ == "__main__":
    main()
