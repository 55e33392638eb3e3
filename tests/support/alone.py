"""Trains a PyTorchTrial in this process, without ranks, as a measure for those with ranks."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.support.slots import TOY
from trial_core.pytorch import PyTorchTrialContext
from trial_core.pytorch.pytorch_adapter import PyTorchTrialAdapter
from trial_core.rank.rank_state import seed_everything


def train_alone(
    entrypoint: str, batches: int, hparams: Mapping[str, Any], **fields: Any
) -> list[dict[str, torch.Tensor]]:
    """The weights of each model after `batches`.

    Args:
        fields: other fields of the experiment.
    """
    module, _, name = entrypoint.partition(":")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOY)
        trial_class = getattr(importlib.import_module(module), name)
    context = PyTorchTrialContext.from_config({"hyperparameters": dict(hparams), **fields})
    seed_everything(0)
    trial = trial_class(context)
    adapter = PyTorchTrialAdapter(trial, context)
    adapter.set_training(True)
    info = context.run_info
    while info.batches_trained < batches:
        for batch in trial.build_training_data_loader():
            adapter.train_batch(iter([batch]), 0, info.batches_trained, lambda _: None)
            info.batches_trained += 1
            if info.batches_trained == batches:
                break
    return [model.state_dict() for model in context.models]
