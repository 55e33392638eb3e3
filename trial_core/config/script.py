"""The experiment of a user's script.

A script gives entrypoint, length and periods in Python. Its `exp_conf` may have any fields. The
fields that a script uses are validated like an experiment file's; the others are only the trial's.
"""

from __future__ import annotations

import logging
import re
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_core.config.error_text import closest_match, format_value
from trial_core.config.experiment import ExperimentConfig
from trial_core.config.sections import SearcherConfig, StoppingConfig
from trial_core.errors import ConfigError
from trial_core.schedule.units import Batch, TrainUnit

SOURCE = "exp_conf"
_PACKAGES = frozenset({"site-packages", "dist-packages"})

_USED = (
    "name", "hyperparameters", "data", "checkpoint_storage", "checkpointing", "reproducibility",
    "optimizations", "profiling", "tensorboard_logging", "cost", "stages",
)  # fmt: skip
_USED_OF_SEARCHER = (
    "metric", "smaller_is_better", "source_checkpoint_uuid", "source_checkpoint",
    "source_trial_id", "source_weights_only",
)  # fmt: skip
_USED_OF_STOPPING = ("stall_timeout_seconds",)
"""The launcher of the ranks decides how long a stop may take."""

logger = logging.getLogger(__name__)


def script_config(
    exp_conf: Mapping[str, Any] | None,
    hparams: Mapping[str, Any] | None = None,  # replace the ones of `exp_conf`
    trial_class: type | None = None,  # if known
    max_length: TrainUnit | Mapping[str, int] | int | None = None,  # if known
) -> ExperimentConfig:
    """The experiment of this script. `exp_conf` may have any fields; see `_USED`.

    Raises:
        ConfigError: one line per mistake.
    """
    everything = checked_mapping(exp_conf, SOURCE)
    given = {name: everything[name] for name in _USED if name in everything}
    if hparams is not None:
        given["hyperparameters"] = dict(checked_mapping(hparams, "hparams"))
    script = _script_of(trial_class)
    folder, module = _module_of(script, trial_class)
    given["entrypoint"] = f"{module}:{trial_class.__name__ if trial_class else 'Trial'}"
    given["code"] = str(folder)
    given["name"] = given.get("name") or script.stem
    searcher = checked_mapping(everything.get("searcher"), f"{SOURCE}: searcher")
    length = Batch(1) if max_length is None else max_length
    used = {name: searcher[name] for name in _USED_OF_SEARCHER if name in searcher}
    given["searcher"] = {"metric": "loss", **used, "max_length": length}
    stopping = checked_mapping(everything.get("stopping"), f"{SOURCE}: stopping")
    given["stopping"] = {name: stopping[name] for name in _USED_OF_STOPPING if name in stopping}
    if trial_class is None:  # once: not again in `fit`
        _warn_of_misspelt(everything, list(ExperimentConfig.model_fields), SOURCE)
        _warn_of_misspelt(searcher, list(SearcherConfig.model_fields), f"{SOURCE}: searcher")
        _warn_of_misspelt(stopping, list(StoppingConfig.model_fields), f"{SOURCE}: stopping")
    return ExperimentConfig.from_mapping(given, source=SOURCE)


def _warn_of_misspelt(given: Mapping[str, Any], known: list[str], path: str) -> None:
    """Warn of a name that is similar to a field's: the field that was meant has no effect."""
    for name in map(str, given):
        if name not in known and (near := closest_match(name, known)) and near not in given:
            logger.warning('%s: "%s" has no effect; did you mean "%s"?', path, name, near)


def named_metric(exp_conf: Mapping[str, Any]) -> str | None:
    """The searcher metric, if `exp_conf` names one."""
    return (exp_conf.get("searcher") or {}).get("metric")


def given_length(exp_conf: Mapping[str, Any]) -> Any:
    """The length of training as `exp_conf` gives it, not checked; None if it gives none."""
    searcher = exp_conf.get("searcher")
    return searcher.get("max_length") if isinstance(searcher, Mapping) else None


def has_code_folder(module_name: str) -> bool:
    """Return whether a module is in a file that is the user's own.

    False in a notebook, and in an installed package or command, whose folder also holds all others.
    """
    module = sys.modules.get(module_name)
    file = getattr(module, "__file__", None)
    if file is None:
        return False
    path = Path(file).resolve()
    return _PACKAGES.isdisjoint(path.parts) and path.parent not in _command_folders()


def _command_folders() -> list[Path]:
    schemes = sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user")
    return [Path(sysconfig.get_path("scripts", scheme)).resolve() for scheme in schemes]


def started_module() -> str | None:
    """The module that this program was started as, with ``python -m``, or None."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return None if spec is None else str(spec.name)


def _module_of(script: Path, trial_class: type | None) -> tuple[Path, str]:
    """The folder to import a script from, and its module there: ``package.module``."""
    name = trial_class.__module__ if trial_class else started_module() or "__main__"
    parts = tuple(name.split("."))
    if script.with_suffix("").parts[-len(parts) :] == parts:
        return script.parents[len(parts) - 1], name
    # `__main__`, or a script whose name no module can have
    return script.parent, re.sub(r"\W|^(?=\d)", "_", script.stem)


def checked_mapping(value: Any, name: str) -> Mapping[str, Any]:
    """A mapping that a script has given; empty for None. Raises ConfigError for anything else."""
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
