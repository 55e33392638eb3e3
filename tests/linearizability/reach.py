"""Which branches of commit, fencing, sweep and prune the simulated histories reach, and how often.

    python -m tests.linearizability.reach [SEEDS] [--first SEED] [--store]

First plays the stored seeds, which are few and reach all that is reached at all, unless the
product's requests or the actions have changed since. Then it plays as many others; without a number
only until all is reached. ``make simulate ARGS=--store`` stores new ones.

A branch is an outcome of a condition (of `if`, `while`, `x if y else z` or a filter), an `except`,
or a loop's first item or regular end. They are counted by calls in the modules' syntax trees:
coverage.py would make histories three times as slow.
"""

from __future__ import annotations

import ast
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOM = "trial_core.checkpoint."
MODULES = (
    "commit", "fencing", "intents", "references", "storage_mark", "store", "retention.claims",
    "retention.deletion_markers", "retention.leftovers", "retention.protections",
    "retention.pruning", "retention.shared_files", "retention.trial_owner",
)  # fmt: skip
LISTED = {
    "*.RunClaim.renew: for seconds_left in *: the end": "its last item returns or raises",
    "store.CheckpointStore.newest_first: True: false": "`while True`",
    "store.CheckpointStore.newest_first: name not in yielded: false": "only the first is taken",
    "store.CheckpointStore.check_clock: *": "of commands that only read",
    "retention.shared_files.*repair*: *": "of `checkpoints verify --repair`",
    "store.CheckpointStore.trial: *": "of commands, which name a trial by its first characters",
    "retention.leftovers.find_orphaned_files: prefix: false": "no run claims an empty prefix",
}
"""Why no history reaches these branches, by patterns of their names."""

STORED = Path(__file__).parent / "seeds.txt"
MOST_SPARE = 1000

branches: list[str] = []
"""The names of all branches of the modules that are imported."""
_seen: set[int] = set()


def _mark(branch: int) -> None:
    _seen.add(branch)


def _outcome(branch: int, value: Any) -> Any:
    _seen.add(branch if value else branch + 1)
    return value


class _Marker(ast.NodeTransformer):
    """Adds the calls to the functions of a module."""

    def __init__(self, module: str) -> None:
        self._scope = [module]

    def visit(self, node: ast.AST) -> Any:
        is_scope = isinstance(node, (ast.ClassDef, ast.FunctionDef))
        if is_scope:
            self._scope.append(node.name)
        elif len(self._scope) > 1:
            self._add_to(node)
        self.generic_visit(node)
        if is_scope:
            self._scope.pop()
        return node

    def _add_to(self, node: ast.AST) -> None:
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            node.test = self._condition(node.test)
        elif isinstance(node, ast.comprehension):
            node.ifs = [self._condition(each) for each in node.ifs]
        elif isinstance(node, ast.ExceptHandler):
            kind = ast.unparse(node.type) if node.type else ""
            node.body.insert(0, self._reached(node, f"except {kind}"))
        elif isinstance(node, ast.For):
            loop = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
            node.body.insert(0, self._reached(node, f"{loop}: an item"))
            node.orelse.insert(0, self._reached(node, f"{loop}: the end"))

    def _condition(self, test: ast.expr) -> ast.expr:
        text = ast.unparse(test)
        number = self._named(f"{text}: true", f"{text}: false")
        return self._call(_outcome.__name__, test, ast.Constant(number), test)

    def _reached(self, node: ast.AST, text: str) -> ast.stmt:
        return ast.Expr(self._call(_mark.__name__, node, ast.Constant(self._named(text))))

    def _call(self, function: str, at: ast.AST, *arguments: ast.expr) -> ast.expr:
        return ast.copy_location(
            ast.Call(ast.Name(function, ast.Load()), [*arguments], keywords=[]), at
        )

    def _named(self, *texts: str) -> int:
        names = [f"{'.'.join(self._scope)}: {text}" for text in texts]
        while names[0] in branches:
            names = [f"{name} (again)" for name in names]
        branches.extend(names)
        return len(branches) - len(names)


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path))
        marked = _Marker(fullname.removeprefix(ROOM)).visit(tree)
        return compile(ast.fix_missing_locations(marked), self.path, "exec")

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update({each.__name__: each for each in (_mark, _outcome)})
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(ROOM) or name.removeprefix(ROOM) not in MODULES:
            return None
        found = PathFinder.find_spec(name, path)
        assert found is not None
        assert found.origin is not None
        found.loader = _Loader(name, found.origin)
        return found


