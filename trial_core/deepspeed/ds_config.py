"""`overwrite_deepspeed_config`: overwrites values of a DeepSpeed config."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_core.config.yaml_file import merged
from trial_core.errors import TrialError, TrialTypeError, TrialValueError


def overwrite_deepspeed_config(
    base_ds_config: str | Path | Mapping[str, Any], source_ds_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """A copy of `base_ds_config` with the values of `source_ds_dict`, key by key at every depth.

    A section of the source is merged into the base's section of that name. Every other value of the
    source replaces the base's, or is added to it. Follows Determined's function.

    Args:
        base_ds_config: a DeepSpeed config, or the path of a JSON file that holds one.
        source_ds_dict: the new values, nested like the base.

    Raises:
        TrialTypeError: the base is neither a path nor a mapping, or the source is not a mapping.
        TrialValueError: the file is not valid JSON, or gives a key twice.
        TrialError: the file cannot be read, or does not hold a JSON object.
    """
    if isinstance(base_ds_config, (str, Path)):
        base: Mapping[str, Any] = _read(Path(base_ds_config))
    elif isinstance(base_ds_config, Mapping):
        base = base_ds_config
    else:
        raise TrialTypeError(
            "base_ds_config must be a path or a dictionary, "
            f"got {type(base_ds_config).__name__}: {base_ds_config!r}"
        )
    if not isinstance(source_ds_dict, Mapping):
        raise TrialTypeError(
            "source_ds_dict must be a dictionary, "
            f"got {type(source_ds_dict).__name__}: {source_ds_dict!r}"
        )
    return copy.deepcopy(merged(base, source_ds_dict))


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TrialError(
            f"cannot read the DeepSpeed config {path} in the folder {path.absolute().parent}: "
            f"{error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise TrialValueError(f"the DeepSpeed config {path} is not UTF-8 text: {error}") from error

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        section: dict[str, Any] = {}
        for key, value in pairs:
            if key in section:
                raise TrialValueError(
                    f'the DeepSpeed config {path} gives "{key}" twice in one section: '
                    f"{section[key]!r} and {value!r}; remove one of them"
                )
            section[key] = value
        return section

    try:
        loaded = json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        raise TrialValueError(f"the DeepSpeed config {path} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise TrialError(
            f"the DeepSpeed config {path} must hold a JSON object, got {type(loaded).__name__}"
        )
    return loaded
