"""Texts that a stranger has written into a storage lead neither to files nor to computers.

Every text in every stored object of a trial is replaced in turn: by a path, a URL, or a place that
leads out of the storage. Then the commands that read a storage run on it, and Python reports each
file that they open, each program that they start and each computer that they look for.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import pytest

from tests.support.cli import ROOT, write_experiment
from tests.support.driving import drive, warm
from tests.support.manifests import leave_unfinished_upload
from tests.support.searches import searched
from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.retention.claims import RunClaim
from trial_core.checkpoint.retention.deletion_markers import mark_deletion
from trial_core.checkpoint.retention.protections import pin
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.verified_read import find_damage, note_damage
from trial_core.config import load_config
from trial_core.models.registry import Registry
from trial_core.processes.slots.fork_server import ForkServer
from trialflow.deployments.cli.main import main
from trialflow.flows.server.prefect_settings import environment

pytestmark = pytest.mark.slots

MARKER = "zq9-elsewhere"
# Imported first by each Python process of a command, and executed in the test's: notes what it does
# with a text that has the marker.
SITECUSTOMIZE = f"""
import os, sys

WATCHED = (
    "open", "os.", "shutil.", "subprocess.", "socket.", "glob.", "sqlite3.", "urllib.", "import"
)

def watch(event, arguments):
    if not event.startswith(WATCHED) or event == "os.putenv" or "SEEN" not in os.environ:
        return
    if event == "import":
        arguments = arguments[:1]
    texts = [os.fsdecode(each) if isinstance(each, bytes) else str(each) for each in arguments[:3]]
    if any({MARKER!r} in text for text in texts):
        descriptor = os.open(os.environ["SEEN"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, f"{{event}} {{texts}}\\n".encode())
        os.close(descriptor)

sys.addaudithook(watch)
"""
HOSTILE = (
    f"../../../../../../../../../../../../tmp/{MARKER}",
    f"/tmp/{MARKER}",
    f"file:///tmp/{MARKER}",
    f"https://{MARKER}.invalid/1",
    f"{MARKER}.module:Class",
)
FREE = {
    "config",
    "hyperparameters",
    "parameters",
    "tags",
    "values",
    "versions",
    "metrics",
    "curves",
}
NAMES = {
    "", "uuid", "trial", "path", "stored_at", "checkpoint", "run", "run_dir", "model", "base",
    "entrypoint", "experiment", "needs", "manifest", "name", "unique", "trackers", "id", "search",
    "sampler",
}  # fmt: skip
"""Fields of objects that name something; "": a whole object that is a text."""

# The commands that read a storage, with the names of its trial and its newest checkpoint.
LISTING = (
    "checkpoints list", "runs list", "runs show TRIAL", "models list", "models show toy",
    "checkpoints verify --all", "search list", "search show toy-00000000beef",
)  # fmt: skip
READING = (
    "checkpoints show UUID", "runs compare TRIAL", "logs TRIAL",
    "checkpoints download UUID --to downloaded", "export UUID --to model.safetensors",
)  # fmt: skip
CHANGING = (
    "models rollback toy", "models promote toy 2",
    "checkpoints prune --save-trial-latest 1 --yes",
)  # fmt: skip
SENDING = ("runs sync TRIAL --wait-seconds 5",)


class Leaf(NamedTuple):
    """One text of a stored object.

    Attributes:
        key: the object's key.
        line: its line of JSON, where the object has several.
        path: keys and indices that lead to the text; empty: the whole object is the text.
        is_name: whether it is a name in a mapping, not a value.
    """

    key: str
    line: int = 0
    path: tuple[str | int, ...] = ()
    is_name: bool = False

    @property
    def kind(self) -> str:
        """Equal for texts that the same code reads."""
        key = re.sub(f"(^|/){layout.MANIFESTS}/.*", layout.MANIFESTS, self.key)
        key = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}|toy-[0-9a-f]+|[0-9a-f]{32}|[0-9]+", "*", key)
        path = ["*" if isinstance(each, int) else each for each in self.path]
        for index, each in enumerate(path):
            if each in FREE:  # people choose the names in it
                path[index + 1 :] = ["*"] * (len(path) > index + 1)
                break
        return ".".join([key, *path, "name" if self.is_name else ""])


class Stored(NamedTuple):
    """The objects of a storage, and what its trial and its newest checkpoint are."""

    folder: Path
    trial: str
    newest: Manifest

    def leaves(self) -> list[Leaf]:
        """One text of each kind."""
        found: dict[str, Leaf] = {}
        for file in sorted(self.folder.rglob("*")):
            if file.is_file():
                key = file.relative_to(self.folder).as_posix()
                for leaf in leaves_of(key, file.read_bytes()):
                    found.setdefault(leaf.kind, leaf)
        return list(found.values())

    def change(self, leaf: Leaf, text: str, copy: Path) -> None:
        """Copy the storage, with another text; manifests have right digests."""
        shutil.copytree(self.folder, copy)
        changed = replaced((copy / leaf.key).read_bytes(), leaf, text)
        if leaf.key.startswith(layout.MANIFESTS):
            changed = sealed(json.loads(changed))
        (copy / leaf.key).write_bytes(changed)
        family, _, place = leaf.key.partition("/")
        if family != layout.CHECKPOINTS:
            return
        for file in sorted((copy / layout.MANIFESTS).rglob("*.json")):  # they trust the change
            fields = json.loads(file.read_bytes())
            for entry in [*fields["files"], *([fields["code"]] if fields.get("code") else [])]:
                if entry.get("stored_at", f"{fields['uuid']}/{entry['path']}") == place:
                    entry["size_bytes"] = len(changed)
                    entry["digest"] = f"sha256:{hashlib.sha256(changed).hexdigest()}"
            file.write_bytes(sealed(fields))


def leaves_of(key: str, data: bytes) -> Iterator[Leaf]:
    """The texts in an object of JSON, or of lines of JSON; else it is a text itself, if short."""
    if not key.endswith((".json", ".jsonl")):
        if len(data) < 100 and data.isascii():
            yield Leaf(key)
        return
    lines = data.splitlines() if key.endswith(".jsonl") else [data]
    for line, text in enumerate(lines):
        yield from texts_in(json.loads(text), Leaf(key, line))


def texts_in(value: Any, leaf: Leaf) -> Iterator[Leaf]:
    if isinstance(value, str):
        yield leaf
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for name, each in items:
        inner = leaf._replace(path=(*leaf.path, name))
        yield from texts_in(each, inner)
    if isinstance(value, dict) and value:
        yield leaf._replace(path=(*leaf.path, min(value)), is_name=True)


def replaced(data: bytes, leaf: Leaf, text: str) -> bytes:
    if not leaf.path and not leaf.key.endswith((".json", ".jsonl")):
        return text.encode()
    is_lines = leaf.key.endswith(".jsonl")
    lines = data.splitlines() if is_lines else [data]
    value = json.loads(lines[leaf.line])
    *outer, last = leaf.path
    inner = value
    for step in outer:
        inner = inner[step]
    if leaf.is_name:
        inner[text] = inner.pop(last)
    else:
        inner[last] = text
    lines[leaf.line] = json.dumps(value).encode()
    return b"\n".join(lines) + (b"\n" if is_lines else b"")


def sealed(fields: dict[str, Any]) -> bytes:
    """A manifest with its right digest, as somebody writes it who knows the format."""
    fields.pop("digest", None)
    digest = hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()
    return json.dumps({**fields, "digest": f"sha256:{digest}"}).encode()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, warm_server: ForkServer) -> Stored:
    """The storage of a trial of two checkpoints with records of all kinds around them."""
    folder = tmp_path_factory.mktemp("hostile")
    path = write_experiment(
        folder, trackers=[{"tensorboard": {}}], min_checkpoint_period={"batches": 4},
        resources={"slots_per_trial": 1}, checkpoint_storage={"url": str(folder / "store")},
    )  # fmt: skip
    with warm(warm_server, folder / "home"):
        drive(load_config(path))
    store = CheckpointStore(str(folder / "store"))
    older, newest = store.list()
    registry = Registry(store)
    for manifest in (older, newest):
        registry.register("toy", manifest, metric=None, smaller_is_better=True, value=None)
        registry.promote("toy", registry.versions("toy")[-1].number)
    pin(store, newest.uuid)
    leave_unfinished_upload(store, newest.trial)
    RunClaim(store, "toy-00000001", newest.uuid).__enter__()
    mark_deletion(store, older)
    other = msgspec.structs.replace(older.files[0], digest=f"sha256:{'0' * 64}")
    note_damage(store.storage, older.uuid, find_damage(store.storage, older.uuid, [other]))
    (state,) = (folder / "store/runs" / newest.trial).rglob("trackers/tensorboard.json")
    state.write_text(json.dumps({**json.loads(state.read_text()), "sent": 0}))
    searched(store.storage, failures={1: "out of memory"})
    assert {path.name for path in (folder / "store").iterdir()} >= {*layout.FAMILIES, layout.MARK}
    return Stored(folder / "store", newest.trial, newest)


def commands(stored: Stored, leaf: Leaf) -> list[list[str]]:
    """The commands that read the text's object; those that change the storage come last."""
    asked: tuple[str, ...] = (*LISTING, *READING, *CHANGING)
    if "/trackers/" in leaf.key:
        asked = SENDING
    elif leaf.key.startswith(layout.CHECKPOINTS):
        asked = READING
    names = {"TRIAL": stored.trial, "UUID": stored.newest.uuid}
    return [
        [*(names.get(word, word) for word in each.split()), "--storage", "store"] for each in asked
    ]


@functools.cache
def watch_this_process() -> None:
    """For good: Python has no means to remove an audit hook. It returns at once without SEEN."""
    exec(SITECUSTOMIZE, {})


def strays(stored: Stored, folder: Path, cases: list[tuple[Leaf, str]]) -> dict[str, str]:
    """What the commands have done elsewhere, by the text that was replaced and its new value."""
    (folder / "first").mkdir(parents=True)
    (folder / "first/sitecustomize.py").write_text(SITECUSTOMIZE)
    watch_this_process()
    found = {}
    with environment({}):  # promotions change Prefect's settings
        for index, (leaf, text) in enumerate(cases):
            place = folder / str(index)
            place.mkdir()
            stored.change(leaf, text, place / "store")
            variables = {
                "SEEN": str(place / "seen"), "TRIALFLOW_HOME": str(place / "home"),
                "PYTHONPATH": f"{folder / 'first'}:{ROOT}",
            }  # fmt: skip
            with (
                patch.dict(os.environ, variables), chdir(place),
                redirect_stdout(StringIO()), redirect_stderr(StringIO()),
            ):  # fmt: skip
                for arguments in commands(stored, leaf):
                    main(arguments)  # a user's error is an expected answer
            if (place / "seen").exists():
                found[f"{leaf.kind} = {text}"] = (place / "seen").read_text()
    return found


def test_no_name_of_a_storage_leads_elsewhere(stored: Stored, tmp_path: Path) -> None:
    """Every second text that names a trial, a checkpoint, a file, a run, a folder or a module."""
    leaves = [leaf for leaf in stored.leaves() if str((leaf.path or ("",))[-1]) in NAMES]
    cases = [(leaf, HOSTILE[index % 2]) for index, leaf in enumerate(leaves[::2])]
    assert len(cases) > 10
    assert strays(stored, tmp_path / "cases", cases) == {}


@pytest.mark.long
@pytest.mark.parametrize("text", HOSTILE, ids=["up", "absolute", "url", "host", "module"])
def test_no_text_of_a_storage_leads_elsewhere(stored: Stored, tmp_path: Path, text: str) -> None:
    """Every text, those that people choose too."""
    cases = [(leaf, text) for leaf in stored.leaves()]
    assert len(cases) > 100
    assert strays(stored, tmp_path / "cases", cases) == {}
