"""Which texts of stored objects lead to files, keys, modules or servers, and that all are checked.

`tests/deployments/cli/test_hostile_texts.py` holds the same for what commands do.
"""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect
import pytest

from tests.support.syntax import syntax_of
from trial_core.checkpoint import layout
from trial_core.checkpoint.layout import StoredPath, checked_path, checked_place
from trial_core.checkpoint.manifest import FileEntry
from trial_core.errors import CheckpointDamaged

ROOT = Path(__file__).parents[3]
PRODUCT = ("trial_core", "flows", "tasks", "deployments")

SHOWN = """
trial_core.checkpoint.manifest: Manifest.experiment Manifest.writer Manifest.metrics
  Manifest.versions Manifest.config_digest Manifest.hyperparameters Manifest.earlier_validation
  Manifest.config Manifest.environment_digest Manifest.changes
trial_core.checkpoint.intents: Intent.writer Intent.created_at
trial_core.checkpoint.retention.claims: Claim.trial Claim.by Claim.owner Claim.process
trial_core.checkpoint.retention.protections: Protection.by Protection.at Protection.reason
trial_core.checkpoint.retention.deletion_markers: Deletion.by
trial_core.checkpoint.fencing: AttemptRecord.trial AttemptRecord.attempt AttemptRecord.by
  AttemptRecord.at AttemptRecord.storage
trial_core.checkpoint.storage_mark: StorageMark.id StorageMark.by StorageMark.at
trial_core.checkpoint.numbered_log:
trial_core.models.records: Version.experiment Version.metric Version.at Version.by
  Version.note Move.at Move.by Move.run Move.why
trial_core.models.journal: RetrainingPlan.scheduled_at RetrainingPlan.begun_at RetrainingPlan.data
  RetrainingPlan.note Champion.metrics Challenger.metrics Challenger.why_none Challenger.trial
  Challenger.hyperparameters PromotionDecision.why
  StageRecord.what StageRecord.at
trial_core.search.log: SearchRecord.search SearchRecord.at SearchRecord.by Opened.experiment
  Opened.searcher Opened.hyperparameters Opened.data Changed.searcher
  Begun.hyperparameters Exited.why
trial_core.observe.report.history: Point.values Event.at Event.what ReportHistory.written_at
  ReportHistory.ended ReportHistory.links
trial_core.observe.ledger.time_ledger: RunTime.by RunTime.slot_milliseconds
trial_core.observe.trackers.records: Described.parameters Described.tags Metrics.values
  Committed.uuid Committed.url Committed.digest Deleted.uuid Noted.text RunEnded.outcome
  RunEnded.why
trial_core.observe.trackers.journal:
trial_core.observe.trackers.sender: SenderOrder.experiment
trial_core.rank.state_files.built_settings: SavedSettings.data SavedSettings.sample_lists
trial_core.rank.state_files.settings_parts: SavedPart.kind SavedPart.type SavedPart.groups
  SavedPart.parameters
trial_core.rank.core_api.trainer_arguments: TrainerRecord.arguments TrainerRecord.optimizer
trial_core.export.export_checkpoint: _Mark.checkpoint _Mark.trial _Mark.format _Mark.files
"""
"""The modules whose types are decoded from stored objects, each with its texts that are only
shown, compared, or given to the trial."""

SENT = {
    "trial_core.checkpoint.storage.base", "trial_core.checkpoint.transfer.persister_process",
    "trial_core.checkpoint.transfer.upload", "trial_core.driver.script_order",
    "trial_core.messages.envelopes", "trial_core.messages.requests",
    "trial_core.observe.report.run_updates", "trial_core.processes.nodes.node_messages",
    "trial_core.processes.slots.fork_and_reap_ranks", "trial_core.processes.slots.kept_memory",
    "trial_core.processes.slots.launcher", "trial_core.schedule.work",
}  # fmt: skip
"""The modules whose types are sent between processes of one run, and not stored."""

SNIPPET = """\
import os, shutil, subprocess
from importlib import import_module
from pathlib import Path
from urllib.parse import urljoin
from trial_core.checkpoint import layout
def use(text: layout.StoredPath, folder: Path) -> None:
    open(text)
    Path(text)
    folder / text
    folder.joinpath(text)
    folder.with_name(text)
    os.path.join("folder", text)
    os.open(text, os.O_RDONLY)
    shutil.rmtree(text)
    subprocess.run(["cat", text])
    urljoin("https://host", text)
    "https://host/" + text
    import_module(text)
    layout.file_key("uuid", text)
    layout.run_file_key("trial", text)
    open(layout.checked_path(text))  # the only one that is right
"""
SINKS = frozenset({
    "open", "Path", "PurePosixPath", "joinpath", "with_name", "join", "rmtree", "run", "Popen",
    "urlopen", "import_module", "symlink_to", "copyfile", "read", "write", "create", "remove",
    "upload",
})  # fmt: skip
"""The last names of functions that open, join, run or ask."""


def stored_modules() -> list[str]:
    return re.findall(r"^(trial_core[\w.]+):", SHOWN, re.MULTILINE)


def has_free_text(kind: Any) -> bool:
    """Return whether a value may hold a text that its type does not limit."""
    inspect = msgspec.inspect
    if isinstance(kind, inspect.StrType):
        return kind.pattern is None
    if isinstance(kind, inspect.AnyType):
        return True
    if isinstance(kind, inspect.StructType):  # it is in the list itself
        return False
    names = ("key_type", "value_type", "item_type")
    parts = [getattr(kind, name) for name in names if hasattr(kind, name)]
    return any(map(has_free_text, [*parts, *getattr(kind, "types", ())]))


