"""Loads a model of transformers under ZeRO-3, and measures the rank's memory meanwhile."""

from __future__ import annotations

import ctypes
import gc
import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import AutoModelForCausalLM

from benchmarks.memory import PeakMemory, own_resident_bytes
from benchmarks.pretrained import SMALL
from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from trial_core.pytorch import DataLoader

# PyTorch's optimizer, which needs no operator that is compiled first.
ADAM = {"type": "Adam", "params": {"torch_adam": True}}
CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAM}


class PretrainedTrial(DeepSpeedTrial):
    """Loads in ``__init__``. Its engine has another model, since only loading is measured."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        hparams = context.get_hparams()
        folder = Path(hparams["folder"])
        AutoModelForCausalLM.from_pretrained(folder / SMALL)  # for the imports
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        with PeakMemory(own_resident_bytes) as peak:
            model = AutoModelForCausalLM.from_pretrained(folder)
        parameters: list[Any] = [*model.parameters()]  # ds_numel is DeepSpeed's
        weights = sum(each.ds_numel * each.element_size() for each in parameters)
        figures = {
            "weights_mib": weights / 2**20,
            "peak_share": (peak.own - peak.before.own) / weights,
            "kept_share": (own_resident_bytes().own - peak.before.own) / weights,
            "mapped_peak_share": (peak.mapped - peak.before.mapped) / weights,
        }
        rank = context.distributed.get_rank()
        (folder / f"rank-{rank}.json").write_text(json.dumps(figures))
        network = torch.nn.Linear(1, 1)
        engine, *_ = deepspeed.initialize(
            model=network, model_parameters=network.parameters(), config=CONFIG
        )
        context.wrap_model_engine(engine)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        raise NotImplementedError

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        raise NotImplementedError

    def build_training_data_loader(self) -> DataLoader:
        raise NotImplementedError

    def build_validation_data_loader(self) -> DataLoader:
        raise NotImplementedError
