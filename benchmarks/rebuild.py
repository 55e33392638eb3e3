"""Measures what warm ranks keep of earlier trials: 200 trials in a row, in one slot group.

Each trial is built, trains two batches and saves. In one case the ZeRO stages 0 to 3 take turns,
in the other each trial is a pipeline with a stage per rank.
"""

from __future__ import annotations

import argparse
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.figures import conclude
from benchmarks.ranks import case_name, experiment, launched
from trial_core.checkpoint.store import CheckpointStore
from trial_core.messages import (
    BuildLoadersAndRestore,
    BuildTrial,
    Done,
    ReadyToTrain,
    ReleaseStaging,
    SaveCheckpoint,
    Saved,
    TrainBatches,
    Trained,
    TrialBuilt,
)
from trial_core.processes.slots.slot_group import SlotGroup

ZERO_STAGES = 4
CASES: dict[str, Callable[[int], tuple[str, dict[str, Any]]]] = {
    "zero": lambda trial: ("ShardedTrial", {"model": "tiny", "zero_stage": trial % ZERO_STAGES}),
    "pipeline": lambda trial: ("PipelineTrial", {}),
}
"""The class and the hyperparameters of each case's trials, by their index."""
# Permanent allocations of the first trials (caches, pools, imports) are not a leak.
SETTLED_AFTER = 5
MIB = 2.0**20
# Growth from the trials 6 to 9 to the last four, maximum of all ranks.
TARGETS = {"threads": 0.0, "descriptors": 0.0, "address_space_mib": 64.0, "resident_mib": 8.0}


@dataclass(frozen=True)
class Usage:
    """The resources that ranks use; the maximum of all ranks."""

    threads: float
    descriptors: float
    address_space_mib: float
    resident_mib: float

    @classmethod
    def of(cls, pids: list[int]) -> Usage:
        """Return the present usage of the processes."""
        ranks = [psutil.Process(pid) for pid in pids]
        memory = [rank.memory_info() for rank in ranks]
        return cls(
            max(rank.num_threads() for rank in ranks),
            max(rank.num_fds() for rank in ranks),
            max(each.vms for each in memory) / MIB,
            max(each.rss for each in memory) / MIB,
        )

    @classmethod
    def highest(cls, usages: list[Usage]) -> Usage:
        """Return the maximum of each quantity."""
        return cls(*map(max, zip(*map(astuple, usages), strict=True)))


def run_trial(
    slots: SlotGroup, folder: Path, trial_class: str, hyperparameters: dict[str, Any]
) -> None:
    """Build a small trial in place of an earlier one, train two batches and save."""
    config = experiment(
        trial_class,
        slots.world_size,
        f"file://{folder}/checkpoints",
        hyperparameters=hyperparameters,
    )
    build = BuildTrial(
        trial="benchmark-00000000",
        experiment=config.model_dump(mode="json"),
        run_dir=str(folder),
        storage=CheckpointStore(config.checkpoint_storage.url).spec,
    )
    slots.request(build, TrialBuilt)
    slots.request(BuildLoadersAndRestore(batches_trained=0, checkpoint=None), ReadyToTrain)
    slots.request(TrainBatches(until=2), Trained)
    checkpoint = str(uuid.uuid4())
    slots.request(SaveCheckpoint(uuid=checkpoint), Saved)
    slots.request(ReleaseStaging(uuid=checkpoint), Done)


def measure(slots: SlotGroup, case: str, trials: int) -> list[Usage]:
    """Return the usage after each trial of a case."""
    usages: list[Usage] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        for trial in range(trials):
            run_trial(slots, Path(folder), *CASES[case](trial))
            usages.append(Usage.of(slots.pids))
            if trial < SETTLED_AFTER + ZERO_STAGES or (trial + 1) % 20 == 0:
                print(f"{case}: {trial + 1:4d} trials: {usages[-1]}", flush=True)
    return usages


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.rebuild", description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    if arguments.trials < SETTLED_AFTER + 2 * ZERO_STAGES:
        parser.error(f"--trials must be at least {SETTLED_AFTER + 2 * ZERO_STAGES}")
    figures: dict[str, float] = {}
    targets: dict[str, float] = {}
    for case in arguments.cases:
        with launched(arguments.ranks) as slots:
            usages = measure(slots, case, arguments.trials)
        settled = Usage.highest(usages[SETTLED_AFTER : SETTLED_AFTER + ZERO_STAGES])
        last = Usage.highest(usages[-ZERO_STAGES:])
        for name, most in TARGETS.items():
            figure = f"{name}_growth_{case}_{case_name(arguments.ranks)}"
            figures[figure] = getattr(last, name) - getattr(settled, name)
            targets[figure] = most
    conclude(figures, targets)


if __name__ == "__main__":
    main()
