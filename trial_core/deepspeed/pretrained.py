"""Has transformers divide a model among the ranks of ZeRO-3 while it builds or loads it.

``from_pretrained`` then creates each weight under ``deepspeed.zero.Init``, and only rank 0 reads
the files, mapped. A rank holds its own part and one layer: see `make bench NAME=pretrained`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from deepspeed.accelerator import get_accelerator

from trial_core.deepspeed.auto_values import BATCH_SIZES
from trial_core.deepspeed.dsat import get_ds_config_from_hparams
from trial_core.errors import TrialError

_INTEGRATION = "transformers.integrations.deepspeed"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_LARGE_BYTES = 2**20
_MOST_BYTES = 32 * 2**20  # glibc itself raises the threshold to this while a process runs


def named_config(hparams: Mapping[str, Any]) -> dict[str, Any] | None:
    """The DeepSpeed config that hyperparameters name, or None; None without transformers."""
    if "transformers" not in sys.modules or find_spec("accelerate") is None:
        return None
    try:
        return get_ds_config_from_hparams(hparams)
    except TrialError:
        return None  # the trial, which reads the file itself, reports the error


def divide_pretrained(config: Mapping[str, Any]) -> object:
    """Have transformers divide the models that it builds from now on, as ZeRO-3 does.

    Returns:
        An object to keep: transformers only has a weak reference to it, and divides while it
        exists.

    Raises TrialError if transformers or accelerate, which it needs for that, is not installed.
    """
    missing = [name for name in ("transformers", "accelerate") if find_spec(name) is None]
    if missing:
        raise TrialError(
            f"set_deepspeed_config needs {' and '.join(missing)}, not installed here: "
            "pip install 'trialflow[hf]'"
        )
    _set_malloc_thresholds(mmap=_LARGE_BYTES, trim=_LARGE_BYTES)
    # A trial may complete them later, and DeepSpeed's own error about them comes with our advice.
    rest = {name: value for name, value in config.items() if name not in BATCH_SIZES}
    integration = import_module(_INTEGRATION)
    divided: object = integration.HfDeepSpeedConfig({**rest, "train_micro_batch_size_per_gpu": 1})
    return divided


def divide_no_more() -> None:
    """Have transformers build whole models again; a warm rank's last trial may have divided."""
    if integration := sys.modules.get(_INTEGRATION):
        integration.unset_hf_deepspeed_config()
        end_of_loading()


def end_of_loading() -> None:
    """Let malloc keep large blocks for the next tensor again, as training needs."""
    _set_malloc_thresholds(mmap=_MOST_BYTES, trim=2 * _MOST_BYTES)


def _set_malloc_thresholds(mmap: int, trim: int) -> None:
    """On CPU ranks, give blocks of `mmap` bytes and more their own memory, returned at once.

    Otherwise the gathered weights that a rank frees stay in its heap, between the parts that it
    keeps: CPU ranks of 4 held up to 1.3 times the weights while they loaded a quarter.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if get_accelerator().device_name() == "cpu" and mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, mmap)
        mallopt(_M_TRIM_THRESHOLD, trim)
