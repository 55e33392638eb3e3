"""Measures the cost of failures: the time to the last batch, relative to a run without them.

Each contestant trains twice on 2 CPU ranks, with checkpoints in an S3 gateway on this machine: once
undisturbed, and once with a list of failures at fixed batches, which a seed gives. With
``--every``, one rank is killed again and again instead, for a fixed time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.figures import conclude
from benchmarks.goodput.contestants import NAMES, Contestant, contestant, missing_modules
from benchmarks.goodput.failures import KINDS, RANKS, Failure, planned, repeated
from benchmarks.goodput.figure import drawn
from benchmarks.goodput.harness import (
    Harness,
    Outcome,
    adopt_orphans,
    below,
    first_difference,
    killed_after_a_while,
)
from benchmarks.goodput.workload import Job
from benchmarks.ranks import ROOT
from benchmarks.workload import temporary_homes
from tests.support.faults.s3 import FaultyS3, faulty_s3
from tests.support.s3 import ceph_gateway

OURS = "trialflow"
ENDLESS = 10**6
TARGETS = {
    "lost_share_trialflow": 0.15,
    "hands_trialflow": 0,
    "departed_trialflow": 0,
    "processes_left_trialflow": 0,
    "goodput_of_the_best_other": 0.7,
}


def measure(
    new_run: Callable[[Job], Contestant], arguments: argparse.Namespace,
    failures: list[Failure], storage: FaultyS3, logs: Path | None, seconds: float | None = None,
) -> Outcome:  # fmt: skip
    """Measure one run of a contestant, with these failures.

    Args:
        logs: the folder for its output and records; None to keep neither.
        seconds: the time after which the run is stopped; None to see all its batches.
    """
    with temporary_folder() as folder:
        job = Job(
            folder=folder, bucket=storage.backend.new_bucket(), batches=arguments.batches,
            batch_seconds=arguments.batch_seconds, save_every=arguments.save_every,
            stall_seconds=arguments.stall, micro_batches=arguments.ranks,
        )  # fmt: skip
        try:
            harness = Harness(new_run(job), job, failures, storage, arguments.outage, seconds)
            return harness.measure()
        finally:
            if logs is not None:
                shutil.copytree(folder, logs, ignore=only_records, dirs_exist_ok=True)


def both(
    name: str, arguments: argparse.Namespace, failures: list[Failure], storage: FaultyS3
) -> dict[str, Any]:
    """Return the results of a contestant's two runs, one undisturbed and one with failures."""
    before = {process.pid for process in below(())}
    with temporary_folder() as folder:
        logs = arguments.logs / name if arguments.logs else None
        with contestant(name, Path(folder), storage.server()) as new_run:
            undisturbed = measure(new_run, arguments, [], storage, logs and logs / "undisturbed")
            print(f"{name}, {undisturbed.seconds:.1f} s; now with failures", flush=True)
            limit = arguments.seconds if arguments.every else None
            if limit is not None:
                arguments = argparse.Namespace(**{**vars(arguments), "batches": ENDLESS})
            disturbed = measure(
                new_run, arguments, failures, storage, logs and logs / "failures", limit
            )
        if logs:
            shutil.copytree(folder, logs, ignore=only_records, dirs_exist_ok=True)
    disturbed.left += killed_after_a_while(before)
    if arguments.every:
        return counted(undisturbed, disturbed, arguments.seconds)
    return compared(undisturbed, disturbed, failures)


def only_records(_: str, names: list[str]) -> list[str]:
    """Return the files that are neither logs nor records, and all folders."""
    return [name for name in names if not name.endswith((".log", ".txt"))]


def temporary_folder() -> AbstractContextManager[str]:
    """Return a temporary folder that processes may still write to while it is removed."""
    return tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True)


def compared(
    undisturbed: Outcome, disturbed: Outcome, failures: Iterable[Failure]
) -> dict[str, Any]:
    """Return the results of a contestant's two runs."""
    changes = [each.batch for each in failures if each.kind == RANKS]
    difference = first_difference(disturbed.weights, undisturbed.weights)
    return {
        "seconds": undisturbed.seconds,
        "seconds_with_failures": disturbed.seconds,
        "goodput": undisturbed.seconds / disturbed.seconds,
        "twice": disturbed.twice,
        "costs": disturbed.costs(undisturbed),
        "hands": disturbed.hands,
        "departed_at": difference,
        "ranks_changed_at": min(changes, default=None),
        "left": [*undisturbed.left, *disturbed.left],
        "curve": disturbed.curve,
    }


