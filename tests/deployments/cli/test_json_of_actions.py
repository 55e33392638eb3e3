"""Commands that act print one object of what they did. `conftest` compares each with its type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.deployments.cli.test_clean_runs import clean, finished
from tests.support.cli import write_experiment
from trial_core.checkpoint.store import CheckpointStore
from trialflow.deployments.cli.console import REFUSED
from trialflow.deployments.cli.main import main


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in an empty folder; returns all of stdout, parsed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))

    def printed(*words: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main([*words, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return printed


def test_a_new_trial(run: Any, tmp_path: Path) -> None:
    done = run("init", "pytorch", "mine")
    assert done["folder"] == str(tmp_path / "mine")
    assert all((tmp_path / "mine" / name).is_file() for name in done["files"])
    assert done["next"] == ["cd mine", "trialflow train experiment.yaml"]


def test_a_migration(run: Any, tmp_path: Path) -> None:
    """With and without --diff."""
    (tmp_path / "old").mkdir()
    source = tmp_path / "old" / "model_def.py"
    source.write_text("import determined as det\nfrom determined import keras\n")
    path = str(Path("old") / "model_def.py")
    assert run("migrate", "old", "--diff")["is_dry_run"]
    assert "determined as det" in source.read_text()
    done = run("migrate", "old")
    assert (done["is_dry_run"], done["changed"]) == (False, [path])
    assert [(each["path"], each["line"]) for each in done["findings"]] == [(path, 2)]


def test_a_log(run: Any, tmp_path: Path) -> None:
    """The whole text, once."""
    (tmp_path / "home" / "toy-1" / "logs").mkdir(parents=True)
    (tmp_path / "home" / "toy-1" / "logs" / "rank-1.log").write_text("a\nb\x1b[31m\n")
    done = run("logs", "toy", "--rank", "1")
    assert (done["trial"], done["rank"], done["text"]) == ("toy-1", 1, "a\nb\x1b[31m\n")
    assert main(["logs", "toy", "--follow", "--json"]) == REFUSED


def test_folders_that_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And kept ones; it cannot ask."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path))
    store = CheckpointStore(str(tmp_path / "checkpoints"))
    finished(store, "old-1")
    finished(store, "young-1", is_old=False)
    assert clean(store, "--json") == REFUSED
    assert (tmp_path / "old-1").exists()
    assert clean(store, "--json", "--yes") == 0
    done = json.loads(capsys.readouterr().out)
    assert [each["trial"] for each in done["removed"]] == ["old-1"]
    assert [each["trial"] for each in done["kept"]] == ["young-1"]


def test_an_experiment_and_its_code(run: Any, tmp_path: Path) -> None:
    """The experiment, the files that checkpoints get, and the JobSet."""
    (tmp_path / "code" / ".git").mkdir(parents=True)
    (tmp_path / "code" / ".git" / "config").write_text("of git")
    (tmp_path / "code" / "a_trial.py").write_text("class Mine: ...\n")
    write_experiment(
        tmp_path, code=str(tmp_path / "code"), entrypoint="a_trial:Mine",
        resources={"slots_per_trial": 4}, checkpoint_storage="s3://bucket/runs",
    )  # fmt: skip
    assert run("config")["config"]["name"] == "toy"
    assert list(run("config", "--code", "--storage", str(tmp_path / "s"))["files"]) == [
        "a_trial.py"
    ]
    assert run("jobset", "--nodes", "2")["jobset"]["kind"] == "JobSet"
