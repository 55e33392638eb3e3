"""Changes the entrypoint of Determined's experiment file; lists fields without an effect here."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import yaml
from pydantic import ValidationError

from trial_core.config import determined, load_config
from trial_core.config.error_text import ExperimentWarning
from trial_core.config.yaml_file import parse_yaml
from trial_core.errors import ConfigError
from trialflow.deployments.migration.imports import Finding, Migrated

_ENTRYPOINT = "entrypoint"
_NEEDS_QUOTES = re.compile(r":( |$)| #")


def migrate_experiment(path: Path) -> Migrated:
    """Return an experiment file with trialflow's entrypoint; other YAML files stay as they are.

    Raises:
        ConfigError: the file is not valid YAML.
    """
    source = path.read_bytes()
    text = source.decode(errors="surrogateescape")
    if _ENTRYPOINT not in text:
        return Migrated(source, [])
    given = parse_yaml(text, str(path))
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode) or _ENTRYPOINT not in given:
        return Migrated(source, [])
    nodes = {key.value: value for key, value in root.value}
    lines = {key.value: key.start_mark.line + 1 for key, _ in root.value}
    moved, content = _entrypoint(given[_ENTRYPOINT]), text
    if moved is not None:
        content = _replaced(text, nodes[_ENTRYPOINT], moved)
    findings = [
        Finding(lines.get(re.split(r"\W", problem)[0], 0), problem)
        for problem in _problems(path)
        if moved is None or not problem.startswith(f"{_ENTRYPOINT}:")
    ]
    return Migrated(content.encode(), sorted(findings))


def _entrypoint(value: object) -> str | None:
    """Return the entrypoint without Determined's launcher; None without one, or if unreadable."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            moved = determined.entrypoint(value)
        except ValidationError:
            return None
    return moved if seen else None


def _replaced(text: str, node: yaml.Node, value: str) -> str:
    """Return `text` with another plain value in place of a node; comments around it stay."""
    end = node
    while isinstance(end, yaml.SequenceNode) and not end.flow_style and end.value:
        end = end.value[-1]  # its own end is that of the comments after it
    old = text[node.start_mark.index : end.end_mark.index]
    plain = json.dumps(value, ensure_ascii=False) if _NEEDS_QUOTES.search(value) else value
    after = old[len(old.rstrip()) :] + text[end.end_mark.index :]
    return text[: node.start_mark.index] + plain + after


def _problems(path: Path) -> list[str]:
    """Return the complaints of `load_config`: fields without an effect, and mistakes."""
    errors: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            load_config(path)
        except ConfigError as error:
            errors = [line.removeprefix(f"{path}: ") for line in str(error).splitlines()]
    said = [str(each.message) for each in seen if issubclass(each.category, ExperimentWarning)]
    return errors + said
