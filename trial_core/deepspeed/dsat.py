"""What trials use of ``determined.pytorch.dsat`` without its search for a DeepSpeed config."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trial_core.common.lazy_names import lazy_names
from trial_core.deepspeed.ds_config import overwrite_deepspeed_config
from trial_core.errors import TrialValueError

__all__ = ["dsat_reporting_context", "get_ds_config_from_hparams", "get_hf_args_with_overwrites"]

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


def get_hf_args_with_overwrites(args: Sequence[str], hparams: Mapping[str, Any]) -> list[str]:
    """The arguments of a script with Hugging Face's Trainer, with the hyperparameters' changes.

    Follows Determined's function, but changes only the value of ``--deepspeed``: to the config
    itself, as JSON, if there is ``overwrite_deepspeed_args``. Give other arguments, such as the
    batch size, the values of these changes.

    Raises:
        TrialError: the file that ``--deepspeed`` names cannot be read or is not valid.
    """
    changes, changed = hparams.get(OVERWRITES), list(args)
    if changes and "--deepspeed" in changed[:-1]:
        place = changed.index("--deepspeed") + 1
        changed[place] = json.dumps(overwrite_deepspeed_config(changed[place], changes))
    return changed


@contextmanager
def dsat_reporting_context(
    core_context: Any, op: Any, steps_completed: int | None = None
) -> Iterator[None]:
    """Does nothing: in Determined, it reports to the search for a config."""
    yield


__getattr__, __dir__ = lazy_names(__name__, __all__, {})
