"""The experiment of a script of the user's own, as far as the script describes one.

A script says in Python what an experiment file says of entrypoint, length and periods. What it
gives besides, its `exp_conf`, is checked exactly as a file is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_core.config.error_text import shown
from trial_core.config.experiment import ExperimentConfig
from trial_core.errors import ConfigError
from trial_core.units import Batch, TrainUnit

SOURCE = "exp_conf"


def script_config(
    exp_conf: Mapping[str, Any] | None,
    hparams: Mapping[str, Any] | None = None,
    trial_class: type | None = None,
    max_length: TrainUnit | None = None,
) -> ExperimentConfig:
    """The experiment of this script.

    Args:
        exp_conf: any part of an experiment file, as plain data. The entrypoint and the lengths in
            it are not used: the script itself is the one and gives the others.
        hparams: hyperparameters, in place of those of `exp_conf`.
        trial_class: the trial, once it is known.
        max_length: the length of training, once it is known.

    Raises:
        ConfigError: everything that is wrong, one line each.
    """
    given = dict(_mapping(exp_conf, SOURCE))
    if hparams is not None:
        given["hyperparameters"] = dict(_mapping(hparams, "hparams"))
    script = _script_of(trial_class)
    module = re.sub(r"\W|^(?=\d)", "_", script.stem)  # a script may have any name, a module not
    given["entrypoint"] = f"{module}:{trial_class.__name__ if trial_class else 'Trial'}"
    given["code"] = str(script.parent)
    given["name"] = given.get("name") or script.stem
    searcher = given.get("searcher")
    if searcher is None or isinstance(searcher, Mapping):
        filled = {"metric": "loss", **(searcher or {})}
        given["searcher"] = {**filled, "max_length": max_length or Batch(1)}
    return ExperimentConfig.from_mapping(given, source=SOURCE)


def named_metric(exp_conf: Mapping[str, Any]) -> str | None:
    """The searcher's metric, where `exp_conf` names one."""
    return (exp_conf.get("searcher") or {}).get("metric")


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: expected a mapping, got {shown(value)}")
    return value


def _script_of(trial_class: type | None) -> Path:
    """The file of the trial's class, else of the program; in a notebook, one that is not there."""
    module = sys.modules.get(trial_class.__module__ if trial_class else "__main__")
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else Path.cwd() / "script.py"
