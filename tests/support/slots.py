"""Warm ranks for tests, and a driver for them without Prefect.

Ranks need seconds to start, because they import torch. So tests share groups of 1, 2 and 4 ranks,
and each test builds its own trial on them. A test that kills ranks starts its own group.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
import pytest

from trial_core.checkpoint.manifest import FileEntry, Topology
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.messages import (
    AnyRequest,
    BuildLoadersAndRestore,
    BuildTrial,
    Done,
    FetchCheckpoint,
    Fetched,
    HookDone,
    MetricsNamed,
    NameMetrics,
    PersistCheckpoint,
    Persisted,
    ReadyToTrain,
    ReleaseStaging,
    Result,
    RunHook,
    RunValidation,
    SaveCheckpoint,
    Saved,
    TrainBatches,
    Trained,
    TrialBuilt,
    Validated,
)
from trial_core.processes.machine.accelerators import count_accelerators
from trial_core.processes.slots.fork_server import ForkServer, ServerProcess
from trial_core.processes.slots.launcher import Launcher, launch_locally
from trial_core.processes.slots.rank_main import TRIAL_MODULES
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.processes.slots.stacks import STACK_SIGNAL, current_stacks
from trial_core.schedule.sequencer import (
    Checkpoint,
    Finish,
    Progress,
    Train,
    Validate,
    next_workload,
    searcher_metric,
)
from trial_core.schedule.units import EpochLength

ONE_TWO_FOUR = [
    pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long),
]  # fmt: skip
"""World sizes: two ranks by default, one and four in the long tests."""

TOY = Path(__file__).with_name("toy")
HANG_SECONDS = 200
"""Less than the time that pytest gives a test."""

R = TypeVar("R", bound=Result)


def toy_config(folder: Path, batches: int = 10, **changes: Any) -> ExperimentConfig:
    """An experiment that trains the toy trial and writes only below `folder`.

    Args:
        changes: other fields of the experiment.
    """
    fields: dict[str, Any] = {
        "name": "toy",
        "entrypoint": "toy_trial:ToyTrial",
        "code": str(TOY),
        "resources": {"slots_per_trial": 2},
        "searcher": {
            "name": "single",
            "metric": "loss",
            "smaller_is_better": True,
            "max_length": {"batches": batches},
        },
        "checkpoint_storage": f"file://{folder}/checkpoints",
        "max_restarts": 0,
        "tensorboard_logging": False,  # importing TensorBoard takes seconds
    }
    return ExperimentConfig(**{**fields, **changes})


@dataclass
class Driven:
    """The progress, stages, metrics and checkpoints of a run, and the length of its epochs.

    `metric_names`: those found before training. `warnings`: about the data, from rank 0.
    """

    progress: Progress
    topology: Topology | None = None
    epoch: EpochLength | None = None
    metric_names: list[str] | None = None
    warnings: list[str] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    training: list[dict[str, Any]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    files: dict[str, list[FileEntry]] = field(default_factory=dict)


def build(slots: SlotGroup, config: ExperimentConfig, run_dir: Path) -> TrialBuilt:
    """Build the trial of `config` on warm ranks. The result of rank 0."""
    return build_on_ranks(slots, config, run_dir)[0]


def build_on_ranks(slots: SlotGroup, config: ExperimentConfig, run_dir: Path) -> list[TrialBuilt]:
    """Build the trial of `config` on warm ranks. The result of each rank."""
    return slots.request(
        BuildTrial(
            trial="toy-0000beef",
            experiment=config.model_dump(mode="json"),
            run_dir=str(run_dir),
            storage=CheckpointStore(config.checkpoint_storage.url).spec,
        ),
        TrialBuilt,
    )


def drive(
    slots: SlotGroup,
    config: ExperimentConfig,
    run_dir: Path,
    *,
    resume: Driven | None = None,
    persist: bool = False,
    names_metrics: bool = False,
    compares: bool = True,
) -> Driven:
    """Run a whole schedule with all hooks like the flow, but without Prefect and manifests.

    An upload ends before training continues, so the order of hooks is fixed.

    Args:
        resume: an earlier run; continue from its last checkpoint, which must be persisted.
        persist: whether to upload checkpoints.
        names_metrics: whether to look for the names of the validation metrics before training.
        compares: whether settings are compared with the checkpoint's.
    """
    ranks = build_on_ranks(slots, config, run_dir)
    driver = _Driver(slots, config, {hook for rank in ranks for hook in rank.hooks}, persist)
    driver.run.topology = ranks[0].topology
    driver.run.progress = resume.progress.stopping(False) if resume else Progress()
    schedule, epoch = config.schedule(), driver.start(resume, compares)
    if names_metrics:
        driver.run.metric_names = slots.request(NameMetrics(), MetricsNamed)[0].names
    while not isinstance(work := next_workload(driver.run.progress, schedule, epoch), Finish):
        if isinstance(work, Train):
            driver.train(work.until)
        elif isinstance(work, Validate):
            driver.validate()
        elif isinstance(work, Checkpoint):
            driver.save()
        driver.run.progress = driver.run.progress.stopping(driver.stop_requested)
    driver.hook("on_trial_shutdown")
    return driver.run


class OwnSlots(SlotGroup):
    """A group with a fork server and a folder for logs of its own, unless they are given."""

    def __init__(
        self,
        world_size: int,
        *,
        log_dir: Path | None = None,
        launcher: Launcher | None = None,
        **more: Any,
    ) -> None:
        self._server = ForkServer()
        self._logs = tempfile.TemporaryDirectory(prefix="trialflow-logs-")
        launcher = launcher or partial(launch_locally, self._server)
        log_dir = log_dir or Path(self._logs.name)
        super().__init__(world_size, log_dir=log_dir, launcher=launcher, **more)

    def kill(self) -> None:
        """As a group's; then its fork server ends."""
        super().kill()
        self._server.close()


