"""What a reader copies from the documents is complete, and works as given.

Quick checks look at each snippet. `test_the_commands_of_a_document_run` copies the files of a
document into an empty folder and runs its commands there, in their order. What only a reader knows
is replaced (`PLACEHOLDERS`). Some commands are not run here (`NOT_RUN`).
"""

from __future__ import annotations

import ast
import builtins
import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import prefect.settings
import pytest
import yaml
from prefect.client.schemas.actions import DeploymentCreate

from tests.support.prefect import PrefectServer, running_server
from tests.support.snippets import ROOT, SNIPPETS, Snippet
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig, IgnoredFieldWarning
from trialflow.deployments.cli.init import template_files
from trialflow.deployments.cli.main import app

PLACEHOLDERS = {
    "s3://my-bucket/runs": "a storage of the reader's; replaced by the default storage",
    "4f0c21aa": "a checkpoint's uuid; replaced by that of the oldest checkpoint",
    "/srv/trialflow": "a folder of the reader's machine; replaced by the test's folder",
}
INIT = "trialflow init"
TRAIN = "trialflow train experiment.yaml"
BEFORE: Mapping[str, tuple[str, ...]] = {
    "README.md": (),
    "docs/quickstart.md": (),
    "docs/guides/checkpoints.md": (INIT, TRAIN),
    "docs/guides/deploying.md": (INIT, TRAIN, "trialflow deploy"),
    "docs/guides/move-from-determined.md": (),
    "docs/guides/retraining.md": (INIT, TRAIN),
    "docs/guides/scripts.md": (INIT, TRAIN),
    "docs/guides/stopping.md": (INIT, "trialflow deploy"),
    "examples/gan/README.md": (),
    "examples/gpt_stdlib/README.md": (),
    "examples/pipeline/README.md": (),
    "examples/roc_auc/README.md": (),
}
"""The documents with commands or programs, and what their reader has done before."""

NOT_RUN = {
    "make": "installs into .venv of the repository; another test checks the target's name",
    ". .venv/bin/activate": "the tests' environment is active",
    "pip install": "the tests' environment has the packages",
    "export PREFECT_API_": "the tests' server has another address, and no password",
    "read -rs": "the same",
    "trialflow up": "serves until Ctrl-C: tests/deployments/test_up.py",
    "trialflow deploy --type": "tests/deployments/test_deploy_templates.py",
    "prefect worker start": "works until Ctrl-C: tests/deployments/test_deploy.py",
    "prefect api POST /flow_runs/ID": "needs a lost run: tests/deployments/test_killed_run.py",
    "sudo": "needs root: tests/deployments/test_deploy_postgresql.py",
    "echo": "the same",
    "docker build": "needs Docker: tests/deployments/test_deploy_image.py",
    "helm": "needs Kubernetes",
}
"""How commands begin that are not run here, and why. Those of `trialflow` are parsed even so."""

TESTED_ELSEWHERE = {"docs/guides/deploying.md": "tests/deployments/test_deploy_notifications.py"}
"""Documents whose Python program has a test of its own."""


def by_language(*languages: str) -> list[Snippet]:
    return [snippet for snippet in SNIPPETS if snippet.language in languages]


def is_run(command: str) -> bool:
    return not command.startswith(tuple(NOT_RUN))


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `change`; mappings of both are merged."""
    both = dict(base)
    for key, value in change.items():
        old = both.get(key)
        is_deeper = isinstance(old, Mapping) and isinstance(value, Mapping)
        both[key] = merged(old, value) if is_deeper else value
    return both


def experiment_of_init() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(template_files("deepspeed")["experiment.yaml"])
    return read


def commands_of_units(snippet: Snippet) -> Iterator[str]:
    """The commands of a systemd unit."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read_string(snippet.text)
    yield unit["Service"]["ExecStart"].replace("/opt/trialflow/bin/", "")


@pytest.mark.parametrize("snippet", SNIPPETS, ids=str)
def test_every_snippet_has_a_check(snippet: Snippet) -> None:
    """Its language is one that a test here reads. A new document with commands is run by a test."""
    assert snippet.language in ("python", "yaml", "json", "sh", "ini", "diff", "text")
    if snippet.language in ("python", "sh", "diff"):
        assert snippet.document in BEFORE


@pytest.mark.parametrize("snippet", by_language("text"), ids=str)
def test_a_text_is_not_to_be_copied(snippet: Snippet) -> None:
    """It has no command."""
    assert not re.search(r"^\s*(trialflow|prefect|python|pip) ", snippet.text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "snippet", [s for s in SNIPPETS if s.title in template_files("deepspeed")], ids=str
)
def test_a_file_of_init_is_shown_as_it_is(snippet: Snippet) -> None:
    """A document shows the very file that `trialflow init` writes."""
    assert snippet.text == template_files("deepspeed")[snippet.title]


def test_the_readme_shows_every_file_of_init() -> None:
    """A reader can copy the trial without `trialflow init`."""
    shown = {snippet.title for snippet in SNIPPETS if snippet.document == "README.md"}
    assert set(template_files("deepspeed")) <= shown


@pytest.mark.parametrize("snippet", by_language("yaml"), ids=str)
def test_yaml_is_valid(snippet: Snippet) -> None:
    """It is an experiment, or a part of one; or, as its title says, of a `prefect.yaml`."""
    part = yaml.safe_load(snippet.text)
    if snippet.title.startswith("prefect.yaml"):
        assert part.keys() <= DeploymentCreate.model_fields.keys() | {"concurrency_limit"}
        return
    experiment = part if snippet.title else merged(experiment_of_init(), part)
    with warnings.catch_warnings():
        warnings.simplefilter("error", IgnoredFieldWarning)
        ExperimentConfig.from_mapping(experiment, source=str(snippet))


