"""The DeepSpeed trial API: change ``determined.pytorch.deepspeed`` to ``trial_core.deepspeed``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trial_core.controller.controller import Controller as DeepSpeedTrialController
    from trial_core.deepspeed.context import DeepSpeedTrialContext
    from trial_core.deepspeed.ds_config import overwrite_deepspeed_config
    from trial_core.deepspeed.mpu import (
        ModelParallelUnit,
        make_data_parallel_mpu,
        make_deepspeed_mpu,
    )
    from trial_core.deepspeed.trial import DeepSpeedTrial
    from trial_core.trainer.init import deepspeed_init as init
    from trial_core.trainer.load_trial import load_trial_from_checkpoint_path
    from trial_core.trainer.trainer import Trainer

_HOMES = {
    "DeepSpeedTrial": "trial_core.deepspeed.trial",
    "DeepSpeedTrialContext": "trial_core.deepspeed.context",
    "ModelParallelUnit": "trial_core.deepspeed.mpu",
    "Trainer": "trial_core.trainer.trainer",
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
    "init",
    "load_trial_from_checkpoint_path",
    "make_data_parallel_mpu",
    "make_deepspeed_mpu",
    "overwrite_deepspeed_config",
]


def __getattr__(name: str) -> Any:
    # Resolved on first use, so that importing the package costs nothing (PEP 562).
    if name == "init":
        return importlib.import_module("trial_core.trainer.init").deepspeed_init
    if name == "DeepSpeedTrialController":
        return importlib.import_module("trial_core.controller.controller").Controller
    if name not in _HOMES:
        raise _unknown(name)
    return getattr(importlib.import_module(_HOMES[name]), name)


def _unknown(name: str) -> AttributeError:
    from trial_core.unknown_names import unknown_name

    return unknown_name(__name__, name, __all__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