class WarmSlots(OwnSlots):
    """A group of which a request that takes minutes fails, with the stacks of all its processes.

    Else each later test of the group would wait until its own time is over, and none says why.

    Attributes:
        has_ended: whether a request has failed, so that the ranks are gone.
    """

    has_ended = False

    def submit(self, request: AnyRequest) -> Future[list[Result]]:
        """As a group's, with the limit."""
        return self._limited(super().submit(request), request.title)

    def request(
        self, request: AnyRequest, expect: type[R], stall_seconds: float | None = None
    ) -> list[R]:
        """As a group's, with the limit."""
        if stall_seconds is not None:
            return super().request(request, expect, stall_seconds)
        results = self.submit(request).result()
        assert all(isinstance(result, expect) for result in results)
        return cast(list[R], results)

    def _limited(self, future: Future[list[Result]], what: str) -> Future[list[Result]]:
        threading.Thread(target=self._watch, args=(future, what), daemon=True).start()
        future.add_done_callback(self._note_failure)
        return future

    def _watch(self, future: Future[list[Result]], what: str) -> None:
        """Ends a hung request; compiling DeepSpeed's operators takes minutes on a busy machine."""
        while not wait([future], HANG_SECONDS).done:
            if not compiles():
                self._end_hung(what)
                return

    def _note_failure(self, done: Future[list[Result]]) -> None:
        self.has_ended = self.has_ended or done.exception() is not None

    def _end_hung(self, what: str) -> None:
        ranks = stacks_of(self.pids)
        seen = f"{what} took over {HANG_SECONDS} s\n{ranks}\nthe test: {current_stacks()}"
        # Also here: a rank whose loader worker is killed before itself may fail first.
        print(seen, file=sys.__stderr__, flush=True)
        self.abort(seen)


def compiles() -> bool:
    """Whether a C++ compiler runs on this machine."""
    return any(process.info["name"] == "cc1plus" for process in psutil.process_iter(["name"]))


def stacks_of(pids: Sequence[int]) -> str:
    """The end of the log of each of these ranks, after it and its forked children wrote stacks."""
    logs, said = {}, []
    for pid in pids:
        with suppress(psutil.Error, OSError):
            rank = psutil.Process(pid)
            logs[pid] = Path(f"/proc/{pid}/fd/2")
            for process in [rank, *rank.children(recursive=True)]:
                status = Path(f"/proc/{process.pid}/status").read_text()
                said.append(f"{process.pid} of {process.ppid()}: {process.status()}")
                caught = int(status.partition("SigCgt:")[2].split()[0], 16)
                if caught >> (STACK_SIGNAL - 1) & 1:
                    os.kill(process.pid, STACK_SIGNAL)
    time.sleep(3)  # each writes within a moment, if it can
    for pid, log in logs.items():
        with suppress(OSError):
            said.append(f"rank process {pid}: " + log.read_text(errors="replace")[-12000:])
    return "\n".join(said)


