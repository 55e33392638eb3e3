"""`trialflow`: help, usage, users' mistakes and their exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import ROOT, TRIALFLOW, environment_in, trialflow, write_experiment
from trial_core.config import ExperimentConfig, load_config
from trialflow.deployments.cli import experiment_options
from trialflow.deployments.cli.main import main

HEAVY = ("torch", "deepspeed", "prefect", "fsspec", "s3fs", "numpy", "pydantic")


def test_help_loads_nothing_heavy() -> None:
    """Help answers at once because it loads neither torch nor Prefect nor a storage library."""
    program = (
        "import sys\n"
        "from trialflow.deployments.cli.main import main\n"
        "codes = [main([*words, '--help']) for words in ([], ['train'], ['checkpoints', 'list'])]\n"
        f"print(codes, [module for module in {HEAVY!r} if module in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[0, 0, 0] []"


@pytest.mark.parametrize("command", ["train", "config", "checkpoints", "doctor"])
def test_help_names_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A newcomer finds every command in the help."""
    assert main(["--help"]) == 0
    assert command in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` says what is installed."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("trialflow 0.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian x.yaml", 'Unknown command "trian". Did you mean "train"?'),
        ("train", "CONFIG requires an argument"),
        ("train x.yaml --sett a=1", "Unknown option: --sett. Did you mean --set?"),
        ("train x.yaml --set a=1 b=2", "every key=value needs a --set of its own"),
        ("train experiment.yml", "no such file; did you mean experiment.yaml?"),
        (
            "train experiment.yaml --set max_restarts",
            "--set max_restarts: expected key=value",
        ),
        (
            "train experiment.yaml --set name.first=x",
            "--set name.first: name is not a mapping",
        ),
        (
            "train experiment.yaml --set sercher=1",
            'sercher: unknown field; did you mean "searcher"',
        ),
        (
            "train experiment.yaml --storage s4://b/p",
            '--storage: unknown storage type "s4"',
        ),
        (
            "train experiment.yaml --storage experiment.yaml/x",
            "part of the path is a file",
        ),
        (
            "config experiment.yaml --set max_restarts=-1",
            "max_restarts: expected an integer of at",
        ),
        ("checkpoints show 0123", "begins with '0123'; there is none at all"),
        ("checkpoints list --config nowhere.yaml", "nowhere.yaml: no such file"),
        ("checkpoints download 01", "parameter --to requires an argument"),
    ],
)
def test_a_mistake_has_a_message_and_exit_code_2(
    arguments: str, message: str, tmp_path: Path
) -> None:
    """A user's mistake gives a message on stderr and exit code 2: no traceback, no output."""
    write_experiment(tmp_path)
    done = trialflow(tmp_path, *arguments.split())
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert (done.returncode, done.stdout) == (2, "")


def test_every_mistake_in_an_experiment_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several mistakes are several lines: nobody wants to find them one by one."""
    path = write_experiment(tmp_path, scheduling_unit=0, max_restarts="many")
    assert main(["config", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"error: {path}: ") for line in lines)


def test_ignored_fields_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A field of Determined's that has no effect is said on stderr, plainly; all else works."""
    path = write_experiment(tmp_path, bind_mounts=[])
    assert main(["config", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith(f"warning: {path}: bind_mounts: ignored: ")
    assert "UserWarning" not in printed.err
    json.loads(printed.out)


def test_config_prints_parameters_of_the_flow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `config` prints is the experiment, as a deployment's run takes it."""
    path = write_experiment(tmp_path)
    assert main(["config", str(path), "--set", "hyperparameters.lr=1e-3"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == ["config"]
    expected = load_config(path, ["hyperparameters.lr=0.001"])
    assert ExperimentConfig.model_validate(printed["config"]) == expected


def test_storage_of_the_same_kind_keeps_its_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--storage` moves within a service with its credentials, and never takes them elsewhere; the
    rules for old checkpoints come along everywhere."""
    options = {"endpoint_url": "http://127.0.0.1:9", "secret": "only for S3"}
    storage = {"url": "s3://a/b", "options": options, "keep_every": {"batches": 7}}
    path = write_experiment(tmp_path, checkpoint_storage=storage)

    def moved(url: str) -> Any:
        assert main(["config", str(path), "--storage", url]) == 0
        place = json.loads(capsys.readouterr().out)["config"]["checkpoint_storage"]
        return {name: value for name, value in place.items() if value is not None}

    assert moved("s3://c/d") == {**storage, "url": "s3://c/d"}
    elsewhere = {"url": f"file://{tmp_path}", "options": {}, "keep_every": {"batches": 7}}
    assert moved(str(tmp_path)) == elsewhere


def break_(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Have every command that reads an experiment raise `error`."""

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(experiment_options, "read_experiment", fail)


def test_a_bug_is_written_down(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What nobody foresaw gives exit code 70 and a file with the traceback, not a traceback."""
    break_(monkeypatch, KeyError("a mistake of ours"))
    assert main(["config", "x.yaml"]) == 70
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    path = Path(printed.partition("details to report: ")[2].partition(" (")[0])
    details = path.read_text()
    path.unlink()
    assert "Traceback" in details
    assert "KeyError: 'a mistake of ours'" in details


def test_a_bug_is_shown_when_debugging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TRIALFLOW_DEBUG=1 shows the traceback at once."""
    monkeypatch.setenv("TRIALFLOW_DEBUG", "1")
    break_(monkeypatch, KeyError("a mistake of ours"))
    assert main(["config", "x.yaml"]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Any command ends quietly, with a shell's exit code for it, when it is interrupted."""
    break_(monkeypatch, KeyboardInterrupt())
    assert main(["config", "x.yaml"]) == 130
    assert capsys.readouterr().err == "error: stopped by Ctrl-C\n"


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    """`trialflow … | head` says nothing of the pipe that was closed."""
    path = write_experiment(tmp_path)
    with subprocess.Popen(
        [*TRIALFLOW, "config", str(path)],
        env=environment_in(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
