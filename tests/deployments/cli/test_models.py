"""`trialflow models` on a real local store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.deployments.cli.stored import UUIDS
from tests.support.cli import write_experiment
from tests.support.events import check_fields, events_about
from tests.support.manifests import FILES, commit_files, new_manifest, stage
from tests.support.prefect import PrefectServer
from tests.support.searches import search_experiment, searched
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.upload import upload_files
from trial_core.models.journal import Journal, PromotionDecision
from trial_core.models.registry import Registry
from trial_core.schedule.sequencer import Progress
from trialflow.deployments.cli.main import main
from trialflow.tasks.events import CHAMPION


def models(tmp_path: Path, *arguments: str) -> int:
    """Run a command on the storage. Returns the exit code."""
    return main(["models", *arguments, "--storage", str(tmp_path / "storage")])


def registry(tmp_path: Path) -> Registry:
    return Registry(CheckpointStore(f"file://{tmp_path}/storage"))


@pytest.fixture
def two_versions(stored: list[Manifest], tmp_path: Path) -> Registry:
    """Model gpt with two versions; version 1 is champion."""
    made = registry(tmp_path)
    for manifest, value in zip(stored, (0.25, float("nan")), strict=True):
        made.register("gpt", manifest, metric="loss", smaller_is_better=True, value=value)
    made.promote("gpt", 1, run="run-1", why="no champion before")
    return made


def printed_json(capsys: pytest.CaptureFixture[str]) -> Any:
    """What was printed, which must be standard JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(capsys.readouterr().out, parse_constant=refuse)


def test_no_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty list names the storage; showing a model is an error."""
    assert models(tmp_path, "list") == 0
    assert capsys.readouterr().out == f"no models in file://{tmp_path}/storage\n"
    assert models(tmp_path, "show", "gpt") == 2
    assert "models there: none" in capsys.readouterr().err


def test_list(
    two_versions: Registry, stored: list[Manifest], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A line per model: its aliases, its versions, and the champion's metric."""
    two_versions.register("bare", stored[0], metric=None, smaller_is_better=True, value=None)
    assert models(tmp_path, "list") == 0
    header, _, bare, gpt = capsys.readouterr().out.splitlines()
    assert header.split() == ["model", "champion", "previous", "versions", "since", "value"]
    assert bare.split() == ["bare", "none", "1"]
    assert gpt.split()[:3] == ["gpt", "1", "2"]
    assert gpt.rstrip().endswith("loss 0.25")
    assert models(tmp_path, "list", "--json") == 0
    first, second = printed_json(capsys)["models"]
    assert (first["model"], first["champion"], first["versions"]) == ("bare", None, 1)
    assert (second["champion"], second["checkpoint"]) == (1, UUIDS[0])


