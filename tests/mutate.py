"""Takes the checks of a room out, one at a time, and prints those that no test misses.

    python -m tests.mutate checkpoint/retention [--every=N] [options of pytest]

A check is the condition of an `if`, an operand of `and` and `or`, a filter of a comprehension, the
handler of an error, or a call for its effect alone. A condition is still evaluated, so only what
depends on it changes. Each mutant runs the tests that reach its line, quickest first, up to
`BUDGET_SECONDS`: those of the room's folder in `tests/`, or the paths in the options. With
``--every=N`` only every N-th check is taken out.

Everything happens in a copy of the tree, in `build/mutate`. A test runs in a fork of this process,
which has imported large libraries once; processes that a test starts read the mutant too. Not
mutmut, no operator of which takes a statement's check out, nor cosmic-ray, which starts a new
interpreter and all tests for each mutant.
"""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from xml.etree import ElementTree

import coverage
import pytest

ROOT = Path(__file__).parents[1]
PARENTS = ("", "trial_core", "flows", "tasks", "deployments")
QUICK = "not long and not slots and not server and not gateway and not ray and not browser"
BUDGET_SECONDS = 40.0
_PRELOADED = (
    "torch", "hypothesis", "s3fs", "msgspec", "safetensors", "moto.server", "prefect",
    "prefect.flow_engine",
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One check taken out of a file.

    Attributes:
        lines: the first and the last line of the check.
        taken: its source.
        instead: what is in its place; ``{}`` is the check.
        source: the file's source without it.
    """

    path: Path
    lines: tuple[int, int]
    taken: str
    instead: str
    source: bytes

    def __str__(self) -> str:
        taken = self.instead.format(" ".join(self.taken.split()))
        return f"{self.path}:{self.lines[0]}: {taken}"


def mutants(path: Path, source: bytes) -> Iterator[Mutant]:
    """The file without each of its checks, in the order of its lines."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, template in sorted(
        _checks(ast.parse(source)), key=lambda each: (each[0].lineno, each[0].col_offset)
    ):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        taken = source[begin:end].decode()
        if isinstance(node, ast.expr) and not _is_source_of(taken, node):
            continue  # in an f-string, where Python 3.11 gives other positions
        instead = template.partition("  #")[0].format(taken)
        mutated = source[:begin] + instead.encode() + source[end:]
        yield Mutant(path, (node.lineno, node.end_lineno), taken, template, mutated)


