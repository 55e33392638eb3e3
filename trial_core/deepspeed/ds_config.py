"""`overwrite_deepspeed_config`: overwrites values of a DeepSpeed config."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_core.errors import TrialError

logger = logging.getLogger(__name__)


def overwrite_deepspeed_config(
    base_ds_config: str | Path | Mapping[str, Any], source_ds_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """A copy of `base_ds_config` with values overwritten by those of `source_ds_dict`.

    Only keys that the base has are overwritten. Every other key of the source is logged as a
    warning: it may be a misspelt learning rate. Otherwise follows Determined's function.

    Args:
        base_ds_config: a DeepSpeed config, or the path of a JSON file that holds one.
        source_ds_dict: the new values, nested like the base.

    Raises:
        TypeError: the base is neither a path nor a mapping, or the source is not a mapping.
        TrialError: the file cannot be read, or does not hold a JSON object.
    """
    if isinstance(base_ds_config, (str, Path)):
        result = _read(Path(base_ds_config))
    elif isinstance(base_ds_config, Mapping):
        result = copy.deepcopy(dict(base_ds_config))
    else:
        raise TypeError(
            "base_ds_config must be a path or a dictionary, "
            f"got {type(base_ds_config).__name__}: {base_ds_config!r}"
        )
    if not isinstance(source_ds_dict, Mapping):
        raise TypeError(
            "source_ds_dict must be a dictionary, "
            f"got {type(source_ds_dict).__name__}: {source_ds_dict!r}"
        )
    for problem in _overwrite(result, source_ds_dict, ""):
        logger.warning("overwrite_deepspeed_config ignored a key: %s", problem)
    return result


def _overwrite(base: dict[str, Any], source: Mapping[str, Any], prefix: str) -> list[str]:
    """Overwrite `base` in place; returns why keys of `source` were ignored."""
    ignored: list[str] = []
    for key, value in source.items():
        path = f"{prefix}{key}"
        if key not in base:
            ignored.append(f'"{path}" is not in the base config')
        elif isinstance(base[key], dict):
            if isinstance(value, Mapping):
                ignored += _overwrite(base[key], value, f"{path}.")
            else:
                ignored.append(f'"{path}" is a section in the base config, got {value!r}')
        else:
            base[key] = copy.deepcopy(value)
    return ignored


def _read(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text())
    except OSError as error:
        raise TrialError(
            f"cannot read the DeepSpeed config {path} in the folder {path.absolute().parent}: "
            f"{error.strerror}"
        ) from error
    except json.JSONDecodeError as error:
        raise TrialError(f"the DeepSpeed config {path} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise TrialError(
            f"the DeepSpeed config {path} must hold a JSON object, got {type(loaded).__name__}"
        )
    return loaded