def reason(branch: str) -> str | None:
    """Why no history reaches a branch; None if one should."""
    return next((why for each, why in LISTED.items() if fnmatchcase(branch, each)), None)


def _play(seed: int) -> tuple[int, frozenset[int], Counter[str], str]:
    """Play a seed; it, the branches that it reaches, what was counted, and why it failed."""
    from tests.linearizability.play import play

    _seen.clear()
    counts, problem = Counter[str](), ""
    try:
        counts = play("lifetimes", seed)
    except Exception as error:  # noqa: BLE001 - all seeds are played
        problem = f"{error!r}. {error.__notes__[0].splitlines()[-1]}"
    return seed, frozenset(_seen), counts, problem


def main(seeds: Sequence[int], spare: Iterable[int] = (), is_stored: bool = False) -> Iterable[str]:
    """Play "lifetimes", and print what was reached; return what should not be so.

    Args:
        spare: seeds that are played, too, until there is nothing left to reach.
        is_stored: whether to store the fewest of the seeds that reach the same.
    """
    sys.meta_path.insert(0, _Finder())
    import tests.linearizability.play  # noqa: F401 - with the marks, and before the fork

    began, counts = time.monotonic(), Counter[str]()
    played: dict[int, frozenset[int]] = {}
    wanted = {number for number, name in enumerate(branches) if reason(name) is None}
    with get_context("fork").Pool() as pool:
        for seed, seen, counted, problem in pool.imap(_play, chain(seeds, spare)):
            played[seed] = seen
            counts += counted
            if problem:
                yield problem
            if len(played) >= len(seeds) and wanted.issubset(chain.from_iterable(played.values())):
                break
    minutes = (time.monotonic() - began) / 60
    reached = Counter(chain.from_iterable(played.values()))
    for number, seen in reached.most_common():
        print(f"{seen:6} of {len(played)}: {branches[number]}")
    missing = [name for number, name in enumerate(branches) if not reached[number]]
    for name in missing:
        if reason(name) is not None:
            print(f"not reached, {reason(name)}: {name}")
    listed = [name for name in branches if reason(name) is not None]
    print(
        f"{len(played)} histories, {len(played) / minutes:.0f} a minute: {dict(counts)}\n"
        f"{len(branches)} branches: {len(branches) - len(missing)} reached, {len(missing)} not, of "
        f"which {len({*missing} & {*listed})} are listed"
    )
    if len(played) > len(seeds):
        print("the stored seeds do not reach all any more: make simulate ARGS=--store")
    for name in missing:
        if reason(name) is None:
            yield f"neither reached nor listed: {name}"
    for pattern in LISTED:
        if not any(fnmatchcase(name, pattern) for name in missing):
            print(f"listed, although it is reached: {pattern}")
    if is_stored:
        STORED.write_text("".join(f"{seed}\n" for seed in few(played)))


def few(played: Mapping[int, frozenset[int]]) -> list[int]:
    """Few of the seeds that together reach the same: each the one that adds the most."""
    chosen: list[int] = []
    left = {number for seen in played.values() for number in seen}
    while left:
        best = max(played, key=lambda seed: len(played[seed] & left))
        chosen.append(best)
        left -= played[best]
    return sorted(chosen)


if __name__ == "__main__":
    parser = ArgumentParser(prog="python -m tests.linearizability.reach")
    parser.add_argument("seeds", type=int, nargs="?", help="how many more than the stored ones")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--store", action="store_true", help="store few seeds that reach the same")
    parser.add_argument("--alone", action="store_true", help="leave the stored ones out")
    given = parser.parse_args()
    seeds = [] if given.alone else [*map(int, STORED.read_text().split())]
    spare: Iterable[int] = range(given.first, given.first + MOST_SPARE)
    if given.seeds is not None:
        more = range(given.first, given.first + given.seeds)
        seeds, spare = [*dict.fromkeys((*seeds, *more))], ()
    problems = list(main(seeds, spare, given.store))
    print(*problems, sep="\n")
    sys.exit(bool(problems))
