"""Which branches of commit, fencing, sweep and prune the simulated histories reach, and how often.

    python -m tests.linearizability.reach SEEDS [first seed]

A branch is one of coverage.py's, or an `except`: what another line, or the end of the function,
follows. Each is counted once in a part of the seeds. (An operand of `and`, and a filter of a
comprehension, are none; `make mutate` judges them.)
"""

from __future__ import annotations

import ast
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import coverage

from tests.linearizability.play import play
from tests.support.cli import ROOT
from trial_core.common.python_source import without_collections

FOLDER = ROOT / "trial_core" / "checkpoint"
MODULES = (
    "commit", "fencing", "intents", "references", "storage_mark", "store", "retention/claims",
    "retention/deletion_markers", "retention/leftovers", "retention/protections",
    "retention/pruning", "retention/shared_files", "retention/trial_owner",
)  # fmt: skip
PARTS = 20
NOT_REACHED: dict[str, str] = {}
"""Why no history reaches these, by patterns of branches' names."""


@dataclass
class Reach:
    """What histories have reached.

    Attributes:
        parts: in how many parts of the seeds each branch was reached, by its name.
        counts: of requests and faults, of all histories.
    """

    parts: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def missing(self) -> list[str]:
        """The branches that were not reached."""
        return [branch for branch, parts in self.parts.items() if not parts]


def measure(seeds: Sequence[int]) -> Reach:
    """Play "lifetimes" with these seeds. Raises as `play`."""
    found = Reach()
    files = {FOLDER / f"{module}.py": module for module in MODULES}
    measured = coverage.Coverage(
        branch=True, data_file=None, concurrency=["greenlet"], config_file=False,
        include=[*map(str, files)],
    )  # fmt: skip
    for part in range(min(PARTS, len(seeds))):
        measured.erase()
        measured.start()
        try:
            for seed in seeds[part::PARTS]:
                found.counts += play("lifetimes", seed)
        finally:
            measured.stop()
        with tempfile.NamedTemporaryFile() as report, without_collections():
            measured.json_report([*map(str, files)], outfile=report.name)
            reported = json.load(report)
            for path, of_file in reported["files"].items():
                module = files[Path(path).resolve()]
                for name, is_reached in _branches(ROOT / path, module, of_file["functions"]):
                    found.parts[name] += is_reached
    return found


def _branches(
    path: Path, module: str, functions: dict[str, dict[str, Any]]
) -> Iterable[tuple[str, bool]]:
    """Each branch, and whether it was reached."""
    source = path.read_text()
    lines = ["end", *map(str.strip, source.splitlines())]
    handlers = {
        node.lineno: node.body[0].lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ExceptHandler)
    }
    for function, seen in functions.items():
        if not function:
            continue  # what runs at import
        reached, missed = seen["executed_lines"], seen["missing_lines"]
        arcs = [((*arc,), True) for arc in seen["executed_branches"]]
        arcs += [((*arc,), False) for arc in seen["missing_branches"]]
        arcs += [
            ((line, body), body in reached)
            for line, body in handlers.items()
            if body in reached or body in missed
        ]
        names: Counter[str] = Counter()
        for (begin, end), is_reached in sorted(arcs):
            name = f"{module}.{function}: {lines[begin]} -> {lines[max(end, 0)]}"
            names[name] += 1
            yield name if names[name] == 1 else f"{name} (no. {names[name]})", is_reached


def reason(branch: str) -> str | None:
    """Why no history reaches a branch; None if one should."""
    return next((why for each, why in NOT_REACHED.items() if fnmatchcase(branch, each)), None)


def main(count: int, first: int = 0) -> None:
    """Play, and print what was reached."""
    began = time.monotonic()
    found = measure(range(first, first + count))
    minutes = (time.monotonic() - began) / 60
    for branch, parts in sorted(found.parts.items(), key=lambda each: -each[1]):
        if parts:
            print(f"{parts:3} of {min(PARTS, count)} parts: {branch}")
    for branch in found.missing:
        print(f"not reached, {reason(branch) or 'AND NOT LISTED'}: {branch}")
    listed = sum(reason(branch) is not None for branch in found.missing)
    print(
        f"{count} histories, {count / minutes:.0f} a minute, {found.counts['requests']} requests; "
        f"{len(found.parts)} branches: {len(found.parts) - len(found.missing)} reached, "
        f"{listed} listed, {len(found.missing) - listed} neither\n{dict(found.counts)}"
    )
    sys.exit(listed < len(found.missing))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