def free_texts() -> Iterator[str]:
    for name in stored_modules():
        kinds = [
            each for each in vars(importlib.import_module(name)).values() if _is_own(each, name)
        ]
        for kind in kinds:
            for field in msgspec.inspect.type_info(kind).fields:
                if field.name in kind.__annotations__ and has_free_text(field.type):
                    yield f"{kind.__name__}.{field.name}"


def _is_own(value: Any, module: str) -> bool:
    is_type = isinstance(value, type) and value.__module__ == module
    return is_type and issubclass(value, msgspec.Struct)


def test_each_stored_text_is_in_the_list() -> None:
    """A new field of a stored object is either checked by a function, or only shown."""
    leading = set(re.findall(r"\b_?[A-Z]\w+\.[a-z]\w*", layout.__doc__ or ""))
    shown = set(re.findall(r"\b_?[A-Z]\w+\.[a-z]\w*", SHOWN))
    assert leading.isdisjoint(shown)
    assert sorted(free_texts()) == sorted(leading | shown)


@pytest.mark.xdist_group("syntax")
def test_each_type_of_stored_objects_is_in_the_list() -> None:
    """A module with a new type says whether objects of it are stored."""
    classes = [
        (".".join(path.relative_to(ROOT).with_suffix("").parts), each.name, each.bases)
        for path in (ROOT / "trial_core").rglob("*.py")
        for each in syntax_of(path).body
        if isinstance(each, ast.ClassDef)
    ]
    types, more = set[str](), {"Struct"}
    while more > types:
        types = more
        more = types | {name for _, name, bases in classes if types & set(map(last_name, bases))}
    there = {module for module, name, _ in classes if name in types}
    assert there == {*stored_modules(), *SENT}


def last_name(node: ast.expr) -> str:
    return ast.unparse(node).partition("[")[0].rpartition(".")[2]


def test_each_check_of_the_list_exists() -> None:
    table = (layout.__doc__ or "").rpartition("checked by")[2]
    checks = set(re.findall(r"^`(\w+)`", table, re.MULTILINE))
    source = "".join(path.read_text("utf-8") for path in (ROOT / "trial_core").rglob("*.py"))
    assert len(checks) > 8
    assert {name for name in checks if f"def {name}(" not in source} == set()


def test_mypy_refuses_a_stored_path_where_files_are_opened(tmp_path: Path) -> None:
    """Also where one is joined, run, imported, asked for, or made a key. A checked one is right."""
    package = tmp_path / "trial_core/checkpoint"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()  # the package's own would have mypy read torch
    shutil.copy(ROOT / "trial_core/checkpoint/layout.py", package)
    shutil.copy(ROOT / "trial_core/errors.py", package.parent)
    (tmp_path / "snippet.py").write_text(SNIPPET)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "snippet.py"],
        cwd=tmp_path, text=True, capture_output=True, check=False,
    )  # fmt: skip
    refused = {int(line) for line in re.findall(r"snippet\.py:(\d+): error", done.stdout)}
    lines = SNIPPET.splitlines()
    first = 2 + lines.index(next(line for line in lines if line.startswith("def")))
    assert refused == set(range(first, len(lines))), done.stdout + done.stderr


def test_paths_in_manifests_have_the_type_that_mypy_refuses() -> None:
    names = {name for name, kind in FileEntry.__annotations__.items() if kind == "StoredPath"}
    assert names == {"path", "stored_at", "copy_at"}


@pytest.mark.xdist_group("syntax")
def test_no_stored_path_is_made_a_text_for_a_file() -> None:
    """mypy lets an f-string and `str` have any value: none of them is opened, joined or asked."""
    wrong = []
    for room in PRODUCT:
        for path in (ROOT / room).rglob("*.py"):
            tree = syntax_of(path)
            for node in ast.walk(tree):
                if any(map(_has_unchecked_text, _sink_arguments(node))):
                    wrong.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}")
    assert wrong == []


def _sink_arguments(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return [node.left, node.right]
    if not isinstance(node, ast.Call):
        return []
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return node.args if name in SINKS else []


def _has_unchecked_text(argument: ast.expr) -> bool:
    """Return whether an f-string or `str` of an entry's texts is an argument."""
    is_text = isinstance(argument, ast.JoinedStr) or (
        isinstance(argument, ast.Call) and getattr(argument.func, "id", "") == "str"
    )
    return is_text and any(
        isinstance(each, ast.Attribute) and each.attr in ("path", "stored_at", "copy_at")
        for each in ast.walk(argument)
    )


@pytest.mark.parametrize("path", ["", "../x", "/x", "a//b", "a/.", "C:x", "a\\b", "manifest.json"])
def test_a_path_that_leaves_the_folder_is_refused(path: str) -> None:
    """So is the place of a file with it."""
    with pytest.raises(CheckpointDamaged, match="not a plain relative path"):
        checked_path(StoredPath(path))
    if path != layout.MANIFEST_NAME:
        with pytest.raises(CheckpointDamaged, match="no file is stored at"):
            checked_place(StoredPath(f"0c5d/{path}"))


@pytest.mark.parametrize(
    "place",
    ["", "../a.pt", "/a.pt", "a.b/c.pt", "0c5d", "0c5d/", "../0c5d/a", "/0c5d/a", "0c\\5d/a"],
)
def test_a_place_without_a_uuid_is_refused(place: str) -> None:
    with pytest.raises(CheckpointDamaged, match="no file is stored at"):
        checked_place(StoredPath(place))


def test_a_plain_path_stays_as_it_is() -> None:
    assert checked_path(StoredPath("a/b.pt")) == "a/b.pt"
    assert checked_place(StoredPath("0c5d/a/b.pt")) == ("0c5d", "a/b.pt")