def counted(undisturbed: Outcome, disturbed: Outcome, limit: float) -> dict[str, Any]:
    """Return the results of a contestant whose ranks were killed for so many seconds."""
    seconds = max(disturbed.seconds, limit)  # the end counts, if no batch came any more
    batches = len(disturbed.weights)
    pace = undisturbed.seconds / (len(undisturbed.weights) - 1)
    both = undisturbed.weights.keys() & disturbed.weights.keys()
    same = {batch: disturbed.weights[batch] for batch in both}
    departures = [first_difference(same, undisturbed.weights), disturbed.changed]
    return {
        "failures": len(disturbed.failed),
        "seconds": seconds,
        "batches": batches,
        "goodput": (batches - 1) * pace / seconds,
        "counted": batches / disturbed.trained,
        "missing": max(disturbed.weights) - batches,
        "twice": disturbed.twice,
        "twice_seconds": disturbed.twice * pace,
        "gaps": disturbed.gaps,
        "hands": disturbed.hand_count,
        "departed_at": min((it for it in departures if it is not None), default=None),
        "left": [*undisturbed.left, *disturbed.left],
    }


def shown_repeated(results: dict[str, dict[str, Any]]) -> str:
    """Return a table in Markdown."""
    rows = ["| | failures | batches | goodput | batches that counted | seconds to the next batch "
            "| batches trained twice | hands | same weights | processes left |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---|---:|"]  # fmt: skip
    rows += [
        f"| {name} | {it['failures']} | {it['batches']} | {it['goodput']:.3f} "
        f"| {it['counted']:.3f} | {statistics.median(it['gaps']):.2f} | {it['twice']} "
        f"| {it['hands']} | {'yes' if it['departed_at'] is None else it['departed_at']} "
        f"| {len(it['left'])} |"
        for name, it in results.items()
    ]
    return "\n".join(rows)


