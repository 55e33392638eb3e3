"""The DeepSpeed trial API: change ``determined.pytorch.deepspeed`` to ``trial_core.deepspeed``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trial_core.common.lazy_names import lazy_names

if TYPE_CHECKING:
    from trial_core.deepspeed import dsat
    from trial_core.deepspeed.context import DeepSpeedTrialContext
    from trial_core.deepspeed.ds_config import overwrite_deepspeed_config
    from trial_core.deepspeed.mpu import (
        ModelParallelUnit,
        make_data_parallel_mpu,
        make_deepspeed_mpu,
    )
    from trial_core.deepspeed.trial import DeepSpeedTrial
    from trial_core.rank.controller import Controller as DeepSpeedTrialController
    from trial_core.trainer.init import deepspeed_init as init
    from trial_core.trainer.load_trial import load_trial_from_checkpoint_path
    from trial_core.trainer.trainer import Trainer

_HOMES = {
    "DeepSpeedTrial": "trial_core.deepspeed.trial",
    "DeepSpeedTrialContext": "trial_core.deepspeed.context",
    "DeepSpeedTrialController": "trial_core.rank.controller:Controller",
    "ModelParallelUnit": "trial_core.deepspeed.mpu",
    "Trainer": "trial_core.trainer.trainer",
    "init": "trial_core.trainer.init:deepspeed_init",
    "load_trial_from_checkpoint_path": "trial_core.trainer.load_trial",
    "make_data_parallel_mpu": "trial_core.deepspeed.mpu",
    "make_deepspeed_mpu": "trial_core.deepspeed.mpu",
    "overwrite_deepspeed_config": "trial_core.deepspeed.ds_config",
}

__all__ = [
    "DeepSpeedTrial",
    "DeepSpeedTrialContext",
    "DeepSpeedTrialController",
    "ModelParallelUnit",
    "Trainer",
    "dsat",
    "init",
    "load_trial_from_checkpoint_path",
    "make_data_parallel_mpu",
    "make_deepspeed_mpu",
    "overwrite_deepspeed_config",
]

__getattr__, __dir__ = lazy_names(__name__, __all__, _HOMES)
