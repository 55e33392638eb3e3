"""`trialflow`: help, usage errors, users' mistakes and exit codes."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import reduce
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from tests.support.cli import ROOT, TRIALFLOW, environment_in, write_experiment
from tests.support.json_types import json_types
from trial_core.config import ExperimentConfig, load_config
from trialflow.deployments.cli import config
from trialflow.deployments.cli.main import app, main

HEAVY = ("torch", "deepspeed", "prefect", "fsspec", "s3fs", "numpy", "pydantic")


def test_help_imports_nothing_heavy() -> None:
    """`--help` imports neither torch nor Prefect nor a storage library."""
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


def test_help_shows_every_command_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` lists every command; a command's help shows the defaults of its options."""
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in app if name not in shown] == []
    assert main(["checkpoints", "prune", "--help"]) == 0
    assert "[default: 7.0]" in capsys.readouterr().out


def commands(group: App = app, *names: str) -> Iterator[tuple[str, ...]]:
    """The names of all commands, those in groups included."""
    for name in group:
        if name.startswith("-"):
            continue
        is_command = group[name].default_command is not None
        yield from [(*names, name)] if is_command else commands(group[name], *names, name)


def test_every_command_has_json_of_a_documented_type() -> None:
    """Also those that only act: programs learn what they did."""
    found = {" ".join(words): reduce(App.__getitem__, words, app) for words in commands()}
    found |= {f"search {name}": app["search"][name] for name in ("list", "show")}
    del found["mcp"]  # its stdout is a protocol's
    assert found.keys() == json_types().keys()
    calls = {name: each.default_command for name, each in found.items()}
    assert [name for name in calls if "json_" not in signature(calls[name]).parameters] == []