def test_an_unreadable_model(
    two_versions: Registry, stored: list[Manifest], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """It is a warning; the others are listed."""
    two_versions.register("bare", stored[0], metric=None, smaller_is_better=True, value=None)
    (tmp_path / "storage/models/bare/versions/000001.json").write_text('{"number": 2}')
    assert models(tmp_path, "list") == 0
    seen = capsys.readouterr()
    _, _, bare, gpt = seen.out.splitlines()
    assert bare.split() == ["bare", "unreadable"]
    assert gpt.split()[:3] == ["gpt", "1", "2"]
    assert "model bare: " in seen.err
    assert "000001.json cannot be read" in seen.err
    assert models(tmp_path, "list", "--json") == 0
    first, second = printed_json(capsys)["models"]
    assert "000001.json" in first["problem"]
    assert second["champion"] == 1


def test_the_outcome_of_each_version(
    two_versions: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the journal of its retraining, or from the move that promoted it."""
    for number, run in enumerate(["run-3", "run-4", "run-5"]):
        uuid, staged = f"{number}" * 8 + UUIDS[0][8:], stage(tmp_path / run, FILES)
        files = upload_files(two_versions.store, uuid, staged, 0)
        manifest = new_manifest(7, uuid=uuid, files=files)
        two_versions.store.commit(manifest)
        two_versions.register(
            "gpt", manifest, metric="loss", smaller_is_better=True, value=0.5, run=run
        )
    kept = PromotionDecision(promoted=False, why="worse by 0.25")
    Journal(two_versions.store, "gpt", "run-3").write("outcome", kept)
    two_versions.promote("gpt", 4, run="run-4", why="better by 0.1")
    two_versions.promote("gpt", 1, why="back by hand")
    assert models(tmp_path, "show", "gpt", "--json") == 0
    assert [version["became"] for version in printed_json(capsys)["versions"]] == [
        "promoted: back by hand",
        "registered, not promoted",
        "not promoted: worse by 0.25",
        "promoted: better by 0.1",
        "run run-5 has not decided",
    ]
    assert models(tmp_path, "show", "gpt") == 0
    assert "not promoted: worse by 0.25" in capsys.readouterr().out


def test_show(two_versions: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Versions with their aliases; moves with who made them and why."""
    two_versions.promote("gpt", 2, why="by hand")
    assert models(tmp_path, "show", "gpt") == 0
    out = capsys.readouterr().out
    versions, moves = (part.splitlines() for part in out.split("\n\n"))
    assert [line.split()[:5] for line in versions[2:]] == [
        ["1", "previous", "aaaaaaaa", "gpt-7", "7"],
        ["2", "champion", "aaaaaaab", "gpt-11", "11"],
    ]
    assert "run run-1" in moves[2]
    assert moves[3].rstrip().endswith("by hand")
    assert models(tmp_path, "show", "gpt", "--json") == 0
    model = printed_json(capsys)
    assert [version["alias"] for version in model["versions"]] == ["previous", "champion"]
    assert [move["champion"] for move in model["moves"]] == [1, 2]


def test_a_version_whose_checkpoint_was_deleted(
    two_versions: Registry, stored: list[Manifest], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """It is shown as deleted."""
    two_versions.store.delete(stored[1])
    assert models(tmp_path, "show", "gpt") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[2:4]] == ["champion", "deleted"]
    assert models(tmp_path, "show", "gpt", "--json") == 0
    assert [each["is_deleted"] for each in printed_json(capsys)["versions"]] == [False, True]


def test_promote_and_roll_back(
    two_versions: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The champion is printed, and how to roll back."""
    assert models(tmp_path, "promote", "gpt", "2", "--why", "it is nicer") == 0
    seen = capsys.readouterr()
    assert seen.out == "version 2 is champion of model gpt; before: version 1\n"
    place = f"--storage {tmp_path / 'storage'}"
    assert seen.err == f"to roll back: trialflow models rollback gpt {place}\n"
    assert two_versions.moves("gpt")[-1].why == "it is nicer"
    assert models(tmp_path, "promote", "gpt", "2") == 0
    assert capsys.readouterr().out == (
        "version 2 is champion of model gpt already; before: version 1\n"
    )
    assert models(tmp_path, "rollback", "gpt", "--json") == 0
    assert (printed_json(capsys)["champion"], len(two_versions.moves("gpt"))) == (1, 3)


def test_promote_a_checkpoint(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is registered once, with the metric of the experiment."""
    path = write_experiment(
        tmp_path, searcher={"metric": "val_loss", "max_length": {"batches": 8}},
        checkpoint_storage=str(tmp_path / "storage"),
    )  # fmt: skip
    for _ in range(2):
        command = ["models", "promote", "gpt", "--checkpoint", "aaaaaaab", "--config", str(path)]
        assert main(command) == 0
    (version,) = registry(tmp_path).versions("gpt")
    assert (version.checkpoint, version.metric) == (UUIDS[1], "val_loss")
    assert registry(tmp_path).champion("gpt") == version


def test_promote_the_best_of_a_search(
    two_versions: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint of its best result is a version with the search's metric, and is champion."""
    storage = two_versions.store.storage
    found = searched(storage, "toy-beef", search_experiment(metric="val_loss"), results=0)
    arguments = ("promote", "best", "--search", "toy")
    assert models(tmp_path, *arguments) == 2
    assert "search toy-beef has no result yet" in capsys.readouterr().err
    for uuid, loss in ((UUIDS[1], 0.25), (UUIDS[0], 0.5)):
        leg = found.next(())
        assert leg is not None
        found.reached(leg, 4, {"val_loss": loss}, uuid)
    for _ in range(2):
        assert models(tmp_path, *arguments) == 0
    (version,) = two_versions.versions("best")
    assert (version.checkpoint, version.metric) == (UUIDS[1], "val_loss")
    (move,) = two_versions.moves("best")
    assert move.why == "the best of search toy-beef: trial 0, val_loss 0.25"
    assert models(tmp_path, "promote", "gpt", "--search", "toy", "--why", "it is nicer") == 0
    assert two_versions.moves("gpt")[-1].why == "it is nicer"
    assert models(tmp_path, "promote", "best", "--search", "zoo") == 2
    assert "there is no search 'zoo'" in capsys.readouterr().err


def test_promote_the_best_of_a_search_whose_checkpoint_was_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A better one of its trial, saved between rungs, takes its place, and is told; no worse one
    does."""
    store = registry(tmp_path).store
    found = searched(store.storage, "toy-beef", search_experiment(metric="val_loss"), results=0)
    leg = found.next(())
    assert leg is not None
    found.reached(leg, 4, {"val_loss": 0.25}, UUIDS[0])
    config = {"searcher": {"metric": "val_loss"}}
    for batches, loss in ((9, 0.5), (5, 0.125)):
        manifest = commit_files(
            store, batches, trial=leg.trial.id, metrics={"validation": {"val_loss": loss}},
            config=config, progress=Progress(batches_trained=batches, validated_at=batches),
        )  # fmt: skip
        is_as_good = loss < 0.25
        code = models(tmp_path, "promote", "best", "--search", "toy")
        assert code == (0 if is_as_good else 2)
        told = capsys.readouterr().err
        assert f"checkpoint {UUIDS[0]} of the best result is gone or damaged" in told
        assert (f"has one as good or better, {manifest.uuid} of batch 5" in told) == is_as_good
    (version,) = registry(tmp_path).versions("best")
    assert (version.checkpoint, version.value) == (manifest.uuid, 0.125)
    assert registry(tmp_path).moves("best")[-1].why.endswith("better at batch 5, which was kept")
    assert main(["search", "show", "toy", "--json", "--storage", store.url]) == 0
    assert printed_json(capsys)["best_checkpoint"] == manifest.uuid


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (("promote", "gpt", "1", "--search", "toy"), 2, "give one of: the number"),
        (("promote", "gpt"), 2, "give one of: the number of a version"),
        (("promote", "gpt", "1", "--checkpoint", "aaaaaaaa"), 2, "give one of: the number"),
        (("promote", "gpt", "7"), 2, "model gpt has no version 7; its last ones: 1, 2"),
        (("promote", "gtp", "1"), 2, "there is no model 'gtp'"),
        (("promote", "gpt", "--checkpoint", "cccc"), 2, "begins with 'cccc'"),
        (("rollback", "gpt"), 2, "there is no previous one"),
        (("rollback", "gtp"), 2, "there is no model 'gtp'"),
    ],
)
def test_refused_commands(
    two_versions: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...], code: int, problem: str,
) -> None:  # fmt: skip
    """The error says what exists; nothing is moved."""
    assert models(tmp_path, *arguments) == code
    assert problem in capsys.readouterr().err
    assert len(two_versions.moves("gpt")) == 1


def test_a_damaged_checkpoint_is_not_promoted(
    two_versions: Registry, stored: list[Manifest], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The error names the file."""
    entry = max(stored[1].files, key=lambda file: file.size_bytes)
    path = tmp_path / "storage" / "checkpoints" / UUIDS[1] / entry.path
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert models(tmp_path, "promote", "gpt", "2") == 1
    assert entry.path in capsys.readouterr().err
    assert len(two_versions.moves("gpt")) == 1


@pytest.mark.server
def test_a_configured_server_is_told(
    two_versions: Registry, prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """Of each move, once."""
    with prefect_server.configured():
        assert models(tmp_path, "promote", "gpt", "2", "--why", "nicer") == 0
        assert models(tmp_path, "promote", "gpt", "2") == 0
        assert models(tmp_path, "rollback", "gpt") == 0
    for version, kind, why in zip(
        two_versions.versions("gpt"), ("rollback", "promote"), ("", "nicer"), strict=True
    ):
        (event,) = events_about(prefect_server, f"trialflow.checkpoint.{version.checkpoint}", 1)
        check_fields(event)
        payload = event["payload"]
        found = (event["event"], payload["kind"], payload["why"], payload["version"])
        assert found == (CHAMPION, kind, why, version.number)
