"""The PyTorch trial API: change ``determined.pytorch`` to ``trial_core.pytorch``.

DeepSpeed trials, too, use the loaders, metrics and callbacks: Determined has them here.

Names are imported on first use, so importing the package stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trial_core.common.lazy_names import lazy_names

if TYPE_CHECKING:
    from trial_core import deepspeed
    from trial_core.deepspeed import dsat
    from trial_core.pytorch import experimental, samplers
    from trial_core.pytorch.context import PyTorchExperimentalContext, PyTorchTrialContext
    from trial_core.pytorch.lr_scheduler import LRScheduler
    from trial_core.pytorch.trial import PyTorchTrial
    from trial_core.rank.data.batch_length import data_length
    from trial_core.rank.data.dataloader import DataLoader
    from trial_core.rank.data.samplers import adapt_batch_sampler
    from trial_core.rank.trial.callback import PyTorchCallback
    from trial_core.rank.trial.custom_reducers import MetricReducer
    from trial_core.rank.trial.device_transfer import TorchData, to_device
    from trial_core.rank.trial.metric_reduction import Reducer
    from trial_core.schedule.units import Batch, Epoch, TrainUnit
    from trial_core.trainer.init import pytorch_init as init
    from trial_core.trainer.load_trial import load_trial_from_checkpoint_path
    from trial_core.trainer.trainer import Trainer

_HOMES = {
    "Batch": "trial_core.schedule.units",
    "DataLoader": "trial_core.rank.data.dataloader",
    "Epoch": "trial_core.schedule.units",
    "LRScheduler": "trial_core.pytorch.lr_scheduler",
    "MetricReducer": "trial_core.rank.trial.custom_reducers",
    "PyTorchCallback": "trial_core.rank.trial.callback",
    "PyTorchExperimentalContext": "trial_core.pytorch.context",
    "PyTorchTrial": "trial_core.pytorch.trial",
    "PyTorchTrialContext": "trial_core.pytorch.context",
    "Reducer": "trial_core.rank.trial.metric_reduction",
    "TorchData": "trial_core.rank.trial.device_transfer",
    "TrainUnit": "trial_core.schedule.units",
    "Trainer": "trial_core.trainer.trainer",
    "adapt_batch_sampler": "trial_core.rank.data.samplers",
    "deepspeed": "trial_core:deepspeed",  # for ``from determined.pytorch import deepspeed``
    "dsat": "trial_core.deepspeed:dsat",
    "init": "trial_core.trainer.init:pytorch_init",
    "data_length": "trial_core.rank.data.batch_length",
    "to_device": "trial_core.rank.trial.device_transfer",
    "load_trial_from_checkpoint_path": "trial_core.trainer.load_trial",
}

__all__ = [
    "Batch",
    "DataLoader",
    "Epoch",
    "LRScheduler",
    "MetricReducer",
    "PyTorchCallback",
    "PyTorchExperimentalContext",
    "PyTorchTrial",
    "PyTorchTrialContext",
    "Reducer",
    "TorchData",
    "TrainUnit",
    "Trainer",
    "adapt_batch_sampler",
    "data_length",
    "deepspeed",
    "dsat",
    "experimental",
    "init",
    "load_trial_from_checkpoint_path",
    "samplers",
    "to_device",
]

__getattr__, __dir__ = lazy_names(__name__, __all__, _HOMES)
