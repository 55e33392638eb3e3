"""Measures trialflow's cost on this machine's accelerators, against bare DeepSpeed and PyTorch.

- loop: a batch through the controller, as `benchmarks.loop` measures it.
- stall: how long a checkpoint blocks training; compared with `save_checkpoint` to the local disk.
- pause: how long it pauses training with ``snapshot: lazy``, the wait of the next step included,
  if a batch takes longer than the copy; compared with ``eager``.
- restore: from a storage on the local disk, digests verified; compared with `load_checkpoint`.
- memory: the most device memory that training, saving and restoring take, compared with
  DeepSpeed's, and the pinned host memory.

Refuses to run without an accelerator. ``--on-cpu`` is for testing the benchmark only.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import uuid
from collections import defaultdict

from benchmarks import loop
from benchmarks.checkpoint import BYTES_PER_LAYER, by_rank
from benchmarks.figures import conclude
from benchmarks.pytorch_loop import figures_of_pytorch, measure_pytorch, pytorch_case
from benchmarks.ranks import built, case_name, launched
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.upload import merge_entries
from trial_core.errors import LaunchError
from trial_core.messages import (
    BuildLoadersAndRestore,
    Done,
    FetchCheckpoint,
    Fetched,
    PersistCheckpoint,
    ReadyToTrain,
    ReleaseStaging,
    RunValidation,
    SaveCheckpoint,
    Saved,
    TrainBatches,
    Trained,
    Validated,
)
from trial_core.processes.machine.accelerators import count_accelerators, resolve_slot_count
from trial_core.processes.slots.slot_group import SlotGroup

MIB, GIB = 2**20, 2**30
TURN_BATCHES = 3
MODEL = loop.TARGET_MODEL

STATE_TARGETS = {
    "stall_ratio": 1 / 4,
    "restore_ratio": 1.5,
    "peak_memory_ratio": 1.02,
    "pinned_gib": 0.5,
    "pause_ratio": 1 / 5,
}


def loops(slots: SlotGroup, pairs: int, batches: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the figures of both kinds of trial, and their targets."""
    case = f"{MODEL}_{case_name(slots.world_size)}"
    figures = loop.figures_of(loop.measure(slots, MODEL, pairs, batches), batches, case)
    pytorch = pytorch_case(slots.world_size, MODEL)
    seconds = measure_pytorch(slots, MODEL, pairs, batches, builds=min(5, pairs))
    figures |= figures_of_pytorch(seconds, batches, pytorch)
    names = (f"ratio_{case}", f"trialflow_{pytorch}")
    return figures, dict.fromkeys(names, loop.TARGET_RATIO)


