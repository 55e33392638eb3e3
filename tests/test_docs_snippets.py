"""What a reader copies from the documents is complete and valid.

`tests/test_docs_commands.py` runs it.
"""

from __future__ import annotations

import ast
import builtins
import configparser
import json
import re
import shlex
import warnings
from collections.abc import Iterator
from typing import Any

import prefect.settings
import pytest
import yaml
from prefect.client.schemas.actions import DeploymentCreate

from tests.support.snippets import ROOT, SNIPPETS, Snippet, merged
from tests.test_docs_commands import BEFORE
from trial_core.common.python_source import without_collections
from trial_core.config import ExperimentConfig, IgnoredFieldWarning
from trial_core.search.settings import SearchExperiment, searches
from trialflow.deployments.cli.init import template_files
from trialflow.deployments.cli.main import app


def by_language(*languages: str) -> list[Snippet]:
    return [snippet for snippet in SNIPPETS if snippet.language in languages]


def experiment_of_init() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(template_files("pytorch")["experiment.yaml"])
    return read


def commands_of_units(snippet: Snippet) -> Iterator[str]:
    """The commands of a systemd unit."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read_string(snippet.text)
    yield unit["Service"]["ExecStart"].replace("/opt/trialflow/bin/", "")


def test_every_snippet_has_a_check() -> None:
    """Its language is one that a test here reads. A new document with commands is run by a test."""
    read = {"python", "yaml", "json", "sh", "ini", "diff", "text"}
    assert [str(each) for each in SNIPPETS if each.language not in read] == []
    run = by_language("python", "sh", "diff")
    assert [str(each) for each in run if each.document not in BEFORE] == []


def test_a_text_is_not_to_be_copied() -> None:
    """It has no command."""
    command = re.compile(r"^\s*(trialflow|prefect|python|pip) ", flags=re.MULTILINE)
    assert [str(each) for each in by_language("text") if command.search(each.text)] == []


@pytest.mark.parametrize(
    "snippet", [s for s in SNIPPETS if s.title in template_files("pytorch")], ids=str
)
def test_a_file_of_init_is_shown_as_it_is(snippet: Snippet) -> None:
    """A document shows the very file that `trialflow init` writes."""
    assert snippet.text == template_files("pytorch")[snippet.title]


def test_the_readme_shows_every_file_of_init() -> None:
    """A reader can copy the trial without `trialflow init`."""
    shown = {snippet.title for snippet in SNIPPETS if snippet.document == "README.md"}
    assert set(template_files("pytorch")) <= shown


@pytest.mark.parametrize("snippet", by_language("yaml"), ids=str)
def test_yaml_is_valid(snippet: Snippet) -> None:
    """It is an experiment, or a part of one; or, as its title says, of a `prefect.yaml`."""
    part = yaml.safe_load(snippet.text)
    if snippet.title.startswith("prefect.yaml"):
        assert part.keys() <= DeploymentCreate.model_fields.keys() | {"concurrency_limit"}
        return
    is_file = snippet.title and " " not in snippet.title
    experiment = part if is_file else merged(experiment_of_init(), part)
    with warnings.catch_warnings():
        warnings.simplefilter("error", IgnoredFieldWarning)
        kind = SearchExperiment if searches(experiment) else ExperimentConfig
        kind.from_mapping(experiment, source=str(snippet))


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
        end = next((at for at, word in enumerate(words) if word in ("|", ">")), len(words))
        words = words[:end]
        if words[0] == "trialflow":
            app.parse_args(words[1:], exit_on_error=False, print_error=False)
        elif words[0] == "make":
            assert words[1] in targets


@pytest.mark.parametrize("snippet", by_language("python", "diff"), ids=str)
def test_a_program_is_complete(snippet: Snippet) -> None:
    """It compiles; every name that it uses at its top level is one that it defines or imports."""
    with without_collections():
        tree = ast.parse(snippet.program())
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
