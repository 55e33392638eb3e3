"""`trialflow checkpoints pin`, `unpin` and `prune`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deployments.cli.stored import run
from tests.support.cli import write_experiment
from tests.support.manifests import (
    commit_files,
    leave_unfinished_upload,
    new_manifest,
    stored_keys,
)
from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import Manifest, utc_now
from trial_core.checkpoint.retention.deletion_markers import mark_deletion
from trial_core.checkpoint.store import CheckpointStore
from trial_core.models.registry import Registry
from trialflow.deployments.cli.main import main

RULES = ("--save-trial-latest", "1", "--metric", "loss")


def batches(tmp_path: Path) -> list[int]:
    """The batches of the checkpoints in the storage."""
    store = CheckpointStore(str(tmp_path / "storage"))
    return [manifest.progress.batches_trained for manifest in store.list()]


def test_dry_run(
    history: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row for each checkpoint, with action and reason; nothing is deleted."""
    assert run(tmp_path, "prune", *RULES, "--dry-run") == 0
    first, _, header, _, *rows, _, total = capsys.readouterr().out.splitlines()
    assert first == "keeping save_trial_best 1, save_trial_latest 1, save_experiment_best 0"
    assert header.split() == ["action", "uuid", "trial", "batches", "saved", "size", "why"]
    assert [(row.split()[0], row.split()[3]) for row in rows] == [
        ("delete", "7"),
        ("keep", "11"),
        ("delete", "13"),
        ("keep", "17"),
    ]
    assert rows[1].rstrip().endswith("best of its trial (loss 0.2)")
    assert total == "to delete: 2 of 4 checkpoints, 0 B"
    assert batches(tmp_path) == [7, 11, 13, 17]


@pytest.mark.usefixtures("history")
def test_an_impossible_time_is_shown_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stops neither the list nor the plan."""
    store = CheckpointStore(str(tmp_path / "storage"))
    store.commit(new_manifest(19, created_at="2031-13-41T25:61:61Z"))
    assert run(tmp_path, "list") == 0
    assert run(tmp_path, "prune", *RULES, "--dry-run") == 0
    assert capsys.readouterr().out.count("2031-13-41T25:61:61Z") == 2


def test_prune(history: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--yes` deletes without asking, and prints what was deleted."""
    assert run(tmp_path, "prune", *RULES, "--yes") == 0
    assert f"deleted {history[0].uuid}\ndeleted {history[2].uuid}\n" in capsys.readouterr().out
    assert batches(tmp_path) == [11, 17]


def test_the_interrupted_deletion_of_the_last_checkpoint_is_finished(tmp_path: Path) -> None:
    """Also where no checkpoint is left, and so no plan is made."""
    store = CheckpointStore(str(tmp_path / "storage"))
    manifest = commit_files(store)
    mark_deletion(store, manifest)
    store.storage.delete(manifest.name.key)
    assert run(tmp_path, "prune", *RULES, "--yes") == 0
    assert stored_keys(store) | store.storage.sizes(layout.DELETIONS).keys() == set()


