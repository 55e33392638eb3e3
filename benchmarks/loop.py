"""Measures the controller's overhead for a batch: its loop compared with a bare loop.

First a DeepSpeedTrial, compared with a bare DeepSpeed loop; then a PyTorchTrial, compared with a
bare PyTorch loop and with other libraries (`benchmarks/pytorch_loop.py`).

Both loops train the same engine in the same rank processes, and alternate, so that other load on
the machine affects both. The controller's turn is a TrainBatches request, timed by the driver until
every rank has answered. The bare loop's turn is timed inside the ranks. So the channel counts
against the controller. Every pair of turns gives a ratio.

Two more ratios help on a busy machine: one inside the ranks, without the channel, whose messages
wait for a processor; and one of processor time, without any waiting.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from benchmarks.figures import Estimate, conclude
from benchmarks.pytorch_loop import figures_of_pytorch, measure_pytorch, pytorch_case
from benchmarks.ranks import built, case_name, launched, processor_seconds
from trial_core.messages import RunValidation, TrainBatches, Trained, Validated
from trial_core.processes.slots.slot_group import SlotGroup

MODELS = ("tiny", "small")
KINDS = ("deepspeed", "pytorch")
TARGET_MODEL, TARGET_RATIO = "small", 1.02


@dataclass(frozen=True)
class Turn:
    """One turn of one loop.

    Attributes:
        seconds: wall time; the controller's includes the channel.
        rank_seconds: wall time inside the slowest rank.
        processor_seconds: of all ranks together.
    """

    seconds: float
    rank_seconds: float
    processor_seconds: float


@dataclass(frozen=True)
class Pair:
    """Consecutive turns of both loops."""

    controller: Turn
    bare: Turn


class Loops:
    """Ranks that run both loops.

    Args:
        batches: number of batches in a turn.
    """

    def __init__(self, slots: SlotGroup, batches: int) -> None:
        self._slots = slots
        self._batches = batches
        self._trained = 0

    def pair(self, bare_first: bool) -> Pair:
        """Run a turn of each loop."""
        if bare_first:
            bare = self._turn(self._run_bare)
            return Pair(self._turn(self._run_controller), bare)
        return Pair(self._turn(self._run_controller), self._turn(self._run_bare))

    def _turn(self, loop: Callable[[], tuple[float, float]]) -> Turn:
        began = processor_seconds(self._slots.pids)
        seconds, rank_seconds = loop()
        return Turn(seconds, rank_seconds, processor_seconds(self._slots.pids) - began)

    def _run_controller(self) -> tuple[float, float]:
        self._trained += self._batches
        began = time.perf_counter()
        results = self._slots.request(TrainBatches(until=self._trained), Trained)
        return time.perf_counter() - began, max(result.seconds for result in results)

    def _run_bare(self) -> tuple[float, float]:
        seconds = float(self._slots.request(RunValidation(), Validated)[0].metrics["seconds"])
        return seconds, seconds


def measure(slots: SlotGroup, model: str, pairs: int, batches: int) -> list[Pair]:
    """Train `model` in turns; an uncounted pair warms up first."""
    with built(slots, "LoopTrial", {"model": model, "bare_batches": batches}):
        loops = Loops(slots, batches)
        loops.pair(bare_first=True)
        # The first loop alternates, so that a drift of the machine's speed cancels out.
        return [loops.pair(bare_first=bool(i % 2)) for i in range(pairs)]


def figures_of(pairs: list[Pair], batches: int, case: str) -> dict[str, float]:
    """Return the figures of `pairs`; also print them."""
    ratio = ratios(pairs, attrgetter("seconds"))
    in_ranks = ratios(pairs, attrgetter("rank_seconds"))
    processor = ratios(pairs, attrgetter("processor_seconds"))
    added = [(p.controller.seconds - p.bare.seconds) / batches * 1e6 for p in pairs]
    added_in_ranks = [(p.controller.rank_seconds - p.bare.seconds) / batches * 1e6 for p in pairs]
    bare_ms = Estimate.of([p.bare.seconds / batches * 1e3 for p in pairs])
    print(
        f"{case}: bare loop {bare_ms.shown(2)} ms/batch; ratio {ratio.shown(3)}, "
        f"inside the ranks {in_ranks.shown(3)}, of processor time {processor.shown(3)}; "
        f"added {Estimate.of(added).shown(0)} µs/batch",
        flush=True,
    )
    return {
        f"ratio_{case}": ratio.median,
        f"ratio_low_{case}": ratio.low,
        f"ratio_high_{case}": ratio.high,
        f"ratio_inside_{case}": in_ranks.median,
        f"ratio_processor_{case}": processor.median,
        f"bare_ms_{case}": bare_ms.median,
        f"added_us_{case}": Estimate.of(added).median,
        f"added_inside_us_{case}": Estimate.of(added_in_ranks).median,
    }


def ratios(pairs: list[Pair], measured: Callable[[Turn], float]) -> Estimate:
    """Estimate the controller's turn divided by the bare loop's."""
    return Estimate.of([measured(pair.controller) / measured(pair.bare) for pair in pairs])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.loop", description=__doc__)
    parser.add_argument("--pairs", type=int, default=75, help="pairs of turns in each case")
    parser.add_argument("--batches", type=int, default=20, help="batches in a turn")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--builds", type=int, default=5, help="how often PyTorch's models are made")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    targets: dict[str, float] = {}
    for world_size in arguments.ranks:
        with launched(world_size) as slots:
            for model in arguments.models if "pytorch" in arguments.kinds else ():
                case = pytorch_case(world_size, model)
                seconds = measure_pytorch(
                    slots, model, arguments.pairs, arguments.batches, arguments.builds
                )
                figures.update(figures_of_pytorch(seconds, arguments.batches, case))
                if model == TARGET_MODEL:
                    targets[f"trialflow_{case}"] = TARGET_RATIO
            for model in arguments.models if "deepspeed" in arguments.kinds else ():
                case = f"{model}_{case_name(world_size)}"
                pairs = measure(slots, model, arguments.pairs, arguments.batches)
                figures.update(figures_of(pairs, arguments.batches, case))
                if model == TARGET_MODEL:
                    targets[f"ratio_{case}"] = TARGET_RATIO
    conclude(figures, targets)


if __name__ == "__main__":
    main()
