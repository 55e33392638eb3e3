"""Finds malignant tumours; the metric is a ROC-AUC, which is no average of the batches' areas."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import deepspeed
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from trial_core.pytorch import DataLoader, MetricReducer, PyTorchCallback

logger = logging.getLogger(__name__)

VALIDATION_PERIOD = 3  # every third patient is for validation


def load() -> tuple[TensorDataset, TensorDataset]:
    """Patients for training and for validation: 30 measurements, and 1 if benign, otherwise 0."""
    cancer = load_breast_cancer()
    measured = torch.tensor(cancer.data, dtype=torch.float32)
    benign = torch.tensor(cancer.target, dtype=torch.float32).unsqueeze(1)
    held_out = torch.arange(len(measured)) % VALIDATION_PERIOD == 0
    mean, std = measured[~held_out].mean(dim=0), measured[~held_out].std(dim=0)
    measured = (measured - mean) / std
    return (
        TensorDataset(measured[~held_out], benign[~held_out]),
        TensorDataset(measured[held_out], benign[held_out]),
    )


def roc_auc(values: list[tuple[float, float]]) -> float:
    """Reducer function: the area under the ROC curve of all ranks' (truth, score) pairs."""
    truths, scores = zip(*values, strict=True)
    return float(roc_auc_score(truths, scores))


class MeanOfRanks(MetricReducer):
    """The mean of the ranks' own areas, for comparison."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.values: list[tuple[float, float]] = []

    def update(self, value: tuple[float, float]) -> None:
        self.values.append(value)

    def per_slot_reduce(self) -> float | None:
        return roc_auc(self.values) if self.values else None

    def cross_slot_reduce(self, per_slot_metrics: list[float | None]) -> float:
        known = [area for area in per_slot_metrics if area is not None]
        return sum(known) / len(known)


class ROCAUCTrial(DeepSpeedTrial):
    """A small network, two custom metrics and two callbacks."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.training, self.validation = load()
        hparams = context.get_hparams()
        width = hparams["width"]
        model = nn.Sequential(
            nn.Linear(30, width), nn.ReLU(), nn.Dropout(hparams["dropout"]), nn.Linear(width, 1)
        )
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=str(Path(__file__).with_name("ds_config.json")),
        )
        self.engine = context.wrap_model_engine(engine)
        self.reducers = [
            context.wrap_reducer(roc_auc, name="roc_auc", for_training=False),
            context.wrap_reducer(MeanOfRanks(), name="mean_of_ranks", for_training=False),
        ]

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss, _, _ = self._loss(dataloader_iter)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        loss, logits, benign = self._loss(dataloader_iter)
        for value in zip(benign.flatten().tolist(), logits.flatten().tolist(), strict=True):
            for reducer in self.reducers:
                reducer.update(value)
        # The reducers' metrics are added when the whole set has been validated.
        return {"loss": loss}

    def _loss(self, dataloader_iter: Any) -> tuple[Tensor, Tensor, Tensor]:
        measured, benign = self.context.to_device(next(dataloader_iter))
        logits = self.engine(measured)
        return binary_cross_entropy_with_logits(logits, benign), logits, benign

    def build_training_data_loader(self) -> DataLoader:
        size = self.engine.train_micro_batch_size_per_gpu()
        return DataLoader(self.training, batch_size=size, shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.validation, batch_size=16)

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"patience": StopWithoutProgress(self.context), "journal": Journal(self.context)}


class StopWithoutProgress(PyTorchCallback):
    """Early stopping: ends the trial after `patience` validations without a better area."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.patience = context.get_hparam("patience")
        self.best, self.since_best = 0.0, 0

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        if metrics["roc_auc"] > self.best:
            self.best, self.since_best = metrics["roc_auc"], 0
        else:
            self.since_best += 1
        if self.since_best >= self.patience:
            self.context.set_stop_requested(True)

    def state_dict(self) -> dict[str, Any]:
        """Saved with every checkpoint, so that a resumed trial continues to count."""
        return {"best": self.best, "since_best": self.since_best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.since_best = state_dict["best"], state_dict["since_best"]


class Journal(PyTorchCallback):
    """Logs areas and committed checkpoints, on rank 0."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.is_chief = context.distributed.get_rank() == 0

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self._log("area %.4f, mean of ranks %.4f", metrics["roc_auc"], metrics["mean_of_ranks"])

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self._log("checkpoint %s is committed", uuid)

    def _log(self, *message: Any) -> None:
        if self.is_chief:
            logger.info(*message)
