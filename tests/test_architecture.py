"""The shape of the house: which room may know which.

``python -m tests.test_architecture`` prints the rooms into docs/architecture.md and README.md.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.syntax import syntax_of

pytestmark = pytest.mark.xdist_group("syntax")
ROOT = Path(__file__).parents[1]
# Trials that `trialflow init` copies: users' code, which trialflow itself never imports.
TRIAL_TEMPLATES = ROOT / "deployments" / "trial_templates"


@dataclass(frozen=True)
class Room:
    """A package or module whose place in the house is checked.

    Attributes:
        name: its dotted name. Packages inside it that are not listed belong to it.
        purpose: what it has, in a few words.
        is_of_ranks: True if it may import torch and DeepSpeed; the driver never loads it.
    """

    name: str
    purpose: str
    is_of_ranks: bool = False


ROOMS = (
    Room("trialflow.deployments.cli", "the command line"),
    Room("trialflow.deployments", "deployments, workers, schedules, resources"),
    Room("trialflow.flows", "the flows: train, evaluate, retrain, prune"),
    Room("trialflow.flows.retraining", "the outcome of a retraining"),
    Room("trialflow.flows.lifecycle", "how a flow run stops, crashes and starts again"),
    Room("trialflow.flows.server", "Prefect's server: found, started, guarded"),
    Room("trialflow.tasks", "the stages of a flow as Prefect tasks"),
    Room("trial_core.experimental", "Determined's client"),
    Room("trial_core.experimental.core_v2", "the Core API as a module", is_of_ranks=True),
    Room("trial_core.transformers", "callbacks for Hugging Face's Trainer", is_of_ranks=True),
    Room("trial_core.callbacks", "callbacks for trials", is_of_ranks=True),
    Room("trial_core.core", "the Core API's public names", is_of_ranks=True),
    Room("trial_core.trackers", "the base of a tracker of your own"),
    Room("trial_core.export", "a checkpoint as a folder for other programs"),
    Room("trial_core.trainer", "Trainer and init; how a trial is found", is_of_ranks=True),
    Room("trial_core.deepspeed", "DeepSpeedTrial", is_of_ranks=True),
    Room("trial_core.pytorch", "PyTorchTrial", is_of_ranks=True),
    Room("trial_core.rank.core_api", "a Core API script in a rank", is_of_ranks=True),
    Room("trial_core.rank.script", "a script that starts its own driver", is_of_ranks=True),
    Room(
        "trial_core.rank",
        "the controller, which carries out the driver's requests",
        is_of_ranks=True,
    ),
    Room("trial_core.rank.data", "loaders that continue where they were", is_of_ranks=True),
    Room("trial_core.rank.trial", "the parts that all kinds of trial share", is_of_ranks=True),
    Room("trial_core.rank.state_files", "files of a rank's state", is_of_ranks=True),
    Room("trial_core.rank.collectives", "exchange between ranks", is_of_ranks=True),
    Room("trial_core.cluster_info", "a script's view of its run"),
    Room("trial_core.search", "hyperparameter search: what to train next"),
    Room("trial_core.driver", "drives a run: places, launches, loops, recovers"),
    Room("trial_core.observe.trackers", "MLflow, W&B, TensorBoard, Trackio"),
    Room("trial_core.observe.report", "the live report"),
    Room("trial_core.observe.telemetry", "traces and metrics for OpenTelemetry"),
    Room("trial_core.observe.events", "a run's events, and who listens"),
    Room("trial_core.observe.ledger", "the ledger of a run's time"),
    Room("trial_core.models", "the model registry and promotion"),
    Room("trial_core.processes.nodes", "ranks on other machines"),
    Room("trial_core.checkpoint.weights", "weights for other programs", is_of_ranks=True),
    Room("trial_core.checkpoint.retention", "which checkpoints stay, and deletion"),
    Room("trial_core.checkpoint.transfer", "files to and from the storage"),
    Room("trial_core.processes.slots", "rank processes and the channel to them"),
    Room("trial_core.util", "what scripts use of Determined's util"),
    Room("trial_core.config", "the experiment file"),
    Room("trial_core.processes.machine", "a machine's folders, memory, accelerators, children"),
    Room("trial_core.messages", "messages between driver and ranks"),
    Room("trial_core.checkpoint", "manifests, the commit, fencing"),
    Room("trial_core.checkpoint.storage", "storages behind fsspec"),
    Room("trial_core.schedule", "pure: units, the next workload, stop requests, the end of a run"),
    Room("trial_core.common", "text, names and versions"),
    Room("trial_core.errors", "errors for users"),
)
"""The house from top to bottom: a room may import itself and the rooms below it."""

RANK_MAIN = "trial_core.processes.slots.rank_main"
EXCEPTIONS = {
    (RANK_MAIN, "trial_core.rank"): "a rank's process loads its controller",
    (RANK_MAIN, "trial_core.rank.core_api"): "or a script's, once it knows what it is to train",
    (RANK_MAIN, "trial_core.trainer"): "and finds the trial",
    ("trial_core.rank.core_api.script_controller", "trial_core.deepspeed"): "a script, too, has "
    "DeepSpeed's operators compiled once",
    ("trial_core.observe.report.live_report", "trial_core.observe.trackers"): "the report stores "
    "the driver's TensorBoard files; the name of their folder is a tracker's",
}
"""A module that imports a room above its own, and why. There are to be fewer."""

FACES = {"trial_core", "trialflow", "trial_core.pytorch", "trial_core.deepspeed"}
"""Packages whose `__init__` only names what lies elsewhere, on first use."""


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
FOLDERS = {"trial_core.processes", "trial_core.observe"}
"""Packages of rooms, with nothing of their own."""


def room_of(module: str) -> int:
    """The place of a module's room in `ROOMS`."""
    found = [
        (len(room.name), place)
        for place, room in enumerate(ROOMS)
        if f"{module}.".startswith(f"{room.name}.")
    ]
    assert found, f"{module} is in no room: list its package in ROOMS"
    return max(found)[1]