def state(slots: SlotGroup, state_mib: int, turns: int) -> dict[str, float]:
    """Train, save and restore, then the same with DeepSpeed alone, in turns."""
    layers = max(1, state_mib * MIB // BYTES_PER_LAYER)
    seen: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        hyperparameters = {"layers": layers, "batches": TURN_BATCHES, "folder": f"{folder}/bare"}
        store = CheckpointStore(f"file://{folder}/checkpoints")
        with built(slots, "benchmarks.gpu_trial:StateTrial", hyperparameters, store):
            for turn in range(turns + 1):
                ours = turn_of_ours(slots, turn * TURN_BATCHES)
                metrics = slots.request(RunValidation(), Validated)[0].metrics
                if turn:  # the first one warms up
                    for name, value in {**ours, **metrics}.items():
                        seen[name].append(float(value))
    median = {name: statistics.median(values) for name, values in seen.items()}
    return {
        "state_mib": layers * BYTES_PER_LAYER / MIB,
        "stall_s": median["stall_seconds"],
        "stall_ratio": median["stall_seconds"] / median["save_seconds"],
        "restore_s": median["restore_seconds"],
        "restore_ratio": median["restore_seconds"] / median["load_seconds"],
        "peak_memory_mib": max(seen["peak_bytes"]) / MIB,
        "peak_memory_ratio": max(seen["peak_bytes"]) / max(seen["bare_peak_bytes"]),
        "pinned_gib": max(seen["pinned_bytes"]) / GIB,
    }


def pause(
    slots: SlotGroup, state_mib: int, turns: int, samples: int, passes: int
) -> dict[str, float]:
    """Train and save in turns, with either kind of copy.

    A batch has so many samples, and so many forward passes more than it needs.
    """
    layers = max(1, state_mib * MIB // BYTES_PER_LAYER)
    hyperparameters = {
        "layers": layers, "batch_size": samples, "passes": passes, "batches": 0, "folder": ""
    }  # fmt: skip
    paused: dict[str, list[float]] = {"eager": [], "lazy": []}
    batch: list[float] = []
    for snapshot, pauses in paused.items():
        settings = {"snapshot": snapshot, "verify_first": False}
        with built(
            slots, "benchmarks.gpu_trial:StateTrial", hyperparameters, checkpointing=settings
        ):
            slots.request(TrainBatches(until=1), Trained)
            for until in range(2, 4 + turns):
                checkpoint, began = str(uuid.uuid4()), time.perf_counter()
                slots.request(SaveCheckpoint(uuid=checkpoint), Saved)
                saved = time.perf_counter() - began
                trained = slots.request(TrainBatches(until=until), Trained)
                by_rank(slots.submit(PersistCheckpoint(uuid=checkpoint)).result())
                slots.request(ReleaseStaging(uuid=checkpoint), Done)
                if until > 3:  # before, lazy ones are copied at once, and compared
                    waited = max(each.copy_seconds for each in trained)
                    if (waited > 0) is not (snapshot == "lazy"):
                        sys.exit(f"{snapshot}: the next step has waited {waited} s for copies")
                    pauses.append(saved + waited)
                    batch.append(max(each.seconds - each.copy_seconds for each in trained))
    median = {name: statistics.median(values) for name, values in paused.items()}
    return {
        "pause_s": median["lazy"],
        "pause_eager_s": median["eager"],
        "pause_ratio": median["lazy"] / median["eager"],
        "pause_batch_s": statistics.median(batch),
    }


def turn_of_ours(slots: SlotGroup, trained: int) -> dict[str, float]:
    """Train some batches, save, and restore that. Return the seconds of the last two."""
    until = trained + TURN_BATCHES
    slots.request(TrainBatches(until=until), Trained)
    checkpoint = str(uuid.uuid4())
    began = time.perf_counter()
    slots.request(SaveCheckpoint(uuid=checkpoint), Saved)
    saved = time.perf_counter()
    files = merge_entries(by_rank(slots.submit(PersistCheckpoint(uuid=checkpoint)).result()))
    slots.request(ReleaseStaging(uuid=checkpoint), Done)
    persisted = time.perf_counter()
    slots.request(FetchCheckpoint(uuid=checkpoint, files=files), Fetched)
    slots.request(
        BuildLoadersAndRestore(batches_trained=until, checkpoint=checkpoint), ReadyToTrain
    )
    return {
        "stall_seconds": saved - began,
        "restore_seconds": time.perf_counter() - persisted,
    }


def ranks_here(on_cpu: bool) -> int:
    """Return the number of ranks: one for each accelerator, or with `on_cpu` two CPU ranks.

    Exits with a message if torch has no accelerator that it can use.
    """
    try:
        if not on_cpu and count_accelerators() == 0:
            sys.exit(
                "benchmarks.gpu measures accelerators, and this machine has none that a run would "
                "use (`trialflow doctor` says what it sees); nothing was measured"
            )
        return resolve_slot_count("auto")
    except LaunchError as error:
        sys.exit(f"{error}; nothing was measured")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--pairs", type=int, default=40, help="pairs of turns of the loops")
    parser.add_argument("--batches", type=int, default=100, help="batches in a turn of a loop")
    parser.add_argument("--state-mib", type=int, default=4096, help="state of model and optimizer")
    parser.add_argument("--turns", type=int, default=5, help="checkpoints")
    parser.add_argument(
        "--samples", type=int, default=4096, help="samples of a batch beside a late copy"
    )
    parser.add_argument("--passes", type=int, default=64, help="forward passes more in it")
    parser.add_argument("--on-cpu", action="store_true", help="for testing the benchmark only")
    given = parser.parse_args()
    with launched(ranks_here(given.on_cpu)) as slots:
        figures, targets = loops(slots, given.pairs, given.batches)
        figures |= state(slots, given.state_mib, given.turns)
        figures |= pause(slots, given.state_mib, given.turns, given.samples, given.passes)
    conclude(figures, {**targets, **STATE_TARGETS})


if __name__ == "__main__":
    main()
