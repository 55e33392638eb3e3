"""Commands find ./experiment.yaml; an option takes precedence; nothing is deleted by a guess."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deployments.cli.stored import UUIDS
from tests.support.cli import write_experiment
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.models.registry import Registry
from trialflow.deployments.cli.experiment_options import Changes
from trialflow.deployments.cli.flow_run import FlowRun
from trialflow.deployments.cli.main import main


@pytest.fixture
def here(stored: list[Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: experiment.yaml, whose storage has two checkpoints and a model."""
    write_experiment(
        tmp_path, checkpoint_storage={"url": str(tmp_path / "storage"), "save_trial_latest": 1}
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    registry = Registry(CheckpointStore(str(tmp_path / "storage")))
    registry.register("gpt", stored[0], metric="val_loss", smaller_is_better=True, value=0.25)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("checkpoints list", "gpt-11"),
        ("checkpoints show aaaaaaaa", UUIDS[0]),
        ("checkpoints verify --all", "gpt-11"),
        ("checkpoints pin aaaaaaaa", UUIDS[0]),
        ("models list", "gpt"),
        ("models show gpt", "aaaaaaaa"),
        ("models promote gpt 1", "version 1 is champion"),
    ],
)
def test_the_storage_of_the_experiment_in_the_working_folder(
    here: Path, command: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --config and --storage."""
    assert main(command.split()) == 0
    assert shown in capsys.readouterr().out


def test_a_named_storage_takes_precedence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --storage, ./experiment.yaml is not even read."""
    (here / "experiment.yaml").write_text("no experiment")
    assert main(["checkpoints", "list", "--storage", "elsewhere"]) == 0
    assert capsys.readouterr().out == f"no checkpoints in file://{here}/elsewhere\n"


def test_an_experiment_file_of_another_name(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its storage is used only if it is named, which the command says. Other YAML is not named."""
    (here / "experiment.yaml").rename(here / "const.yaml")
    (here / "compose.yaml").write_text("services: {}\n")
    assert main(["checkpoints", "list"]) == 0
    assert "there is no experiment.yaml here" in (said := capsys.readouterr().err)
    assert "for example --config const.yaml" in said


def test_a_mistake_in_a_file_that_was_not_named(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error says why that file was read, and how to do without it."""
    write_experiment(here, sercher=1)
    assert main(["checkpoints", "list"]) == 2
    message = capsys.readouterr().err
    assert 'did you mean "searcher"' in message
    assert "experiment.yaml is read because neither --config nor --storage is given" in message


@pytest.mark.parametrize(
    ("file", "changes", "options"),
    [
        ("experiment.yaml", Changes(), ""),
        ("a b.yaml", Changes(["name=x"]), " --config 'a b.yaml'"),
        ("my.yaml", Changes(storage="s3://b/r"), " --config my.yaml --storage s3://b/r"),
        (
            "experiment.yaml", Changes(["checkpoint_storage.url=s3://b/r"]),
            " --config experiment.yaml --storage s3://b/r",
        ),
    ],
)  # fmt: skip
def test_how_later_commands_find_the_storage(file: str, changes: Changes, options: str) -> None:
    """The file is always named, which may have options of the storage, as its endpoint."""
    assert changes.place(Path(file), "s3://b/r").options == options


def test_prune_wants_its_storage_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is deleted by the rules of a file that the command line does not name."""
    assert main(["checkpoints", "prune", "--save-trial-latest", "1", "--yes"]) == 2
    message = capsys.readouterr().err
    assert "--config experiment.yaml" in message
    assert "--storage" in message


@pytest.mark.parametrize("command", ["train", "evaluate", "retrain", "config"])
def test_a_missing_experiment(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The error says what to pass."""
    monkeypatch.chdir(tmp_path)
    assert main([command]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: experiment.yaml: no such file; name the experiment's file: ")


def test_the_experiment_in_the_working_folder(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands that take an experiment need no argument for it."""
    assert main(["config"]) == 0
    assert '"name": "toy"' in capsys.readouterr().out


@pytest.mark.parametrize("has_versions", [True, False])
def test_the_metric_of_a_checkpoint_that_becomes_a_version(here: Path, has_versions: bool) -> None:
    """That of the model's last version; else that of ./experiment.yaml."""
    model = "gpt" if has_versions else "other"
    assert main(["models", "promote", model, "--checkpoint", "aaaaaaab"]) == 0
    version = Registry(CheckpointStore(str(here / "storage"))).versions(model)[-1]
    assert version.checkpoint == UUIDS[1]
    assert version.metric == ("val_loss" if has_versions else "loss")


@pytest.mark.parametrize("command", ["train", "evaluate", "retrain"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "entrypoint=toy_trail:ToyTrial"), 'did you mean "toy_trial"?'),
        (("--storage", "/dev/null/runs"), "cannot write"),
    ],
    ids=["entrypoint", "storage"],
)
def test_a_run_that_cannot_begin_starts_no_server(
    command: str,
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is refused at once. To evaluate, the storage need not be writable."""
    monkeypatch.setattr(FlowRun, "run", lambda *_: print("runs") or 0)
    code = main([command, str(write_experiment(tmp_path)), *arguments])
    shown = capsys.readouterr()
    if (command, arguments[0]) == ("evaluate", "--storage"):
        assert shown.out == "runs\n"
    else:
        assert (code, shown.out) == (2, "")
        assert message in shown.err
