"""The shape of the house: which room may know which."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("trial_core", "tasks", "flows", "deployments")
RANK_HALF = ("trial_core.controller", "trial_core.pytorch", "trial_core.deepspeed")
RANK_MODULES = {"trial_core.context", "trial_core.distributed", "trial_core.exchange"}


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def is_rank_half(module: str) -> bool:
    return module.startswith(RANK_HALF) or module in RANK_MODULES


def imported_at_load(module: str) -> set[str]:
    """Our own modules that `module` imports when it is loaded (not inside functions)."""
    tree = ast.parse(MODULES[module].read_text())
    names = {
        candidate
        for node in _run_at_load(tree.body)
        for candidate in _names(node)
        if candidate in MODULES
    }
    return names - {module}


def _run_at_load(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _run_at_load(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for field in ("body", "orelse", "finalbody"):
                yield from _run_at_load(getattr(node, field, []))


def _names(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    else:
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            yield full if full in MODULES else str(node.module)


def test_there_is_no_import_cycle() -> None:
    """No module imports, however indirectly, a module that imports it."""
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " → ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for other in sorted(imported_at_load(module)):
                visit(other, (*trail, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())
    assert len(done) == len(MODULES)


@pytest.mark.parametrize(
    ("lower", "higher"),
    [
        ("trial_core", ("tasks", "flows", "deployments")),
        ("tasks", ("flows", "deployments")),
        ("flows", ("deployments",)),
    ],
)
def test_imports_point_one_way(lower: str, higher: tuple[str, ...]) -> None:
    """deployments → flows → tasks → trial_core, never back."""
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        if module.split(".")[0] == lower
        for other in imported_at_load(module)
        if other.split(".")[0] in higher
    ]
    assert wrong == []


def test_trial_core_knows_nothing_of_prefect() -> None:
    """The library works without a workflow engine."""
    assert not any(
        "import prefect" in path.read_text() or "from prefect" in path.read_text()
        for name, path in MODULES.items()
        if name.startswith("trial_core")
    )


def test_the_driver_half_does_not_import_the_rank_half() -> None:
    """What the driver loads never reaches torch; the worker reaches it only once it has joined."""
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        if not is_rank_half(module)
        for other in imported_at_load(module)
        if is_rank_half(other)
    ]
    assert wrong == []


def test_the_driver_half_loads_neither_torch_nor_deepspeed() -> None:
    """In a fresh interpreter, importing every driver-half module brings in no torch."""
    driver_half = sorted(module for module in MODULES if not is_rank_half(module))
    assert {
        "trialflow.flows.train",
        "trialflow.tasks.checkpoint",
        "trial_core.slots.worker",
    } <= set(driver_half)
    program = (
        "import importlib, sys\n"
        f"for module in {driver_half!r}:\n"
        "    importlib.import_module(module)\n"
        "print([m for m in ('torch', 'deepspeed', 'numpy') if m in sys.modules])\n"
    )
    seen = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    assert seen.stdout.strip().splitlines()[-1] == "[]"
