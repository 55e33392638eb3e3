"""Changes the entrypoint of Determined's experiment file, and lists what has no effect here."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import yaml
from pydantic import ValidationError

from trial_core.config import determined, load_config
from trial_core.config.error_text import ExperimentWarning
from trial_core.config.parsing import parse_yaml
from trial_core.errors import ConfigError
from trialflow.deployments.migration.findings import Finding, Migrated

_ENTRYPOINT = "entrypoint"


def migrate_experiment(path: Path) -> Migrated | None:
    """An experiment file with the entrypoint that trialflow reads; None: it is no experiment.

    Raises:
        ConfigError: it is not valid YAML.
        UnicodeDecodeError: it is not text in UTF-8.
    """
    text = path.read_bytes().decode()
    if _ENTRYPOINT not in text:
        return None
    given = parse_yaml(text, "the file")
    if not isinstance(given, dict) or _ENTRYPOINT not in given:
        return None
    nodes = {key.value: (key, value) for key, value in _root(text).value}
    moved, content = _entrypoint(given[_ENTRYPOINT]), text
    if moved is not None:
        content = _replaced(text, nodes[_ENTRYPOINT][1], moved)
    findings = []
    for problem in _problems(path, has_entrypoint=moved is None):
        field = problem.partition(":")[0].partition(".")[0].partition("[")[0]
        line = nodes[field][0].start_mark.line + 1 if field in nodes else 0
        findings.append(Finding(line, problem))
    return Migrated(content.encode(), sorted(findings))


def _root(text: str) -> yaml.MappingNode:
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    return node if isinstance(node, yaml.MappingNode) else yaml.MappingNode("", [])


def _entrypoint(value: object) -> str | None:
    """The entrypoint without Determined's launcher; None: it has none, or cannot be read."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            moved = determined.entrypoint(value)
        except ValidationError:
            return None
    return moved if seen else None


def _replaced(text: str, node: yaml.Node, value: str) -> str:
    """`text` with another plain value in the place of a node; comments around it stay."""
    end = node
    while isinstance(end, yaml.SequenceNode) and not end.flow_style and end.value:
        end = end.value[-1]  # its own end is that of the comments after it
    old = text[node.start_mark.index : end.end_mark.index]
    plain = value if parse_yaml(f"a: {value}", "") == {"a": value} else json.dumps(value)
    after = old[len(old.rstrip()) :] + text[end.end_mark.index :]
    return text[: node.start_mark.index] + plain + after


def _problems(path: Path, has_entrypoint: bool) -> list[str]:
    """What `load_config` says of a file: fields without an effect, and mistakes."""
    errors: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            load_config(path)
        except ConfigError as error:
            errors = [line.removeprefix(f"{path}: ") for line in str(error).splitlines()]
    said = [str(each.message) for each in seen if issubclass(each.category, ExperimentWarning)]
    return errors + [
        each for each in said if has_entrypoint or not each.startswith(f"{_ENTRYPOINT}:")
    ]
