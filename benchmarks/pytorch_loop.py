"""Measures a batch of a PyTorchTrial, compared with a bare loop and other libraries' loops.

They take turns in the same rank processes. The bare loop trains the trial's model, since two equal
models differ in speed by their memory addresses. Each library's loop trains a separate one, so
those figures are less sure, and all models are built several times.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec

from benchmarks.figures import Estimate
from benchmarks.ranks import built, case_name
from trial_core.messages import RunValidation, TrainBatches, Trained, Validated
from trial_core.processes.slots.slot_group import SlotGroup

BARE = "bare"
PACKAGES = {"fabric": "lightning", "lightning": "lightning", "accelerate": "accelerate"}
"""Loops of other libraries, and the package of each."""


def installed_loops() -> list[str]:
    """Return the bare loop, and the loops of the installed libraries."""
    missing = sorted({package for package in PACKAGES.values() if find_spec(package) is None})
    if missing:
        print(f"not compared, because not installed: {', '.join(missing)} (extra: bench)")
    return [BARE, *(name for name, package in PACKAGES.items() if find_spec(package) is not None)]


def measure_pytorch(
    slots: SlotGroup, model: str, rounds: int, batches: int, builds: int
) -> dict[str, list[float]]:
    """Return the seconds of each loop's turns, by name; ``trialflow`` is the controller's.

    Args:
        rounds: turns of each loop, in all builds together; an uncounted one warms up each build.
        batches: batches in a turn.
    """
    loops = installed_loops()
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(builds):
        hyperparameters = {"model": model, "loops": loops, "bare_batches": batches}
        with built(slots, "benchmarks.pytorch_trial:PyTorchLoopTrial", hyperparameters):
            for index in range(1 + max(1, rounds // builds)):
                # Every other round in reverse, so that a drift of the machine's speed cancels out.
                order = ["trialflow", *loops] if index % 2 == 0 else [*reversed(loops), "trialflow"]
                for name in order:
                    if name == "trialflow":
                        took = _train(slots, until=(index + 1) * batches)
                    else:
                        took = _validate(slots)
                    if index:
                        seconds[name].append(took)
    return seconds


def figures_of_pytorch(
    seconds: dict[str, list[float]], batches: int, case: str
) -> dict[str, float]:
    """Return each loop's time relative to the bare loop's in the same round; also print it."""
    bare = seconds[BARE]
    bare_ms = Estimate.of([each / batches * 1e3 for each in bare])
    print(f"{case}: bare PyTorch loop {bare_ms.shown(2)} ms/batch", flush=True)
    figures = {f"bare_ms_{case}": bare_ms.median}
    for name, turns in seconds.items():
        if name != BARE:
            ratio = ratio_of(turns, bare)
            print(f"  {name}: {ratio.shown(3)} of it", flush=True)
            figures[f"{name}_{case}"] = ratio.median
    return figures


def ratio_of(turns: Sequence[float], bare: Sequence[float]) -> Estimate:
    """Estimate the ratio of turns to the bare loop's turns of the same rounds."""
    return Estimate.of([turn / base for turn, base in zip(turns, bare, strict=True)])


def pytorch_case(world_size: int, model: str) -> str:
    """Return a part of a figure's name: ``pytorch_small_2_ranks``."""
    return f"pytorch_{model}_{case_name(world_size)}"


def _train(slots: SlotGroup, until: int) -> float:
    began = time.perf_counter()
    slots.request(TrainBatches(until=until), Trained)
    return time.perf_counter() - began


def _validate(slots: SlotGroup) -> float:
    return float(slots.request(RunValidation(), Validated)[0].metrics["seconds"])
