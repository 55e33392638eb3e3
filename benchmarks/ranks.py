"""Real ranks that train a benchmark's trial, driven by requests without Prefect."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.messages import BuildLoadersAndRestore, BuildTrial, ReadyToTrain, TrialBuilt
from trial_core.processes.machine.accelerators import resolve_slot_count
from trial_core.processes.slots.fork_server import ForkServer
from trial_core.processes.slots.launcher import launch_locally
from trial_core.processes.slots.slot_group import SlotGroup

ROOT = Path(__file__).parents[1]
# One core for each rank, so that figures of different machines are comparable.
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def experiment(
    trial_class: str, world_size: int, storage: str | dict[str, Any], **fields: Any
) -> ExperimentConfig:
    """Return the experiment of a class in `benchmarks.trial`, or of ``module:Class``.

    `fields` replace defaults.
    """
    return ExperimentConfig(
        **{
            "name": "benchmark",
            "entrypoint": trial_class if ":" in trial_class else f"benchmarks.trial:{trial_class}",
            "code": str(ROOT),
            "resources": {"slots_per_trial": world_size},
            "searcher": {
                "name": "single",
                "metric": "seconds",
                "max_length": {"batches": 1},
            },
            "checkpoint_storage": storage,
            "environment": {"environment_variables": ENVIRONMENT},
            "max_restarts": 0,
            **fields,
        }
    )


def case_name(world_size: int) -> str:
    """Return ``1_rank`` or ``2_ranks``, a part of a figure's name."""
    return f"{world_size}_rank{'s' if world_size > 1 else ''}"


@contextmanager
def launched(world_size: int, fork_server: ForkServer | None = None) -> Iterator[SlotGroup]:
    """Launch a slot group that lives as long as the block.

    Args:
        fork_server: starts its ranks; by default a new one for this group.
    """
    with (
        tempfile.TemporaryDirectory(prefix="benchmark-") as folder,
        nullcontext(fork_server) if fork_server else ForkServer() as server,
        SlotGroup(
            resolve_slot_count(world_size),
            working_dir=ROOT,
            log_dir=Path(folder),
            environment=ENVIRONMENT,
            launcher=partial(launch_locally, server),
        ) as slots,
    ):
        yield slots


def rank_processes() -> list[psutil.Process]:
    """Return the ranks that this process, or a process below it, has started."""
    below = psutil.Process().children(recursive=True)
    return [process for process in below if "trialflow: rank" in _command(process)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # the process has just ended
        return ""


def processor_seconds(pids: list[int]) -> float:
    """Return the processor time of all threads of the processes so far."""
    return sum(
        int(path.read_text().split()[0]) / 1e9
        for pid in pids
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )


def with_helpers(pid: int) -> list[psutil.Process]:
    """Return a process, and the processes that it has started directly or through others."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def processor_seconds_with_helpers(pids: list[int]) -> float:
    """Return the processor time of processes and their helpers so far, with ended helpers."""
    return float(
        sum(sum(each.cpu_times()[:4]) for pid in pids for each in with_helpers(pid))
    )  # [:4]: with ended children


@contextmanager
def built(
    slots: SlotGroup,
    trial_class: str,
    hyperparameters: dict[str, Any],
    store: CheckpointStore | None = None,
    **fields: Any,
) -> Iterator[None]:
    """Build a trial and its loaders, in place of an earlier trial.

    Args:
        trial_class: see `experiment`.
        store: stores its checkpoints; by default in a temporary folder.
        fields: see `experiment`.
    """
    # There as long as the ranks: the next build closes the event file of this trial.
    run_dir = tempfile.mkdtemp(prefix="run-", dir=slots.log_dir)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        config = experiment(
            trial_class,
            slots.world_size,
            f"file://{folder}/checkpoints",
            hyperparameters=hyperparameters,
            **fields,
        )
        slots.request(
            BuildTrial(
                trial="benchmark-00000000",
                experiment=config.model_dump(mode="json"),
                run_dir=run_dir,
                storage=(store or CheckpointStore(config.checkpoint_storage.url)).spec,
            ),
            TrialBuilt,
        )
        slots.request(BuildLoadersAndRestore(batches_trained=0, checkpoint=None), ReadyToTrain)
        yield