def shown(results: dict[str, dict[str, Any]], kinds: Iterable[str]) -> str:
    """Return two tables in Markdown: the figures, and the cost of each failure."""
    kinds = [*kinds]
    rows = ["| | without failures | with failures | goodput | batches trained twice | hands "
            "| weights equal the undisturbed run's | processes left |",
            "|---|---:|---:|---:|---:|---:|---|---:|"]  # fmt: skip
    for name, it in results.items():
        until = it["departed_at"]
        equal = "to the last batch" if until is None else f"until batch {until - 1}"
        rows.append(
            f"| {name} | {it['seconds']:.0f} s | {it['seconds_with_failures']:.0f} s "
            f"| {it['goodput']:.2f} | {it['twice']} | {len(it['hands'])} | {equal} "
            f"| {len(it['left'])} |"
        )
    rows += ["", "| seconds that it cost | " + " | ".join(results) + " |",
             "|---|" + "---:|" * len(results)]  # fmt: skip
    for kind in kinds:
        cells = [
            f"{it['costs'][kind]:.1f}{' (hand)' if kind in it['hands'] else ''}"
            if kind in it["costs"] else "–"
            for it in results.values()
        ]  # fmt: skip
        rows.append(f"| {KINDS[kind]} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def concluded_repeated(results: dict[str, dict[str, Any]], every: float, ranks: int) -> None:
    """Print the last line of a run with `--every`."""
    figures: dict[str, float] = {"every_seconds": every, "every_ranks": ranks}
    for name, it in results.items():
        figures |= {
            f"every_goodput_{name}": it["goodput"],
            f"every_counted_share_{name}": it["counted"],
            f"every_failures_{name}": it["failures"],
            f"every_gap_seconds_{name}": statistics.median(it["gaps"]),
            f"every_twice_seconds_{name}": it["twice_seconds"] / it["failures"],
            f"every_hands_{name}": it["hands"],
            f"every_missing_batches_{name}": it["missing"],
            f"every_departed_{name}": it["departed_at"] is not None,
            f"every_processes_left_{name}": len(it["left"]),
        }
    none_of = ("hands", "missing_batches", "departed", "processes_left")
    targets = {f"every_{what}_{OURS}": 0 for what in none_of} if OURS in results else {}
    conclude(figures, targets)


def concluded(results: dict[str, dict[str, Any]]) -> None:
    """Print the last line, with the targets of the measured figures."""
    figures: dict[str, float] = {}
    for name, it in results.items():
        figures |= {
            f"goodput_{name}": it["goodput"],
            f"lost_share_{name}": 1 - it["goodput"],
            f"seconds_{name}": it["seconds"],
            f"seconds_with_failures_{name}": it["seconds_with_failures"],
            f"batches_twice_{name}": it["twice"],
            f"hands_{name}": len(it["hands"]),
            f"departed_{name}": it["departed_at"] is not None,
            f"processes_left_{name}": len(it["left"]),
        }
    others = [it["goodput"] for name, it in results.items() if name != OURS]
    if others:
        figures["goodput_of_the_best_other"] = max(others)
    conclude(figures, {name: most for name, most in TARGETS.items() if name in figures})


def listed(known: Iterable[str]) -> Any:
    """Return an argument's type: names of `known`, separated by commas."""
    names = [*known]

    def parse(text: str) -> list[str]:
        given = text.split(",")
        if unknown := [each for each in given if each not in names]:
            raise argparse.ArgumentTypeError(f"no {unknown[0]!r}: choose from {','.join(names)}")
        return given

    return parse


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.goodput", description=__doc__)
    parser.add_argument("--only", type=listed(NAMES), default=NAMES, help="contestants: a,b")
    parser.add_argument("--failures", type=listed(KINDS), default=[*KINDS], help="kinds: a,b")
    parser.add_argument("--batches", type=int, default=2400)
    parser.add_argument("--batch-seconds", type=float, default=0.1, help="the least of a batch")
    parser.add_argument("--save-every", type=int, default=50, help="batches between checkpoints")
    parser.add_argument("--stall", type=float, default=20.0, help="seconds until ranks are hung")
    parser.add_argument("--outage", type=float, default=30.0, help="seconds without the storage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--every", type=float, help="seconds from one death of a rank to the next")
    parser.add_argument("--seconds", type=float, default=600.0, help="of a run with --every")
    parser.add_argument("--into", type=Path, help="a JSON file: adds these results to those in it")
    parser.add_argument("--logs", type=Path, help="a folder for the contestants' logs")
    parser.add_argument("--figure", type=Path, help="an SVG file to draw")
    arguments = parser.parse_args()
    os.environ.pop("PREFECT_API_URL", None)
    os.environ["PYTHONPATH"] = str(ROOT)
    outage_batches = round(arguments.outage / arguments.batch_seconds)
    if arguments.every and arguments.seconds < 2 * arguments.every:
        parser.error("--seconds: give at least twice the time of --every")
    if arguments.every:
        plan = (arguments.every, arguments.seconds, arguments.ranks, arguments.seed)
        failures = repeated(*plan)
    else:
        failures = planned(arguments.failures, arguments.batches, arguments.seed, outage_batches)
    results: dict[str, dict[str, Any]] = {}
    if arguments.into and arguments.into.exists():
        results = json.loads(arguments.into.read_text())
    with temporary_homes(), ceph_gateway() as gateway, faulty_s3(gateway) as storage:
        adopt_orphans()
        for name in arguments.only:
            if missing := missing_modules(name):
                print(f"{name} is left out: {', '.join(missing)} is not installed", flush=True)
                continue
            print(f"{name}, undisturbed", flush=True)
            results[name] = both(name, arguments, failures, storage)
            if arguments.into:
                arguments.into.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.every:
        print(shown_repeated(results))
        concluded_repeated(results, arguments.every, arguments.ranks)
        return
    print(shown(results, arguments.failures))
    if arguments.figure:
        arguments.figure.write_text(drawn(results, arguments.batches))
    concluded(results)


if __name__ == "__main__":
    main()
