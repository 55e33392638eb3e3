"""The PyTorch trial API: change ``determined.pytorch`` to ``trial_core.pytorch``.

Names are imported when they are first used, so that importing the package stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trial_core import deepspeed
    from trial_core.pytorch.callback import PyTorchCallback
    from trial_core.pytorch.custom_reducers import MetricReducer
    from trial_core.pytorch.data import samplers
    from trial_core.pytorch.data.dataloader import DataLoader
    from trial_core.pytorch.metric_reduction import Reducer
    from trial_core.pytorch.to_device import TorchData
    from trial_core.trainer.load_trial import load_trial_from_checkpoint_path
    from trial_core.units import Batch, Epoch, TrainUnit

_HOMES = {
    "Batch": "trial_core.units",
    "DataLoader": "trial_core.pytorch.data.dataloader",
    "Epoch": "trial_core.units",
    "MetricReducer": "trial_core.pytorch.custom_reducers",
    "PyTorchCallback": "trial_core.pytorch.callback",
    "Reducer": "trial_core.pytorch.metric_reduction",
    "TorchData": "trial_core.pytorch.to_device",
    "TrainUnit": "trial_core.units",
    "load_trial_from_checkpoint_path": "trial_core.trainer.load_trial",
}

__all__ = [
    "Batch",
    "DataLoader",
    "Epoch",
    "MetricReducer",
    "PyTorchCallback",
    "Reducer",
    "TorchData",
    "TrainUnit",
    "deepspeed",
    "load_trial_from_checkpoint_path",
    "samplers",
]


def __getattr__(name: str) -> Any:
    if name == "samplers":
        return importlib.import_module("trial_core.pytorch.data.samplers")
    if name == "deepspeed":  # for ``from determined.pytorch import deepspeed``
        return importlib.import_module("trial_core.deepspeed")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
