"""Measures the time from the death of a rank to the next batch, with and without preload.

The flow `train` runs on a real Prefect server. When a checkpoint is committed and training has
gone further, a rank is killed with SIGKILL. The ranks start again, build the model, restore the
checkpoint and train a batch. Such runs come in pairs, one with `resources.preload: true` and one
with false, in alternating order.

The server is the embedded one with a new database, or that of PREFECT_API_URL.
"""

from __future__ import annotations

import argparse
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from benchmarks.figures import Estimate, conclude
from benchmarks.ranks import experiment, rank_processes
from benchmarks.workload import temporary_homes
from trial_core.observe.events.observers import Observer, observing

TARGETS = {"ratio": 0.5, "restart_seconds_with_preload": 5.0}
ENDLESS = 10**6
SCHEDULING_UNIT = 5


@dataclass(frozen=True)
class Turn:
    """The times of one run in seconds.

    Attributes:
        launch: from the call of the flow to the end of the first batch.
        notice: from SIGKILL of a rank until the driver has ended the others and starts new ones.
        start: from there until all ranks have joined.
        build: the trial's construction; without preload the ranks import PyTorch and DeepSpeed.
        restore: fetching the checkpoint, building the loaders and loading the state.
        train: from there to the end of the next batch.
    """

    launch: float
    notice: float
    start: float
    build: float
    restore: float
    train: float

    @property
    def restart(self) -> float:
        """The time from SIGKILL of a rank to the end of the next batch."""
        return self.notice + self.start + self.build + self.restore + self.train


PHASES = [each.name for each in fields(Turn)]


@dataclass
class Killer(Observer):
    """Kills a rank after the first checkpoint, and notes the times of the restart.

    Attributes:
        kill: kills a rank.
        times: seconds since the epoch, of the last launch so far: ``killed``, ``restarting``,
            ``joined`` and ``built`` (begin and end of build-trial), ``restored`` (end of
            build-loaders).
    """

    kill: Callable[[], None]
    times: dict[str, float] = field(default_factory=dict)
    _saved_at: int | None = None

    def checkpoint_committed(
        self, uuid: str, batches: int, total_bytes: int, digest: str = ""
    ) -> None:
        self._saved_at = batches

    def batches_trained(self, batches: int) -> None:
        has_more = self._saved_at is not None and batches > self._saved_at
        if has_more and "killed" not in self.times:
            self._note("killed")
            self.kill()

    def restarting(self, reason: str, attempt: int, max_restarts: int) -> None:
        self._note("restarting")

    def stage_started(self, stage: str, detail: str) -> None:
        if stage == "build-trial":
            self._note("joined")

    def stage_ended(self, stage: str, detail: str, seconds: float) -> None:
        if stage == "build-trial":
            self._note("built")
        elif stage == "build-loaders":
            self._note("restored")

    def _note(self, what: str) -> None:
        self.times[what] = time.time()


def turn_of(began: float, times: dict[str, float], batches: Sequence[float]) -> Turn:
    """Return the times between the events of a run.

    Args:
        began: when the flow was called, in seconds since the epoch like all others.
        times: the times of `Killer`.
        batches: when each batch has ended.

    Raises:
        RuntimeError: the run has ended without a restart and a batch after it.
    """
    if "restarting" not in times:
        raise RuntimeError(f"no rank was killed before the run ended; it noted {sorted(times)}")
    after = [ended for ended in batches if ended > times["restored"]]
    if not after:
        raise RuntimeError(f"no batch was trained after the restart; before it {len(batches)} were")
    return Turn(
        launch=batches[0] - began,
        notice=times["restarting"] - times["killed"],
        start=times["joined"] - times["restarting"],
        build=times["built"] - times["joined"],
        restore=times["restored"] - times["built"],
        train=after[0] - times["restored"],
    )


def run_turn(folder: Path, model: str, ranks: int, preload: bool) -> Turn:
    """Train, kill a rank, and train a batch again."""
    from trialflow.flows.train import train  # Prefect reads its settings when it is imported

    name = uuid.uuid4().hex[:8]
    record = folder / f"{name}.txt"
    config = experiment(
        "benchmarks.stopping_trial:RestartedTrial", ranks, f"file://{folder}/{name}",
        name=name,
        hyperparameters={
            "model": model, "bare_batches": 1, "record": str(record), "waits": False,
        },
        searcher={"name": "single", "metric": "seconds", "max_length": {"batches": ENDLESS}},
        scheduling_unit=SCHEDULING_UNIT, min_checkpoint_period={"batches": SCHEDULING_UNIT},
        resources={"slots_per_trial": ranks, "preload": preload},
        max_restarts=1,
    )  # fmt: skip
    killer = Killer(lambda: rank_processes()[-1].kill())
    began = time.time()
    with observing(killer):
        train(config)
    return turn_of(began, killer.times, [float(line) for line in record.read_text().splitlines()])


def measure(folder: Path, model: str, ranks: int, pairs: int) -> dict[bool, list[Turn]]:
    """Return the turns with preload (True) and without, one of each per pair."""
    turns: dict[bool, list[Turn]] = {True: [], False: []}
    run_turn(folder, model, ranks, preload=False)  # warms up: this process, and the files' cache
    for number in range(pairs):
        # The order alternates, so that a drift of the machine's speed cancels out.
        for preload in (True, False) if number % 2 == 0 else (False, True):
            turn = run_turn(folder, model, ranks, preload)
            turns[preload].append(turn)
            phases = ", ".join(f"{name} {getattr(turn, name):.2f}" for name in PHASES)
            print(f"{_case(preload)}: restart {turn.restart:.2f} s ({phases})", flush=True)
    return turns


def figures_of(turns: dict[bool, list[Turn]]) -> dict[str, float]:
    """Compute and print the figures: medians, and the ratios of the pairs."""
    figures: dict[str, float] = {}
    for preload, case in turns.items():
        for name in ("restart", *PHASES):
            seconds = Estimate.of([getattr(turn, name) for turn in case])
            figures[f"{name}_seconds_{_case(preload)}"] = seconds.median
            print(f"{_case(preload)}: {name} {seconds.shown(2)} s")
    for name, figure in (("restart", "ratio"), ("launch", "launch_ratio")):
        pairs = zip(turns[True], turns[False], strict=True)
        ratio = Estimate.of([getattr(ours, name) / getattr(other, name) for ours, other in pairs])
        figures |= {
            figure: ratio.median, f"{figure}_low": ratio.low, f"{figure}_high": ratio.high,
        }  # fmt: skip
        print(f"{name} with preload, relative to without: {ratio.shown(2)}", flush=True)
    return figures


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.restart", description=__doc__)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="medium")
    arguments = parser.parse_args()
    with temporary_homes() as folder:
        from trialflow.flows.server.embedded_server import prefect_api

        with prefect_api():
            turns = measure(folder, arguments.model, arguments.ranks, arguments.pairs)
    conclude(figures_of(turns), TARGETS)


def _case(preload: bool) -> str:
    return f"{'with' if preload else 'without'}_preload"


if __name__ == "__main__":
    main()
