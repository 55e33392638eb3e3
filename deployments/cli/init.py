"""`trialflow init`: writes a small working trial, to begin from."""

from __future__ import annotations

import importlib.util
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Literal

from trial_core.errors import ConfigError
from trialflow.deployments.cli.json_output import AsJson, print_json

Template = Literal["pytorch", "deepspeed", "hf"]
IGNORED = ("trialflow-runs/", "__pycache__/")
"""Folders that a run writes next to the trial: its own files and checkpoints, and Python's."""
NEEDS = {"hf": "transformers"}
"""Packages that a template imports and only `trialflow[NAME]` installs."""


def init(
    template: Template = "pytorch", folder: Path = Path(), /, *, json_: AsJson = False
) -> None:
    """Write a small working trial, to begin from.

    Writes the trial, its experiment and, with DeepSpeed, DeepSpeed's config; and a .gitignore for
    the files of runs, unless there is one. No file is ever overwritten.

    Args:
        template: pytorch: a small network. deepspeed: the same with DeepSpeed. hf: a small language
            model of Hugging Face's transformers, with DeepSpeed.
        folder: Where to write it; made if it is missing.
    """
    from trial_core.checkpoint.storage.storage_errors import ErrorTranslator

    texts = template_files(template)
    existing = [name for name in texts if (folder / name).exists()]
    if existing:
        other = "my-trial" if folder == Path() else f"{folder}-2"
        raise ConfigError(
            f"{folder.absolute()} has {', '.join(existing)} already, and init overwrites "
            f"nothing: give another folder, such as trialflow init {template} {other}"
        )
    if not (folder / ".gitignore").exists():
        texts = {".gitignore": "".join(f"{name}\n" for name in IGNORED), **texts}
    with ErrorTranslator(str(folder)).translated("write to"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
    commands = _next_commands(template, folder)
    if json_:
        result = {"folder": str(folder.absolute()), "files": [*texts], "next": commands}
        print_json("init", result)
        return
    print(f"wrote {', '.join(texts)} in {folder.absolute()}")
    print("next:")
    for command in commands:
        print(f"  {command}")


def template_files(template: Template) -> dict[str, str]:
    entries = (files("trialflow.deployments") / "trial_templates" / template).iterdir()
    # pip compiles the trial into a folder next to it.
    texts = {entry.name: entry.read_text("utf-8") for entry in entries if entry.is_file()}
    return dict(sorted(texts.items()))


def _next_commands(template: Template, folder: Path) -> list[str]:
    commands = ["trialflow train experiment.yaml"]
    package = NEEDS.get(template)
    if package is not None and importlib.util.find_spec(package) is None:
        install = f"pip install 'trialflow[{template}]'"
        commands.insert(0, f"{install}   # {package}, which this trial needs, is not installed")
    if folder.resolve() != Path.cwd():
        commands.insert(0, f"cd {shlex.quote(str(folder))}")
    return commands
