"""What trials use of ``determined.pytorch.dsat`` without its search for a DeepSpeed config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_core.common.lazy_names import lazy_names
from trial_core.deepspeed.ds_config import overwrite_deepspeed_config
from trial_core.errors import TrialValueError

__all__ = ["get_ds_config_from_hparams"]

CONFIG = "deepspeed_config"
OVERWRITES = "overwrite_deepspeed_args"


def get_ds_config_from_hparams(
    hparams: Mapping[str, Any], base_dir: Path | str = "."
) -> dict[str, Any]:
    """The DeepSpeed config whose file the hyperparameters name, with their changes.

    Follows Determined's function.

    Args:
        hparams: ``deepspeed_config`` is the file's path, ``overwrite_deepspeed_args`` the changes,
            if there are any; see `overwrite_deepspeed_config`.
        base_dir: the folder below which the path is.

    Raises:
        TrialError: ``deepspeed_config`` is missing, or its file cannot be read or is not valid.
    """
    if not isinstance(path := hparams.get(CONFIG), (str, Path)):
        known = ", ".join(map(str, hparams)) or "none"
        raise TrialValueError(
            f'hyperparameters: expected "{CONFIG}", the path of a JSON file, got {path!r}; the '
            f"hyperparameters are: {known}"
        )
    return overwrite_deepspeed_config(Path(base_dir) / path, hparams.get(OVERWRITES) or {})


__getattr__, __dir__ = lazy_names(__name__, __all__, {})