ENTRY = re.compile(r"│ (?:\*  |   )?(?P<name>[-A-Z].*?)  +\S")


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_help_shows_the_default_of_every_value(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever takes a value is required, or its help says what holds without it."""
    monkeypatch.setenv("COLUMNS", "100")
    assert main([*command, "--help"]) == 0
    entries: dict[str, str] = {}
    name = ""
    for line in capsys.readouterr().out.splitlines():
        if found := ENTRY.match(line):
            name = found["name"]
        if line.startswith("│"):
            entries[name] = entries.get(name, "") + line.strip("│")
    flags = {name for name in entries if all(word.startswith("-") for word in name.split())}
    told = {
        name
        for name in entries
        if re.search(r"\b[dD]efault: |required]|Required unless", entries[name])
    }
    assert entries.keys() - flags - told == set()


@pytest.fixture(scope="module")
def completing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a person who has called `trialflow --install-completion` in bash."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("SHELL", "/bin/bash")
        assert main(["--install-completion"]) == 0
    return home


COMPLETE = r"""
. ~/.bashrc
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
$(complete -p trialflow | sed 's/.*-F \([^ ]*\) .*/\1/') trialflow
echo "${COMPREPLY[@]}"
"""


@pytest.mark.xdist_group("completion")  # it is installed once
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ev"], "evaluate"),
        (["runs", "co"], "compare"),
        (["train", "x.yaml", "--te"], "--test"),
        (["train", "--engine", "ra"], "ray"),
    ],
)
def test_the_shell_completes_commands_and_options(
    words: list[str], offered: str, completing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `trialflow --install-completion`, in the shell that called it."""
    monkeypatch.setenv("HOME", str(completing))
    shown = subprocess.check_output(["bash", "-c", COMPLETE, "-", "trialflow", *words], text=True)
    assert shown.split() == [offered]


@pytest.mark.parametrize(
    "module", ["trial_core.processes.machine.run_dirs", "trialflow.tasks.stages"]
)
def test_the_terminal_shows_our_warnings(capsys: pytest.CaptureFixture[str], module: str) -> None:
    """Those that any module of both packages logs in the driver."""
    main(["--version"])
    logging.getLogger(module).warning("a batch has %d samples", 48)
    assert capsys.readouterr().err == "warning: a batch has 48 samples\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints the installed version."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("trialflow 0.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian x.yaml", 'Unknown command "trian". Did you mean "train"?'),
        ("train x.yaml --sett a=1", "Unknown option: --sett. Did you mean --set?"),
        ("train x.yaml --set a=1 b=2", "give --set once for each key=value"),
        ("train experiment.yml", "no such file; did you mean experiment.yaml?"),
        ("train experiment.yaml --set max_restarts", "--set max_restarts: expected key=value"),
        ("train experiment.yaml --set name.first=x", "--set name.first: name is not a mapping"),
        ("train experiment.yaml --set sercher=1", 'unknown field; did you mean "searcher"'),
        ("train experiment.yaml --storage s4://b/p", '--storage: unknown storage type "s4"'),
        ("config experiment.yaml --set max_restarts=-1", "max_restarts: expected an integer"),
        ("checkpoints show 0123", "begins with '0123'"),
        ("checkpoints list --config nowhere.yaml", "nowhere.yaml: no such file"),
        ("checkpoints download 01", "parameter --to requires an argument"),
    ],
)
def test_mistakes_are_refused(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A mistake prints an error to stderr, without a traceback; the exit code is 2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    write_experiment(tmp_path)
    code = main(arguments.split())
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith("error: ")
    assert "Traceback" not in printed.err
    assert (code, printed.out) == (2, "")


def test_every_mistake_in_an_experiment_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two mistakes in a file are two error lines."""
    path = write_experiment(tmp_path, scheduling_unit=0, max_restarts="many")
    assert main(["config", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"error: {path}: ") for line in lines)


def test_ignored_fields_are_warned_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A field of Determined's without effect is a warning on stderr; the command succeeds."""
    path = write_experiment(tmp_path, bind_mounts=[])
    assert main(["config", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith(f"warning: {path}: bind_mounts: ignored: ")
    assert "UserWarning" not in printed.err
    json.loads(printed.out)


def test_config_prints_the_parameters_of_the_flow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`config` prints the experiment, with overrides, as a deployment takes it."""
    path = write_experiment(tmp_path)
    assert main(["config", str(path), "--set", "hyperparameters.lr=1e-3"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == ["config"]
    expected = load_config(path, ["hyperparameters.lr=0.001"])
    assert ExperimentConfig.model_validate(printed["config"]) == expected


def test_config_lists_the_code_that_checkpoints_get(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what they do not get, and why; not the experiment, which may have credentials."""
    storage = {"url": "s3://a/b", "options": {"secret": "SECRET"}}
    path = write_experiment(tmp_path, checkpoint_storage=storage, code=".")
    (tmp_path / "my_trial.py").write_text("x = 1\n")
    assert main(["config", str(path), "--code"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"the code of {tmp_path}: 1 file, 6 B (by their kinds)",
        "       6 B  my_trial.py",
        "left out:",
        f"  {path.name} (holds credentials in checkpoint_storage)",
    ]


def test_storage_keeps_its_options_for_the_same_scheme_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--storage` keeps credentials within a service and never sends them elsewhere.

    Retention rules are kept for every storage.
    """
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


def make_config_raise(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Have `trialflow config` raise `error`."""

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(config, "read_any_experiment", fail)


def test_a_bug_is_written_to_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unexpected exception gives exit code 70 and a file with the traceback."""
    make_config_raise(monkeypatch, KeyError("a mistake of ours"))
    assert main(["config", "x.yaml"]) == 70
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    path = Path(printed.partition("details to report: ")[2].partition(" (")[0])
    details = path.read_text()
    path.unlink()
    assert "Traceback" in details
    assert "KeyError: 'a mistake of ours'" in details


def test_a_bug_is_printed_when_debugging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TRIALFLOW_DEBUG=1 prints the traceback."""
    monkeypatch.setenv("TRIALFLOW_DEBUG", "1")
    make_config_raise(monkeypatch, KeyError("a mistake of ours"))
    assert main(["config", "x.yaml"]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An interrupted command prints one line; its exit code is 130."""
    make_config_raise(monkeypatch, KeyboardInterrupt())
    assert main(["config", "x.yaml"]) == 130
    assert capsys.readouterr().err == "error: stopped by Ctrl-C\n"


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    """`trialflow … | head` prints nothing about the closed pipe."""
    path = write_experiment(tmp_path)
    with subprocess.Popen(
        [*TRIALFLOW, "config", str(path)],
        env=environment_in(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