def is_rank_half(module: str) -> bool:
    return module not in FOLDERS and (
        ROOMS[room_of(module)].is_of_ranks if module not in FACES else module.count(".") == 1
    )


@functools.cache
def imported(module: str) -> set[str]:
    """Our own modules that `module` imports, also inside functions and for types alone."""
    return _of_ours(ast.walk(_tree(module))) - {module}


def imported_at_load(module: str) -> set[str]:
    """Our own modules that `module` imports when it is loaded (not inside functions)."""
    return _of_ours(_run_at_load(_tree(module).body)) - {module}


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


def test_imports_point_down() -> None:
    """A module imports its own room and the rooms below it, wherever the import stands. Each
    exception is needed."""
    upwards = {
        (module, ROOMS[room_of(other)].name)
        for module in MODULES.keys() - FACES - FOLDERS
        for other in imported(module) - FACES
        if room_of(other) < room_of(module)
    }
    assert upwards == EXCEPTIONS.keys()
    assert len(EXCEPTIONS) <= 9


def test_the_controller_knows_no_deepspeed() -> None:
    """One controller for all kinds of trial: what differs lies behind `TrialAdapter`."""
    rooms = {"trial_core.rank", "trial_core.rank.data", "trial_core.rank.state_files"}
    controller = [m for m in MODULES.keys() - FACES - FOLDERS if ROOMS[room_of(m)].name in rooms]
    texts = {module: MODULES[module].read_text() for module in controller}
    assert [m for m, text in texts.items() if re.search(r"(import|from) .*deepspeed", text)] == []


def test_names_of_deepspeeds_files_are_known_to_deepspeeds_room_alone() -> None:
    """Its neighbours store files of any name. The import knows what others write."""
    knowing = {m for m, path in MODULES.items() if "zero_pp_rank" in path.read_text()}
    others = {module for module in knowing if not module.startswith("trial_core.deepspeed")}
    assert others == {"trial_core.checkpoint.transfer.import_checkpoint"}


