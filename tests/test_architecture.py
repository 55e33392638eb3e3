"""The shape of the house: which room may know which."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Trials that `trialflow init` copies: users' code, which trialflow itself never imports.
TRIAL_TEMPLATES = ROOT / "deployments" / "trial_templates"
RANK_HALF = (
    "trial_core.controller",
    "trial_core.core_api",
    "trial_core.export",
    "trial_core.trainer",
    "trial_core.pytorch",
    "trial_core.deepspeed",
)
RANK_MODULES = {
    "trial_core.accelerator",
    "trial_core.callbacks",
    "trial_core.context",
    "trial_core.core",
    "trial_core.cpu_pickle",
    "trial_core.distributed",
    "trial_core.entrypoint",
    "trial_core.exchange",
    "trial_core.process_group",
    "trial_core.rendezvous",
    "trial_core.transformers",
}
# They have another process convert, or import torch when they convert.
DRIVER_MODULES = {"trial_core.export.export_checkpoint", "trial_core.export.export_process"}


def modules() -> dict[str, Path]:
    found = {}
    for folder in ("trial_core", "tasks", "flows", "deployments"):
        namespace = () if folder == "trial_core" else ("trialflow",)
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.is_relative_to(TRIAL_TEMPLATES):
                continue
            parts = (*namespace, *path.relative_to(ROOT).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def is_rank_half(module: str) -> bool:
    if module in DRIVER_MODULES:
        return False
    return module.startswith(RANK_HALF) or module in RANK_MODULES


def imported(module: str) -> set[str]:
    """Our own modules that `module` imports, also inside functions and for types alone."""
    return _of_ours(ast.walk(ast.parse(MODULES[module].read_text()))) - {module}


def imported_at_load(module: str) -> set[str]:
    """Our own modules that `module` imports when it is loaded (not inside functions)."""
    return _of_ours(_run_at_load(ast.parse(MODULES[module].read_text()).body)) - {module}


def _of_ours(nodes: Iterable[ast.AST]) -> set[str]:
    return {name for node in nodes for name in _names(node) if name in MODULES}


def _run_at_load(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _run_at_load(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
            for field in ("body", "orelse", "finalbody"):
                yield from _run_at_load(getattr(node, field, []))


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            yield full if full in MODULES else str(node.module)


def test_there_is_no_import_cycle() -> None:
    """No module imports, however indirectly, a module that imports it; late imports count.

    A package's `__init__` is no part of this: its names are resolved on first use.
    """
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " → ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for other in sorted(imported(module) - packages):
                visit(other, (*trail, module))
            done.add(module)

    for module in MODULES.keys() - packages:
        visit(module, ())
    assert len(done) == len(MODULES) - len(packages)


ROOMS = {
    "trial_core.storage": ("trial_core.storage",),
    "trial_core.checkpoint": ("trial_core.storage", "trial_core.checkpoint", "trial_core.run"),
    "trial_core.transfer": (
        "trial_core.storage",
        "trial_core.checkpoint",
        "trial_core.transfer",
        "trial_core.run",
        "trial_core.config",
    ),
    "trial_core.retention": (
        "trial_core.storage",
        "trial_core.checkpoint",
        "trial_core.transfer",
        "trial_core.retention",
        "trial_core.run",
    ),
}
"""Which rooms a room may import, besides modules that lie loose in `trial_core`."""


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_below_it(room: str) -> None:
    """Storage knows no checkpoints, a checkpoint no transfers, and neither knows who deletes."""
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        if module.startswith(room)
        for other in imported(module)
        if other.count(".") > 1 and not other.startswith(ROOMS[room])
    ]
    assert wrong == []


def test_the_controller_knows_no_deepspeed() -> None:
    """One controller for all kinds of trial: what differs lies behind `TrialAdapter`."""
    controller = [module for module in MODULES if module.startswith("trial_core.controller")]
    texts = {module: MODULES[module].read_text() for module in controller}
    assert [m for m, text in texts.items() if re.search(r"(import|from) .*deepspeed", text)] == []


def test_names_of_deepspeeds_files_are_known_to_deepspeeds_room_alone() -> None:
    """Its neighbours store files of any name. The import knows what others write."""
    knowing = {m for m, path in MODULES.items() if "zero_pp_rank" in path.read_text()}
    others = {module for module in knowing if not module.startswith("trial_core.deepspeed")}
    assert others == {"trial_core.transfer.import_checkpoint"}


def test_a_name_means_one_thing() -> None:
    """No two classes have one name."""
    homes = defaultdict(list)
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(module)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


@pytest.mark.parametrize(
    ("lower", "higher"),
    [
        ("trial_core", ("trialflow",)),
        ("trialflow.tasks", ("trialflow.flows", "trialflow.deployments")),
        ("trialflow.flows", ("trialflow.deployments",)),
    ],
)
def test_imports_point_one_way(lower: str, higher: tuple[str, ...]) -> None:
    """deployments → flows → tasks → trial_core, never back."""
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        if module.startswith(lower)
        for other in imported(module)
        if other.startswith(higher)
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
        "trial_core.driver.drive",
        "trialflow.tasks.stages",
        "trial_core.slots.rank_main",
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
