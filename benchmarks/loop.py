"""What the controller adds to a batch: its loop against a bare DeepSpeed loop.

Both loops train the same model in the same rank processes and take turns, so that whatever else
the machine does hits both alike. The controller's turn is a TrainBatches request, timed by the
driver from sending it to having every rank's answer; the bare loop's turn is timed inside the
ranks, so the channel counts against the controller. Every pair of turns gives a ratio of times,
and one of processor times: that one says nothing of waiting, but holds on a busy machine too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.figures import Estimate, conclude
from benchmarks.ranks import built, case_name, launched, processor_seconds
from trial_core.messages import RunValidation, TrainBatches, Trained, Validated
from trial_core.slots.group import SlotGroup

MODELS = ("tiny", "small")
TARGET_MODEL, TARGET_RATIO = "small", 1.05


@dataclass(frozen=True)
class Turn:
    """One turn of one loop.

    Attributes:
        seconds: wall time.
        processor_seconds: of all ranks together.
    """

    seconds: float
    processor_seconds: float


@dataclass(frozen=True)
class Pair:
    """A turn of the controller's loop and one of the bare loop, right after each other."""

    controller: Turn
    bare: Turn


class Loops:
    """Ranks with both loops on them.

    Args:
        batches: how many a turn has.
    """

    def __init__(self, slots: SlotGroup, batches: int) -> None:
        self._slots = slots
        self._batches = batches
        self._trained = 0

    def pair(self, bare_first: bool) -> Pair:
        """A turn of each loop."""
        if bare_first:
            bare = self._turn(self._run_bare)
            return Pair(self._turn(self._run_controller), bare)
        return Pair(self._turn(self._run_controller), self._turn(self._run_bare))

    def _turn(self, loop: Callable[[], float]) -> Turn:
        began = processor_seconds(self._slots.pids)
        seconds = loop()
        return Turn(seconds, processor_seconds(self._slots.pids) - began)

    def _run_controller(self) -> float:
        self._trained += self._batches
        began = time.perf_counter()
        self._slots.request(TrainBatches(until=self._trained), Trained)
        return time.perf_counter() - began

    def _run_bare(self) -> float:
        return float(self._slots.request(RunValidation(), Validated)[0].metrics["seconds"])


def measure(slots: SlotGroup, model: str, pairs: int, batches: int) -> list[Pair]:
    """Train `model` in turns; the first pair warms up and is not counted."""
    with built(slots, model, batches):
        loops = Loops(slots, batches)
        loops.pair(bare_first=True)
        # Who goes first alternates: a drift of the machine's speed cancels as well.
        return [loops.pair(bare_first=bool(i % 2)) for i in range(pairs)]


def figures_of(pairs: list[Pair], batches: int, case: str) -> dict[str, float]:
    """What `pairs` come to, printed as well."""
    ratio = Estimate.of([p.controller.seconds / p.bare.seconds for p in pairs])
    processor = Estimate.of(
        [p.controller.processor_seconds / p.bare.processor_seconds for p in pairs]
    )
    added_us = Estimate.of([(p.controller.seconds - p.bare.seconds) / batches * 1e6 for p in pairs])
    bare_ms = Estimate.of([p.bare.seconds / batches * 1e3 for p in pairs])
    print(
        f"{case}: bare {bare_ms.shown(3)} ms/batch, controller {added_us.shown(0)} µs more; "
        f"ratio {ratio.shown(3)}, of processor time {processor.shown(3)}",
        flush=True,
    )
    return {
        f"ratio_{case}": ratio.median,
        f"ratio_low_{case}": ratio.low,
        f"ratio_high_{case}": ratio.high,
        f"processor_ratio_{case}": processor.median,
        f"added_us_per_batch_{case}": added_us.median,
        f"bare_ms_per_batch_{case}": bare_ms.median,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.loop", description=__doc__)
    parser.add_argument("--pairs", type=int, default=30, help="of turns, in each case")
    parser.add_argument("--batches", type=int, default=50, help="in a turn")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    targets: dict[str, float] = {}
    for world_size in arguments.ranks:
        with launched(world_size) as slots:
            for model in arguments.models:
                case = f"{model}_{case_name(world_size)}"
                pairs = measure(slots, model, arguments.pairs, arguments.batches)
                figures.update(figures_of(pairs, arguments.batches, case))
                if model == TARGET_MODEL:
                    targets[f"ratio_{case}"] = TARGET_RATIO
    conclude(figures, targets)


if __name__ == "__main__":
    main()