def _tree(module: str) -> ast.Module:
    """A module's syntax tree."""
    return syntax_of(MODULES[module])


def test_a_name_means_one_thing() -> None:
    """No two classes or aliases of types have one name, but for Determined's in its client."""
    homes = defaultdict(list)
    for module in MODULES.keys() - {"trial_core.experimental.client"}:
        for node in _tree(module).body:
            if (name := _defined_type(node)) is not None:
                homes[name].append(module)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def _defined_type(node: ast.stmt) -> str | None:
    """The class or alias of a type that a statement defines, or None."""
    if isinstance(node, ast.ClassDef):
        return node.name
    if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
        return None
    name = node.targets[0].id
    is_variable = ast.unparse(node.value).startswith(("TypeVar(", "ParamSpec("))
    is_type = re.fullmatch(r"[A-Z]\w*[a-z]\w*", name) is not None
    return name if is_type and not is_variable else None


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
    with_numpy = {"trial_core.search.optuna_sampler"}  # Optuna; imported if a search uses it
    driver_half = sorted({m for m in MODULES if not is_rank_half(m)} - with_numpy)
    assert {
        "trialflow.flows.train",
        "trial_core.driver.drive",
        "trialflow.tasks.stages",
        "trial_core.processes.slots.rank_main",
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


MARKS = ("<!-- rooms: python -m tests.test_architecture -->\n", "<!-- end of rooms -->\n")


API = {
    "callbacks", "cluster_info", "core", "deepspeed", "experimental", "pytorch", "trackers",
    "trainer", "transformers", "util",
}  # fmt: skip
"""The packages and modules of `trial_core` that users import."""


def inner_rooms() -> list[str]:
    """The folders and modules of `trial_core` besides its API, from top to bottom."""
    names = (room.name.split(".") for room in ROOMS if room.name.startswith("trial_core."))
    return [name for name in dict.fromkeys(parts[1] for parts in names) if name not in API]


def test_a_newcomer_has_thirteen_rooms_to_learn() -> None:
    """Besides the API. Each is in the list, and nothing else lies in the folder."""
    there = {path.stem for path in (ROOT / "trial_core").iterdir() if path.suffix in ("", ".py")}
    assert there - {"__init__", "__pycache__"} == API | {*inner_rooms()}
    assert len(inner_rooms()) <= 13


def table() -> str:
    """The rooms from top to bottom, for docs/architecture.md."""
    lines = ["| room | contents | imports torch |", "|---|---|---|"]
    for room in ROOMS:
        name = room.name.removeprefix("trialflow.").replace(".", "/")
        lines.append(f"| `{name}` | {room.purpose} | {'yes' if room.is_of_ranks else ''} |")
    return "\n".join(["", *lines, "", ""])


def chain() -> str:
    """The folders from top to bottom, for README.md."""
    names = [room.name.removeprefix("trialflow.").split(".") for room in ROOMS]
    outer = dict.fromkeys(name[0] for name in names)
    shown = " → ".join(f"`{name}`" for name in outer)
    inner = " ".join(f"`{name}`" for name in inner_rooms())
    return f"- The tree: {shown}; in it, below the API, from top to bottom: {inner}.\n"


PRINTED = {"docs/architecture.md": table, "README.md": chain}


@pytest.mark.parametrize("page", PRINTED)
def test_the_pages_name_the_rooms(page: str) -> None:
    """As they are listed here."""
    text = (ROOT / page).read_text()
    assert text.partition(MARKS[0])[2].partition(MARKS[1])[0] == PRINTED[page]()


if __name__ == "__main__":
    for page, printed in PRINTED.items():
        before, mark, rest = (ROOT / page).read_text().partition(MARKS[0])
        (ROOT / page).write_text(before + mark + printed() + MARKS[1] + rest.partition(MARKS[1])[2])
