"""`trialflow migrate`: moves a folder of trials from Determined."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_core.common.text_format import plural
from trial_core.errors import ConfigError
from trial_core.processes.machine.accelerators import KIND_VARIABLE
from trialflow.deployments.cli import console
from trialflow.deployments.cli.json_output import AsJson, print_json
from trialflow.deployments.cli.waiting import waiting

if TYPE_CHECKING:
    from trialflow.deployments.migration.imports import Migrated

_LEFT_OUT = {"__pycache__", "node_modules", "trialflow-runs"}
_STARTUP_HOOK = "startup-hook.sh"
_NO_HOOK = "trialflow does not run it: install packages and fetch data before a run"


def migrate(folder: Path, /, *, diff: bool = False, json_: AsJson = False) -> None:
    """Move trials and scripts from Determined.

    Changes the imports of Python files, and entrypoints with a launcher of Determined in experiment
    files; all other text, comments included, stays as it is. Lists the rest: names without a
    counterpart and their replacements, fields without an effect, and files that it cannot read.
    Notebooks are not changed. A second call lists the remaining findings.

    Args:
        folder: A folder with all that is below it, or a file.
        diff: Print the changes, and do not make them.
    """
    if importlib.util.find_spec("libcst") is None:
        raise ConfigError("migrate needs libcst: pip install 'trialflow[migrate]'")
    if not folder.exists():
        raise ConfigError(f"{folder}: no such folder or file")
    os.environ.setdefault(KIND_VARIABLE, "cpu")  # DeepSpeed looks for accelerators, and warns
    changed: list[str] = []
    findings: list[dict[str, Any]] = []
    for path in _files(folder):
        try:
            # The first one imports DeepSpeed, which prints.
            with waiting(f"reading {path}"), redirect_stdout(sys.stderr):
                migrated = _migrated(path)
        except (ConfigError, OSError) as error:
            console.warning(f"not changed: {error}")
            findings.append({"path": str(path), "line": 0, "text": str(error)})
            continue
        if migrated.content != (old := path.read_bytes()):
            changed.append(str(path))
            if diff and not json_:
                texts = [each.decode(errors="replace") for each in (old, migrated.content)]
                before, after = (each.splitlines(keepends=True) for each in texts)
                name = os.path.relpath(path)
                patch = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
                print(*patch, sep="", end="")
            if not diff:
                _replace(path, migrated.content)
                if not json_:
                    print(f"changed {path}")
        for finding in migrated.findings:
            console.note(f"{path}{f':{finding.line}' if finding.line else ''}: {finding.text}")
            findings.append({"path": str(path), "line": finding.line, "text": finding.text})
    if json_:
        print_json("migrate", {"is_dry_run": diff, "changed": changed, "findings": findings})
    verb = "would change" if diff else "changed"
    count = plural(len(findings), "line")
    console.note(f"{verb} {plural(len(changed), 'file')}; {count} to look at")


def _migrated(path: Path) -> Migrated:
    from trialflow.deployments.migration.experiment_files import migrate_experiment
    from trialflow.deployments.migration.imports import Finding, Migrated, migrate_source

    if path.name == _STARTUP_HOOK:
        return Migrated(path.read_bytes(), [Finding(0, _NO_HOOK)])
    return migrate_source(path) if path.suffix == ".py" else migrate_experiment(path)


def _files(folder: Path) -> Iterator[Path]:
    """The Python and YAML files in a folder, without hidden ones, links and environments."""
    if folder.is_file():
        yield folder
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(
            each
            for each in folders
            if each not in _LEFT_OUT
            and not each.startswith(".")
            and not Path(here, each, "pyvenv.cfg").exists()  # of a virtual environment
        )
        for path in (Path(here, name) for name in sorted(names)):
            is_read = path.suffix in (".py", ".yaml", ".yml") or path.name == _STARTUP_HOOK
            if is_read and not path.is_symlink():
                yield path


def _replace(path: Path, content: bytes) -> None:
    from trial_core.checkpoint.storage.local_files import atomic_file
    from trial_core.checkpoint.storage.storage_errors import ErrorTranslator

    with (
        ErrorTranslator(str(path)).translated("write to"),
        atomic_file(path, is_durable=True) as file,
    ):
        file.write(content)
        os.chmod(file.fileno(), path.stat().st_mode)