def test_rules_of_an_experiment(
    history: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rules, metric and direction come from `--config`; options and `--set` override them."""
    searcher = {"metric": "loss", "smaller_is_better": False, "max_length": {"batches": 8}}
    path = write_experiment(tmp_path, searcher=searcher, checkpoint_storage={"save_trial_best": 2})
    config = ("--config", str(path))
    assert run(tmp_path, "prune", *config, "--save-trial-latest", "0", "--yes") == 0
    assert batches(tmp_path) == [7, 17]
    assert (
        run(tmp_path, "prune", *config, "--set", "checkpoint_storage.save_trial_best=0", "-y") == 0
    )
    assert batches(tmp_path) == [17]


def test_one_experiment_or_one_trial(
    history: list[Manifest], stored: list[Manifest], tmp_path: Path
) -> None:
    """`--experiment` and `--trial` leave the others alone."""
    rules = ("--save-trial-latest", "0", "--save-trial-best", "0", "--yes")
    assert run(tmp_path, "prune", "--experiment", "gpt", *rules) == 0
    assert batches(tmp_path) == [7, 11, 13, 17]
    assert run(tmp_path, "prune", "--trial", "toy-1", *rules) == 0
    assert batches(tmp_path) == []


@pytest.mark.parametrize(("answer", "left"), [("y", [11, 17]), ("", [7, 11, 13, 17])])
def test_confirmation(
    history: list[Manifest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    left: list[int],
) -> None:
    """On a terminal the command asks; any answer but yes deletes nothing."""
    asked = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or answer)
    assert run(tmp_path, "prune", *RULES) == 0
    assert asked == ["delete 2 checkpoints? [y/N] "]
    assert batches(tmp_path) == left


def test_as_json(
    history: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--json` prints the plan and what was deleted."""

    def pruned(how: str) -> Any:
        assert run(tmp_path, "prune", *RULES, how, "--json") == 0
        return json.loads(capsys.readouterr().out)

    dry, done = pruned("--dry-run"), pruned("--yes")
    assert dry["plan"] == done["plan"]
    assert [(row["batches_trained"], row["action"]) for row in dry["plan"]] == [
        (7, "delete"),
        (11, "keep"),
        (13, "delete"),
        (17, "keep"),
    ]
    assert (dry["is_dry_run"], dry["deleted"]) == (True, [])
    assert (done["is_dry_run"], done["deleted"]) == (False, [history[0].uuid, history[2].uuid])


def test_pins(history: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pin is listed, protects its checkpoint, and can be removed."""
    assert run(tmp_path, "pin", "00000007", "00000013", "--reason", "figure 3") == 0
    assert f"pinned {history[0].uuid} (figure 3)\n" in capsys.readouterr().out
    assert run(tmp_path, "list") == 0
    header, _, first, second, *_ = capsys.readouterr().out.splitlines()
    assert header.split()[-2:] == ["kept", "validation"]
    assert ("pinned" in first, "pinned" in second) == (True, False)
    assert run(tmp_path, "show", "00000007") == 0
    assert "figure 3" in capsys.readouterr().out

    assert run(tmp_path, "prune", *RULES, "--yes") == 0
    assert batches(tmp_path) == [7, 11, 13, 17]
    assert run(tmp_path, "unpin", "00000007") == 0
    assert run(tmp_path, "prune", *RULES, "--yes") == 0
    assert batches(tmp_path) == [11, 13, 17]


def test_holds(history: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A held version is listed with its aliases and stays protected without a pin."""
    registry = Registry(CheckpointStore(str(tmp_path / "storage")))
    for number, manifest in enumerate((history[0], history[2]), start=1):
        registry.register("gpt", manifest, metric="loss", smaller_is_better=True, value=0.25)
        registry.promote("gpt", number)
    assert run(tmp_path, "pin", "00000007") == 0
    assert run(tmp_path, "list") == 0
    _, _, first, second, third, _ = capsys.readouterr().out.splitlines()[1:]
    assert "  pinned, gpt v1 (previous)  " in first
    assert "gpt" not in second
    assert "  gpt v2 (champion)  " in third
    assert run(tmp_path, "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [each["is_pinned"] for each in listed] == [True, False, False, False]
    assert listed[2]["held_by"] == [{"model": "gpt", "version": 2, "alias": "champion"}]
    assert run(tmp_path, "show", "00000013") == 0
    assert "held by model gpt, version 2 (champion)" in capsys.readouterr().out

    assert run(tmp_path, "unpin", "00000007") == 0
    assert (
        f"{history[0].uuid} is still kept, held by model gpt, version 1" in capsys.readouterr().err
    )
    assert run(tmp_path, "prune", "--save-trial-latest", "0", *RULES[2:], "--yes") == 0
    assert batches(tmp_path) == [7, 11, 13]
    assert run(tmp_path, "unpin", "00000013") == 2
    assert "held by model gpt, version 2" in capsys.readouterr().err


def test_pins_as_json(
    history: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--json` prints pins; `list --json` marks pinned checkpoints."""
    assert run(tmp_path, "pin", "00000007", "--reason", "figure 3", "--json") == 0
    (made,) = json.loads(capsys.readouterr().out)["pins"]
    assert (made["uuid"], made["reason"]) == (history[0].uuid, "figure 3")
    assert run(tmp_path, "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [each["is_pinned"] for each in listed] == [True, False, False, False]
    assert run(tmp_path, "unpin", "00000007", "--json") == 0
    assert json.loads(capsys.readouterr().out)["pins"] == [made]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prune"], "no rule says which checkpoints to keep"),
        (["prune", *RULES], "nothing was deleted: give --yes"),
        (["prune", *RULES, "--json"], "--json cannot ask for confirmation"),
        (["prune", "--save-trial-best", "-1"], "save_trial_best: expected an integer of at least"),
        (
            ["prune", "--keep-every-batches", "2", "--keep-every-epochs", "1"],
            "keep_every: expected",
        ),
        (["prune", *RULES, "--experiment", "tiy", "--yes"], "the storage has: toy"),
        (["prune", *RULES, "--trial", "toy-2", "--yes"], "trial 'toy-2' has no checkpoint"),
        (["prune", *RULES, "--set", "name=x"], "give --config as well"),
        (["prune", "--leftovers-only", "--leftovers-after-days", "0.5"], "at least 1 day, got 0.5"),
        (["pin"], "CHECKPOINTS requires an argument"),
        (["pin", "abc"], "begins with 'abc'"),
        (["unpin", "00000007"], "none is pinned"),
    ],
)
def test_refusals(
    history: list[Manifest],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    """The exit code is 2, the error says why, and nothing is deleted."""
    assert run(tmp_path, *arguments) == 2
    assert message in capsys.readouterr().err
    assert batches(tmp_path) == [7, 11, 13, 17]


def test_empty_storage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty storage is no error, so that pruning can be scheduled before the first run."""
    storage = str(tmp_path / "nothing")
    assert main(["checkpoints", "prune", *RULES, "--yes", "--storage", storage]) == 0
    assert capsys.readouterr().out == f"no checkpoints in file://{storage}\n"


@pytest.fixture
def leftovers(tmp_path: Path) -> list[str]:
    """Leftovers of two killed trials, an old one and a recent one."""
    store = CheckpointStore(str(tmp_path / "storage"))
    return [
        leave_unfinished_upload(store, "toy-2"),
        leave_unfinished_upload(store, "toy-3", utc_now()),
    ]


def uploads(tmp_path: Path) -> set[str]:
    """The uuids that have files in the storage."""
    storage = CheckpointStore(str(tmp_path / "storage")).storage
    return {key.split("/")[1] for key in storage.sizes(layout.CHECKPOINTS)}


def test_dry_run_shows_leftovers(
    history: list[Manifest],
    leftovers: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A row for each leftover, with action and reason; nothing is deleted."""
    assert run(tmp_path, "prune", *RULES, "--dry-run") == 0
    shown = capsys.readouterr().out.partition("uploads that were never committed:\n")[2]
    _, header, _, *rows, _, total = shown.splitlines()
    assert header.split() == ["action", "uuid", "trial", "begun", "files", "size", "why"]
    assert [row.split()[:3] for row in rows] == [
        ["delete", leftovers[0][:8], "toy-2"],
        ["keep", leftovers[1][:8], "toy-3"],
    ]
    assert "never committed; its trial was last active at 2001-05-09" in rows[0]
    assert "and is presumed dead after 7 days" in rows[1]
    assert total == "to delete: 1 of 2 leftovers, 4 B"
    assert run(tmp_path, "prune", *RULES, "--dry-run", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["leftovers"]
    assert [row["action"] for row in listed] == ["delete", "keep"]
    assert uploads(tmp_path) == {*leftovers}


def test_leftovers_are_deleted(
    history: list[Manifest], leftovers: list[str], tmp_path: Path
) -> None:
    """Old leftovers are deleted with the checkpoints; a recent upload stays."""
    assert run(tmp_path, "prune", *RULES, "--yes") == 0
    assert batches(tmp_path) == [11, 17]
    assert uploads(tmp_path) == {leftovers[1]}


def test_leftovers_only(
    history: list[Manifest],
    leftovers: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`--leftovers-only` needs no rules and deletes no checkpoint."""
    arguments = ("prune", "--leftovers-only", "--trial", "toy-2", "--json")
    assert run(tmp_path, *arguments, "--yes") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["swept"], said["freed_bytes"], said["plan"]) == ([leftovers[0]], 4, [])
    assert [(row["uuid"], row["action"]) for row in said["leftovers"]] == [(leftovers[0], "delete")]
    assert batches(tmp_path) == [7, 11, 13, 17]
    assert run(tmp_path, "prune", "--leftovers-only", "--trial", "toy-2") == 0
    assert capsys.readouterr().out == f"no leftovers in file://{tmp_path}/storage\n"


def test_a_trial_that_has_only_leftovers(
    history: list[Manifest], leftovers: list[str], tmp_path: Path
) -> None:
    """A trial with leftovers and no checkpoint is no error."""
    assert run(tmp_path, "prune", *RULES, "--trial", "toy-2", "--yes") == 0
    assert uploads(tmp_path) == {leftovers[1]}
    assert batches(tmp_path) == [7, 11, 13, 17]
