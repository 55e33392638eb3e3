"""Measures whether the driver's memory stays constant over 10,000 workloads.

The real flow's schedule, tasks and report drive a fake slot group that answers at once. The Prefect
server is another process: embedded, with a temporary database, or the one at PREFECT_API_URL.
Every workload reports 12 metrics; periodic validations and checkpoints are stored and pruned as
usual. The measured process is this one.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import time
from collections import Counter
from pathlib import Path
from typing import Any, TypeVar

import psutil

from benchmarks.figures import conclude
from benchmarks.ranks import experiment
from benchmarks.workload import temporary_homes
from trial_core.checkpoint import layout
from trial_core.checkpoint.layout import StoredPath
from trial_core.checkpoint.manifest import FileEntry, Topology
from trial_core.checkpoint.store import CheckpointStore
from trial_core.messages import (
    AnyRequest,
    BuildLoadersAndRestore,
    BuildTrial,
    Done,
    FinishRunFiles,
    HookDone,
    MetricsNamed,
    NameMetrics,
    PersistCheckpoint,
    Persisted,
    ReadyToTrain,
    Result,
    RunFilesStored,
    RunHook,
    RunValidation,
    SaveCheckpoint,
    Saved,
    TrainBatches,
    Trained,
    TrialBuilt,
    Validated,
)
from trial_core.schedule.units import EpochLength

# Permanent allocations of the first workloads (caches, pools, compiled models) are not a leak.
SETTLED_AT = 1000
TARGET_GROWTH_MIB = 10.0
METRICS = 12
# Without this pause workloads would outrun the server, and the backlog would look like a leak.
WORKLOAD_SECONDS = 0.02
DATA = b"x" * 1000

R = TypeVar("R", bound=Result)


class InstantSlots:
    """A fake slot group whose ranks answer at once. It records this process's memory.

    Args:
        every: workloads between two measurements.
        counts_objects: True to record the number of objects of each type.
    """

    def __init__(
        self, store: CheckpointStore, world_size: int, every: int, counts_objects: bool
    ) -> None:
        self.world_size = world_size
        self.nodes = ["here"] * world_size
        self.mib_at: dict[int, float] = {}
        self.objects_at: dict[int, Counter[str]] = {}
        self._store = store
        self._every = every
        self._counts_objects = counts_objects
        self._workloads = 0

    def request(self, request: AnyRequest, expect: type[R], **patience: Any) -> list[R]:
        """Answer a request at once, and record the memory."""
        answers = [self._answer(request, rank) for rank in range(self.world_size)]
        return [answer for answer in answers if isinstance(answer, expect)]

    def stop(self) -> None:
        """Do nothing, in place of `SlotGroup.stop`."""

    def _answer(self, request: AnyRequest, rank: int) -> Result:
        if isinstance(request, BuildTrial):
            topology = Topology(
                world_size=self.world_size, data_parallel_size=self.world_size, batch_samples=16
            )
            return TrialBuilt(hooks=[], topology=topology, batch_samples=16, versions={})
        if isinstance(request, BuildLoadersAndRestore):
            return ReadyToTrain(epoch=EpochLength(100 * self.world_size, self.world_size))
        if isinstance(request, TrainBatches):
            if rank == 0:
                self._measure()
                time.sleep(WORKLOAD_SECONDS)
            metrics = {f"metric_{i}": request.until / (i + 1) for i in range(METRICS)}
            return Trained(
                batches_trained=request.until, metrics={"loss": 1.0, **metrics},
                seconds=0.001, stop_requested=False,
            )  # fmt: skip
        if isinstance(request, NameMetrics):
            return MetricsNamed(names=["seconds"])
        if isinstance(request, RunValidation):
            return Validated(metrics={"seconds": 1.0}, seconds=0.001, stop_requested=False)
        if isinstance(request, SaveCheckpoint):
            return Saved(staging="", seconds=0.001)
        if isinstance(request, PersistCheckpoint):
            return Persisted(files=[self._stored(request.uuid, rank)], seconds=0.001)
        if isinstance(request, RunHook):
            return HookDone(stop_requested=False)
        return RunFilesStored(files=0) if isinstance(request, FinishRunFiles) else Done()

    def _stored(self, uuid: str, rank: int) -> FileEntry:
        path = f"shard-{rank}"
        self._store.storage.write(layout.file_key(uuid, path), DATA)
        digest = f"sha256:{hashlib.sha256(DATA).hexdigest()}"
        return FileEntry(path=StoredPath(path), size_bytes=len(DATA), digest=digest, rank=rank)

    def _measure(self) -> None:
        self._workloads += 1
        if self._workloads % self._every == 0:
            gc.collect()
            self.mib_at[self._workloads] = psutil.Process().memory_info().rss / 2**20
            if self._counts_objects:
                self.objects_at[self._workloads] = Counter(
                    type(each).__qualname__ for each in gc.get_objects()
                )
            print(f"{self._workloads}: {self.mib_at[self._workloads]:.1f} MiB", flush=True)


def measure(workloads: int, every: int, folder: Path, counts_objects: bool = False) -> InstantSlots:
    """Run that many workloads through the flow's tasks. Return the fake with its measurements."""
    from prefect import flow  # Prefect reads its settings when it is imported
    from prefect.logging import get_run_logger

    from trial_core.driver.loop import Loop
    from trial_core.driver.run import Launch, Run
    from trial_core.driver.stages.build import build_trial
    from trial_core.driver.uploads import Uploads
    from trial_core.observe.report.live_report import Report
    from trialflow.tasks.artifact import ReportArtifact
    from trialflow.tasks.client_retries import NO_ANSWER
    from trialflow.tasks.stages import as_prefect_task

    config = experiment(
        "LoopTrial",
        4,
        "",
        checkpoint_storage={"url": f"file://{folder}/checkpoints", "save_trial_latest": 2},
        searcher={"name": "single", "metric": "seconds", "max_length": {"batches": workloads}},
        scheduling_unit=1,
        checkpoint_policy="none",
        min_validation_period={"batches": 50},
        min_checkpoint_period={"batches": 100},
    )
    store = CheckpointStore(config.checkpoint_storage.url)
    slots = InstantSlots(store, 4, every, counts_objects)
    run_dir = folder / "run"
    run_dir.mkdir()

    @flow(name="driver-memory")
    def drive() -> None:
        report = Report(
            config, "memory-00000000", run_dir, store,
            logger=get_run_logger(), publish=ReportArtifact("memory-00000000").write,
            publish_errors=NO_ANSWER,
        )  # fmt: skip
        with report:
            run = Run(
                config, "memory-00000000", run_dir, store,
                observer=report, execute=as_prefect_task,
            )  # fmt: skip
            launch = Launch(run)
            launch.slots = slots  # type: ignore[assignment]  # it has the methods that stages use
            with Uploads(launch) as uploads:
                build_trial(launch)
                Loop(launch, uploads).run()
            report.run_ended("completed")

    drive()
    return slots


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.driver_memory", description=__doc__)
    parser.add_argument("--workloads", type=int, default=10_000)
    parser.add_argument(
        "--every", type=int, default=1000, help="workloads between two measurements"
    )
    parser.add_argument(
        "--objects", action="store_true", help="also print which types have more objects"
    )
    arguments = parser.parse_args()
    with temporary_homes() as folder:
        from trialflow.flows.server.embedded_server import prefect_api

        with prefect_api():
            seen = measure(arguments.workloads, arguments.every, folder, arguments.objects)
    measured = sorted(seen.mib_at)
    settled = next((at for at in measured if at >= SETTLED_AT), measured[0])
    growth = seen.mib_at[measured[-1]] - seen.mib_at[settled]
    if arguments.objects:
        more = seen.objects_at[measured[-1]] - seen.objects_at[settled]
        for name, count in more.most_common(15):
            print(f"{count:8d} more of {name}")
    conclude(
        {
            f"rss_mib_at_{settled}": seen.mib_at[settled],
            f"rss_mib_at_{measured[-1]}": seen.mib_at[measured[-1]],
            "growth_mib": growth,
        },
        {"growth_mib": TARGET_GROWTH_MIB},
    )


if __name__ == "__main__":
    main()
