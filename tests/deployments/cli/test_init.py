"""`trialflow init`: what it writes trains, and no file is overwritten."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import ROOT, trialflow
from tests.support.prefect import PrefectServer
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import load_config
from trial_core.processes.machine.run_dirs import home_folder
from trialflow.deployments.cli import init
from trialflow.deployments.cli.main import main

FILES = ["experiment.yaml", "my_trial.py"]
WITH_DEEPSPEED = ["ds_config.json", *FILES]
GITIGNORE = ".gitignore"
TEMPLATES = {"pytorch": FILES, "deepspeed": WITH_DEEPSPEED, "hf": WITH_DEEPSPEED}


@pytest.mark.slots
@pytest.mark.server
@pytest.mark.parametrize(
    "template",
    ["pytorch", *(pytest.param(name, marks=pytest.mark.long) for name in ("deepspeed", "hf"))],
)
def test_a_new_trial_learns(
    tmp_path: Path,
    prefect_server: PrefectServer,
    template: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In an empty folder, the printed command trains it, and its validation loss falls."""
    if template == "hf":
        pytest.importorskip("transformers", reason="the template trains a model of transformers")
    assert main(["init", template, str(tmp_path)]) == 0
    command = capsys.readouterr().out.splitlines()[-1].split()
    assert command == ["trialflow", "train", "experiment.yaml"]
    shorter = (
        "--set=searcher.max_length.batches=40", "--set=min_validation_period.batches=20",
        "--set=checkpoint_policy=all", f"--storage={tmp_path}/checkpoints",
    )  # fmt: skip
    done = trialflow(tmp_path, *command[1:], *shorter, variables=prefect_server.environment)
    assert done.returncode == 0, done.stderr
    first, last = CheckpointStore(f"file://{tmp_path}/checkpoints").list()
    assert last.metrics["validation"]["loss"] < first.metrics["validation"]["loss"]


def test_the_language_model_validates_on_text_that_it_has_not_read() -> None:
    """No line of the validation set is in the training set: the topics of the text repeat some."""
    pytest.importorskip("datasets", reason="the template cuts its text with it")
    source = init.template_files("hf")["my_trial.py"]
    program = "from pydoc_data.topics import topics\nfrom typing import Any\n"
    program += "from datasets import Dataset, DatasetDict\n"
    names: dict[str, Any] = {}
    # The module itself imports DeepSpeed and transformers.
    exec(program + source[source.index("def windows(") :], names)

    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [*text.encode()]}

    def lines(part: str) -> set[str]:
        tokens = names["windows"](tokenizer, 64)[part][:]["input_ids"]
        text = bytes(tokens.flatten().tolist()).decode(errors="ignore")
        return {line for line in text.splitlines() if len(line) > 40}

    training, validation = lines("train"), lines("test")
    assert len(validation) > 300
    assert len(validation & training) < 0.05 * len(validation)


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_experiment_that_was_written_is_valid(tmp_path: Path, template: str) -> None:
    """The trial reads each of its hyperparameters, and no other; its comment may become a field."""
    assert main(["init", template, str(tmp_path / "mine")]) == 0
    written = sorted(path.name for path in (tmp_path / "mine").iterdir())
    assert written == [GITIGNORE, *TEMPLATES[template]]
    experiment, trial = (tmp_path / "mine" / name for name in FILES)
    config, text = load_config(experiment), trial.read_text()
    read = re.findall(r'context\.get_hparam\("(\w+)"\)', text)
    read += ["global_batch_size"] * text.count("context.get_per_slot_batch_size()")
    assert sorted(read) == sorted(config.hyperparameters)
    experiment.write_text(experiment.read_text().replace("# checkpoint_st", "checkpoint_st"))
    assert load_config(experiment).checkpoint_storage.url == "s3://my-bucket/runs"


def test_the_next_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They lead into the folder, and install a package that the trial needs and that is missing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(init.NEEDS, "hf", "a_package_that_is_missing")
    assert main(["init", "hf", "my folder"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "next:",
        "  cd 'my folder'",
        "  pip install 'trialflow[hf]'   # a_package_that_is_missing, which this trial needs, is "
        "not installed",
        "  trialflow train experiment.yaml",
    ]
    assert main(["init"]) == 0
    assert "PyTorchTrial" in Path("my_trial.py").read_text()
    assert capsys.readouterr().out.splitlines()[1:] == [
        "next:",
        "  trialflow train experiment.yaml",
    ]


def test_what_a_run_writes_is_ignored_by_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of runs; a .gitignore that exists stays as it is, and refuses nothing."""
    monkeypatch.delenv("TRIALFLOW_HOME", raising=False)
    assert main(["init", "pytorch", str(tmp_path / "new")]) == 0
    ignored = (tmp_path / "new" / GITIGNORE).read_text().splitlines()
    assert f"{home_folder().name}/" in ignored
    (tmp_path / GITIGNORE).write_text("own")
    assert main(["init", "pytorch", str(tmp_path)]) == 0
    assert (tmp_path / GITIGNORE).read_text() == "own"
    assert (tmp_path / "my_trial.py").exists()


def test_no_file_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If any of the files exists, init names it, writes none, and ends with 2."""
    own = tmp_path / "experiment.yaml"
    own.write_text("name: own")
    assert main(["init", "deepspeed", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path} has experiment.yaml already")
    assert f"such as trialflow init deepspeed {tmp_path}-2" in said
    assert own.read_text() == "name: own"
    assert list(tmp_path.iterdir()) == [own]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tensorflow"], 'Choose from: "pytorch", "deepspeed", "hf"'),
        (["deepspeed", "a-file/mine"], "cannot write to "),
    ],
)
def test_mistakes_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: Sequence[str],
    message: str,
) -> None:
    """An unknown template, and a folder that cannot be made."""
    monkeypatch.chdir(tmp_path)
    Path("a-file").touch()
    assert main(["init", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_what_a_template_needs_has_an_extra_of_its_name() -> None:
    """The advice `pip install 'trialflow[NAME]'` installs the package."""
    extras = (ROOT / "pyproject.toml").read_text()
    for template, package in init.NEEDS.items():
        assert f'\n{template} = ["{package}>=' in extras
