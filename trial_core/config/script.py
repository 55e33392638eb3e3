"""The experiment of a user's script.

A script gives entrypoint, length and periods in Python. Its `exp_conf` may give the other fields of
an experiment file, and is validated like one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_core.config.error_text import format_value
from trial_core.config.experiment import ExperimentConfig
from trial_core.errors import ConfigError
from trial_core.units import Batch, TrainUnit

SOURCE = "exp_conf"
_PACKAGES = frozenset({"site-packages", "dist-packages"})


def script_config(
    exp_conf: Mapping[str, Any] | None,
    hparams: Mapping[str, Any] | None = None,
    trial_class: type | None = None,
    max_length: TrainUnit | None = None,
) -> ExperimentConfig:
    """The experiment of this script.

    Args:
        exp_conf: any fields of an experiment file, as plain data. Its entrypoint and lengths are
            ignored: the script gives them.
        hparams: hyperparameters; they replace those of `exp_conf`.
        trial_class: the trial, if known.
        max_length: the length of training, if known.

    Raises:
        ConfigError: one line per mistake.
    """
    given = dict(_mapping(exp_conf, SOURCE))
    if hparams is not None:
        given["hyperparameters"] = dict(_mapping(hparams, "hparams"))
    script = _script_of(trial_class)
    folder, module = _module_of(script, trial_class)
    given["entrypoint"] = f"{module}:{trial_class.__name__ if trial_class else 'Trial'}"
    given["code"] = str(folder)
    given["name"] = given.get("name") or script.stem
    searcher = given.get("searcher")
    if searcher is None or isinstance(searcher, Mapping):
        filled = {"metric": "loss", **(searcher or {})}
        given["searcher"] = {**filled, "max_length": max_length or Batch(1)}
    return ExperimentConfig.from_mapping(given, source=SOURCE)


def named_metric(exp_conf: Mapping[str, Any]) -> str | None:
    """The searcher metric, if `exp_conf` names one."""
    return (exp_conf.get("searcher") or {}).get("metric")


def has_code_folder(trial_class: type) -> bool:
    """Whether the trial's class is in a file that is the user's own.

    Not so in a notebook, and in an installed package, whose folder also holds all others.
    """
    module = sys.modules.get(trial_class.__module__)
    file = getattr(module, "__file__", None)
    return file is not None and _PACKAGES.isdisjoint(Path(file).resolve().parts)


def _module_of(script: Path, trial_class: type | None) -> tuple[Path, str]:
    """The folder to import a script from, and its module there: ``package.module``."""
    name = trial_class.__module__ if trial_class else "__main__"
    parts = tuple(name.split("."))
    if script.with_suffix("").parts[-len(parts) :] == parts:
        return script.parents[len(parts) - 1], name
    # `__main__`, or a script whose name no module can have
    return script.parent, re.sub(r"\W|^(?=\d)", "_", script.stem)


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: expected a mapping, got {format_value(value)}")
    return value


def _script_of(trial_class: type | None) -> Path:
    """The file of the trial's class, else of the program; in a notebook, a made-up one."""
    module = sys.modules.get(trial_class.__module__ if trial_class else "__main__")
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else Path.cwd() / "script.py"