def _checks(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Each check, and what is in its place in a mutant; ``{}`` is its source."""
    for node in ast.walk(tree):
        match node:
            case ast.If(test=test) | ast.IfExp(test=test) if _text(test) != "TYPE_CHECKING":
                yield test, "(({}) and False)"
                if isinstance(node, ast.IfExp):
                    yield test, "(({}) or True)"
            case ast.BoolOp(op=op, values=values):
                for value in values:
                    yield value, "(({}) or True)" if isinstance(op, ast.And) else "(({}) and False)"
            case ast.comprehension(ifs=filters):
                for each in filters:
                    yield each, "(({}) or True)"
            case ast.ExceptHandler(body=[first, *_]) if not isinstance(first, ast.Raise):
                yield first, "raise  # {}"
            case ast.Expr(value=ast.Call(func=func)) if "_logger" not in _text(func):
                yield node, "pass  # {}"


def _is_source_of(text: str, node: ast.expr) -> bool:
    try:
        return _text(ast.parse(f"({text})", mode="eval")) == _text(node)
    except SyntaxError:
        return False


def _text(node: ast.AST) -> str:
    return ast.unparse(node)


@dataclass(frozen=True)
class Reached:
    """The tests that reach each line of a room, and how long each takes.

    Attributes:
        seconds: by the test's node id.
    """

    lines: Mapping[Path, Mapping[int, Sequence[str]]]
    seconds: Mapping[str, float]

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The tests to run, quickest first."""
        by_line = self.lines.get(mutant.path, {})
        found = {
            name.partition("|")[0]
            for line in range(mutant.lines[0], mutant.lines[1] + 1)
            for name in by_line.get(line, ())
        }
        chosen: list[str] = []
        left = BUDGET_SECONDS
        for name in sorted(found & self.seconds.keys(), key=lambda name: self.seconds[name]):
            left -= self.seconds[name]
            if left < 0 and chosen:
                break
            chosen.append(name)
        return chosen


class Laboratory:
    """A copy of the tree, in which tests run on mutants."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        shutil.rmtree(tree, ignore_errors=True)
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout
        for name in filter(None, names.decode().split("\0")):
            if (ROOT / name).is_symlink() or (ROOT / name).exists():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
        os.environ.update(
            PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1",
            # As in tests/conftest.py, which comes after the imports of `_PRELOADED`.
            DS_ACCELERATOR="cpu", PREFECT_SERVER_ANALYTICS_ENABLED="false", DO_NOT_TRACK="1",
        )  # fmt: skip

    def reached(self, room: Path, options: Sequence[str]) -> Reached:
        """Run the tests on the unchanged tree. Ends this process if one fails."""
        data, report = self.tree / "reached.db", self.tree / "reached.xml"
        ended = subprocess.run(
            [
                sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-o",
                "junit_family=xunit1", f"--cov={room}", "--cov-context=test", "--cov-report=",
                *options,
            ],
            cwd=self.tree, env={**os.environ, "COVERAGE_FILE": str(data)}, check=False,
        )  # fmt: skip
        if ended.returncode:
            sys.exit("the tests of the room do not pass without a mutant")
        found = coverage.CoverageData(str(data))
        found.read()
        lines = {
            Path(name).relative_to(self.tree): found.contexts_by_lineno(name)
            for name in found.measured_files()
        }
        seconds = {
            f"{case.get('file')}::{_names_in(case)}": float(case.get("time", 0))
            for case in ElementTree.parse(report).iter("testcase")
            if case.find("skipped") is None
        }
        return Reached(lines, seconds)

    def survives(self, mutant: Mutant, tests: Sequence[str], seconds: float) -> bool:
        """Return whether all tests pass on the mutant. A test that hangs has noticed it."""
        path = self.tree / mutant.path
        original, times = path.read_bytes(), path.stat()
        path.write_bytes(mutant.source)
        try:
            return self._passes(tests, time.monotonic() + seconds)
        finally:
            path.write_bytes(original)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _passes(self, tests: Sequence[str], deadline: float) -> bool:
        pid = os.fork()
        if pid == 0:
            self._run(tests)
        try:
            while not (ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
        finally:
            with suppress(ProcessLookupError):  # stopped before the fork has made its group
                os.killpg(pid, signal.SIGKILL)  # with what a test has left behind
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if ended is None or ended.si_code != os.CLD_EXITED:
            return False
        if ended.si_status not in (0, 1, 2):
            sys.exit(f"pytest ended with {ended.si_status}: {tests}")
        return ended.si_status == 0

    def _run(self, tests: Sequence[str]) -> None:
        """In the fork: run the tests and exit."""
        code = 3
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.chdir(self.tree)
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            sys.dont_write_bytecode = True
            sys.path[:] = [str(self.tree), *(each for each in sys.path if each != str(ROOT))]
            for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
                del sys.modules[name]
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "", *tests]))
        finally:
            os._exit(code)


def _names_in(case: ElementTree.Element) -> str:
    """A test's node id without its file."""
    module = str(case.get("file")).removesuffix(".py").replace("/", ".")
    classes = str(case.get("classname")).removeprefix(module).strip(".").split(".")
    return "::".join([*filter(None, classes), str(case.get("name"))])


def room_of(name: str) -> Path:
    """The room's folder or file, relative to the tree: ``checkpoint`` is ``trial_core/checkpoint``.

    The name may have a parent's, and the file's ending or none.
    """
    for parent in PARENTS:
        for path in (Path(parent, name), Path(parent, f"{name}.py")):
            if (ROOT / path).exists():
                return path
    sys.exit(f"{name} is no room: expected a folder or file below {', '.join(PARENTS[1:])}")


def tests_near(room: Path) -> list[str]:
    """The tests that mirror a room; a file's folder if it has none."""
    near = Path("tests", room)
    if room.suffix:
        found = (ROOT / near.parent).glob(f"test_{room.stem}*.py")
        return sorted(str(each.relative_to(ROOT)) for each in found) or [str(near.parent)]
    return [str(near)]


def main() -> None:
    """Print each survivor; end with exit code 1 if there is one."""
    if len(sys.argv) < 2:
        sys.exit("say which room: make mutate ROOM=checkpoint/retention")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("stopped"))
    room = room_of(sys.argv[1])
    every = [each for each in sys.argv[2:] if each.startswith("--every=")]
    step = int(every[-1].partition("=")[2]) if every else 1
    options = [each for each in sys.argv[2:] if each not in every]
    if not any(each.startswith("tests") for each in options):
        options += tests_near(room)
    if "-m" not in options:
        options += ["-m", QUICK]
    place = Laboratory(ROOT / "build" / "mutate" / "-".join(room.with_suffix("").parts))
    files = [room] if room.suffix else sorted(
        path.relative_to(ROOT) for path in (ROOT / room).rglob("*.py")
    )  # fmt: skip
    reached = place.reached(room if not room.suffix else room.parent, options)
    for name in _PRELOADED:
        importlib.import_module(name)
    killed, survivors, began = 0, 0, time.monotonic()
    found = (each for path in files for each in mutants(path, (place.tree / path).read_bytes()))
    for mutant in islice(found, step - 1, None, step):
        tests = reached.tests_of(mutant)
        expected = sum(reached.seconds[name] for name in tests)
        if tests and not place.survives(mutant, tests, 60 + 5 * expected):
            killed += 1
            continue
        survivors += 1
        print(f"{mutant}  [{len(tests) or 'no'} tests]", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(f"{killed} of {killed + survivors} checks are missed by a test; {minutes:.0f} minutes")
    sys.exit(survivors > 0)


if __name__ == "__main__":
    main()