class _Driver:
    """Runs the stages of a run and records their results."""

    def __init__(
        self, slots: SlotGroup, config: ExperimentConfig, hooks: Iterable[str], persist: bool
    ) -> None:
        self.run = Driven(progress=Progress())
        self.stop_requested = False
        self._slots = slots
        self._config = config
        self._hooks = frozenset(hooks)
        self._persist = persist

    def start(self, resume: Driven | None, compares: bool) -> EpochLength | None:
        """Fetch the checkpoint of `resume` and build the loaders; the length of an epoch."""
        begin, uuid_to_restore = self.run.progress.batches_trained, None
        if resume is not None:
            uuid_to_restore = resume.checkpoints[-1]
            request = FetchCheckpoint(
                uuid=uuid_to_restore, files=resume.files[uuid_to_restore], saved_by=resume.topology
            )
            assert self._slots.request(request, Fetched) == [Fetched()] * self._slots.world_size
        self.hook("on_trial_startup", first_batch_idx=begin, checkpoint_uuid=uuid_to_restore)
        saved_by = resume.topology if resume else None
        loaders = BuildLoadersAndRestore(
            batches_trained=begin,
            checkpoint=uuid_to_restore,
            saved_by=saved_by,
            epoch=resume.epoch if resume else None,
            compares=compares,
        )
        ready = self._slots.request(loaders, ReadyToTrain)[0]
        self.run.warnings, self.run.epoch = ready.warnings, ready.epoch
        self.hook("on_training_start")
        return ready.epoch

    def train(self, until: int) -> None:
        trained = self.run.progress.batches_trained
        results = self._slots.request(TrainBatches(until=until), Trained)
        self.run.training.append(results[0].metrics)
        reached = {result.batches_trained for result in results}
        assert len(reached) == 1, "ranks ended after different batches"
        self.run.stages.append(f"train [{trained}→{until}]")
        self.run.progress = self.run.progress.after_training(reached.pop())
        self._note_stop_requests(results)
        self.stop_requested |= self.run.progress.batches_trained < until  # a stop was requested
        self.hook("on_training_workload_end")

    def validate(self) -> None:
        results = self._slots.request(RunValidation(), Validated)
        self._note_stop_requests(results)
        if results[0].is_broken_off:
            self.stop_requested = True
            return
        self.run.stages.append(f"validate @{self.run.progress.batches_trained}")
        done = self.hook("on_validation_end")
        metrics = done[0].metrics if done else results[0].metrics
        assert metrics is not None
        self.run.validation.append(metrics)
        metric = searcher_metric(metrics, self._config.searcher.metric)
        smaller_is_better = self._config.searcher.smaller_is_better
        self.run.progress = self.run.progress.after_validation(metric, smaller_is_better)

    def save(self) -> None:
        checkpoint = str(uuid.uuid4())
        self._slots.request(SaveCheckpoint(uuid=checkpoint), Saved)
        self.hook("on_checkpoint_write_end")
        self.hook("on_checkpoint_end")
        if self._persist:
            persisted = self._slots.request(PersistCheckpoint(uuid=checkpoint), Persisted)
            self.run.files[checkpoint] = [entry for rank in persisted for entry in rank.files]
            self._slots.request(ReleaseStaging(uuid=checkpoint), Done)
            self.hook("on_checkpoint_upload_end", uuid=checkpoint)
        self.run.checkpoints.append(checkpoint)
        self.run.stages.append(f"checkpoint @{self.run.progress.batches_trained}")
        self.run.progress = self.run.progress.after_checkpoint()

    def hook(self, name: str, **arguments: Any) -> list[HookDone]:
        """Run a hook on every rank if a callback overrides it; the results."""
        if name not in self._hooks:
            return []
        results = self._slots.request(RunHook(hook=name, arguments=arguments), HookDone)
        self._note_stop_requests(results)
        return results

    def _note_stop_requests(self, results: Sequence[Trained | Validated | HookDone]) -> None:
        self.stop_requested |= any(result.stop_requested for result in results)


def lines(folder: Path, name: str, rank: int) -> list[Any]:
    """The records that a rank of the toy trial has written."""
    path = folder / f"{name}-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class SharedForkServer(ForkServer):
    """A fork server for groups of all sizes at once: its process imports torch and DeepSpeed once.

    It has the variables of its first group, with one thread; later ones reach the ranks alone.
    """

    def __init__(self) -> None:
        super().__init__(TRIAL_MODULES, late=("",))
        self._known: dict[str, str] = {}

    def prepare(
        self, environment: Mapping[str, str], working_dir: Path, log: Path
    ) -> ServerProcess:
        """Part of `ForkServer`."""
        self._known = {**self._known, **environment, "OMP_NUM_THREADS": "1"}
        return super().prepare(self._known, working_dir, log)


@pytest.fixture(scope="session")
def warm_server() -> Iterator[ForkServer]:
    """Forks ranks that have imported what a trial needs; for tests that end their own group."""
    with SharedForkServer() as server:
        yield server


def warm_group(server: ForkServer, world_size: int, **more: Any) -> OwnSlots:
    """A group that its test ends, of ranks of the fixture `warm_server`."""
    return OwnSlots(world_size, working_dir=TOY, launcher=partial(launch_locally, server), **more)


@pytest.fixture(scope="session")
def warm_slots(warm_server: ForkServer) -> Iterator[Callable[[int], SlotGroup]]:
    """Warm groups by number of ranks, each started on first use, and again after a failure.

    On a machine with fewer GPUs than ranks, where ranks use GPUs, the test is skipped.
    """
    groups: dict[int, WarmSlots] = {}
    gpus = count_accelerators()

    def group(world_size: int) -> SlotGroup:
        if 0 < gpus < world_size:
            pytest.skip(f"needs {world_size} GPUs")
        if world_size in groups and groups[world_size].has_ended:
            groups.pop(world_size).close()
        if world_size not in groups:
            groups[world_size] = WarmSlots(
                world_size, working_dir=TOY, launcher=partial(launch_locally, warm_server)
            )
        return groups[world_size]

    yield group
    for started in groups.values():
        started.close()