@pytest.mark.parametrize("snippet", by_language("json"), ids=str)
def test_json_is_valid(snippet: Snippet) -> None:
    """It is a whole file; or, as its title says, a part of the Docker pool's job template."""
    if snippet.title.endswith(".json"):
        json.loads(snippet.text)
        return
    assert snippet.title == "job template, in job_configuration"
    template = ROOT / "deployments" / "work_pools" / "docker.json"
    known = json.loads(template.read_text())["job_configuration"]
    assert json.loads("{" + snippet.text.strip().rstrip(",") + "}").keys() <= known.keys()


@pytest.mark.parametrize("snippet", by_language("ini"), ids=str)
def test_units_set_settings_that_prefect_has(snippet: Snippet) -> None:
    """A systemd unit, whose variables are Prefect's settings."""
    assert snippet.title.startswith("/etc/systemd/system/")
    variables = re.findall(r"(PREFECT_\w+)=", snippet.text)
    assert [name for name in variables if not hasattr(prefect.settings, name)] == []
    assert len(list(commands_of_units(snippet))) == 1


@pytest.mark.parametrize("snippet", by_language("sh", "ini"), ids=str)
def test_commands_parse(snippet: Snippet) -> None:
    """Every command and option of ours exists, and so does every target of `make`."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    found = snippet.commands() if snippet.language == "sh" else commands_of_units(snippet)
    for command in found:
        words = [word for word in shlex.split(command) if word != "…"]
        if words[0] == "trialflow":
            app.parse_args(words[1:], exit_on_error=False, print_error=False)
        elif words[0] == "make":
            assert words[1] in targets


@pytest.mark.parametrize("snippet", by_language("python", "diff"), ids=str)
def test_a_program_is_complete(snippet: Snippet) -> None:
    """It compiles; every name that it uses at its top level is one that it defines or imports."""
    tree = ast.parse(program(snippet))
    defined = {*dir(builtins), "__file__", "__name__"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert used - defined == set()


def program(snippet: Snippet) -> str:
    """A Python program; of a diff, the program after the change."""
    if snippet.language == "diff":
        return re.sub(r"^(-.*\n|[+ ])", "", snippet.text, flags=re.MULTILINE)
    return snippet.text


class Reader:
    """Does in a folder what a document says.

    Attributes:
        folder: the working folder; `cd` changes it.
    """

    def __init__(self, folder: Path, server: PrefectServer) -> None:
        self.folder = folder
        inherited = {key: value for key, value in os.environ.items() if key != "TRIALFLOW_HOME"}
        self.environment = {
            **inherited,
            **server.environment,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

    def run(self, command: str) -> None:
        """Run a shell command as given, but for the placeholders."""
        if command.startswith("cd "):
            self.folder = self.folder / shlex.split(command)[1]
            return
        done = subprocess.run(
            ["bash", "-c", self.replaced(command)],
            cwd=self.folder, env=self.environment, check=False, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        assert "warning" not in done.stdout.lower(), f"{command}\n{done.stdout}"

    def copy(self, snippet: Snippet) -> None:
        """Write the file of a snippet, or merge a part of an experiment into the experiment."""
        text = self.replaced(snippet.text)
        if snippet.title:
            (self.folder / snippet.title).write_text(text)
            return
        experiment = self.folder / "experiment.yaml"
        whole = merged(yaml.safe_load(experiment.read_text()), yaml.safe_load(text))
        experiment.write_text(yaml.safe_dump(whole))

    def replaced(self, text: str) -> str:
        """`text` without `PLACEHOLDERS`."""
        storage = f"file://{self.folder}/trialflow-runs/checkpoints"
        text = text.replace("s3://my-bucket/runs", storage)
        text = text.replace("/srv/trialflow", str(self.folder))
        if "4f0c21aa" in text:
            text = text.replace("4f0c21aa", CheckpointStore(storage).list()[0].uuid)
        return text


@pytest.mark.long
@pytest.mark.slots
@pytest.mark.server
@pytest.mark.timeout(900)
@pytest.mark.parametrize("document", BEFORE)
def test_the_commands_of_a_document_run(tmp_path: Path, document: str) -> None:
    """In an empty folder, after what its reader has done before: its files and parts of files are
    copied, then its commands and programs run one after the other. None fails or warns."""
    if document.startswith("examples"):
        shutil.copytree(ROOT / "examples", tmp_path / "examples")
    found = [snippet for snippet in SNIPPETS if snippet.document == document]
    with running_server(tmp_path / "prefect") as server:
        reader = Reader(tmp_path / "reader", server)
        reader.folder.mkdir()
        for command in BEFORE[document]:
            reader.run(command)
        begin = [s for s in found if s.language == "sh" and INIT in s.text]
        for snippet in begin:
            run(reader, snippet)
        for snippet in found:
            if is_file(snippet):
                reader.copy(snippet)
        for snippet in found:
            if snippet not in begin and not is_file(snippet):
                run(reader, snippet)


def is_file(snippet: Snippet) -> bool:
    """Whether a snippet is copied into the folder: a file, or a part of the experiment."""
    if snippet.title:
        return "/" not in snippet.title and " " not in snippet.title
    return snippet.language == "yaml"


def run(reader: Reader, snippet: Snippet) -> None:
    """Run the commands or the program of a snippet."""
    if snippet.language == "sh":
        for command in filter(is_run, snippet.commands()):
            reader.run(command)
    elif snippet.language in ("python", "diff") and snippet.document not in TESTED_ELSEWHERE:
        reader.run(f"python -c {shlex.quote(program(snippet))}")
