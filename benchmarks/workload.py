"""What a train-workload costs besides training: flow, task, channel and controller together.

A trial that costs next to nothing runs through the flow `train`, on a real Prefect server, with
one batch a workload. From the start of one train-workload to the start of the next is what a
workload takes; what the trial itself reports to have spent in its batch is taken off. What is left
is everything of ours and Prefect's: the task run's states and logs, the live report, the request.

The server is the embedded one with a database of its own, or PREFECT_API_URL's.
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
from trial_core.run.observer import MetricsKind, Observer, observing

TARGET_MS = 100.0


class Stopwatch(Observer):
    """Notes when each train-workload starts, and what its batch took inside the trial."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.in_trial: list[float] = []

    def stage_started(self, stage: str, detail: str) -> None:
        if stage == "train-workload":
            self.starts.append(time.perf_counter())

    def metrics_reported(self, kind: MetricsKind, batches: int, metrics: Mapping[str, Any]) -> None:
        if kind == "training":
            self.in_trial.append(float(metrics["seconds"]))

    def costs(self) -> list[float]:
        """Seconds that each workload, but for the last, cost besides the trial."""
        periods = [end - begin for begin, end in pairwise(self.starts)]
        return [period - own for period, own in zip(periods, self.in_trial, strict=False)]


@contextmanager
def temporary_homes() -> Iterator[Path]:
    """Prefect and trialflow keep all that they write in a folder that goes with the block."""
    with tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True) as folder:
        os.environ["PREFECT_HOME"] = f"{folder}/prefect"
        os.environ["TRIALFLOW_HOME"] = f"{folder}/runs"
        yield Path(folder)


def measure(world_size: int, workloads: int, folder: Path) -> list[float]:
    """Run the flow with that many train-workloads; what each cost, in seconds."""
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
    return stopwatch.costs()[1:]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.workload", description=__doc__)
    parser.add_argument("--workloads", type=int, default=200, help="in each case")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    with temporary_homes() as folder:
        from trialflow.flows.server.embedded import prefect_api

        with prefect_api():
            for world_size in arguments.ranks:
                costs = [s * 1e3 for s in measure(world_size, arguments.workloads, folder)]
                case = case_name(world_size)
                figures[f"mean_ms_{case}"] = sum(costs) / len(costs)
                figures[f"median_ms_{case}"] = percentile(costs, 50)
                figures[f"p95_ms_{case}"] = percentile(costs, 95)
                print(
                    f"{case}: mean {figures[f'mean_ms_{case}']:.1f} ms, "
                    f"median {figures[f'median_ms_{case}']:.1f}, "
                    f"p95 {figures[f'p95_ms_{case}']:.1f}",
                    flush=True,
                )
    # The mean: what is done only now and then, such as writing the report, belongs to the cost.
    conclude(figures, {name: TARGET_MS for name in figures if name.startswith("mean")})


if __name__ == "__main__":
    main()
