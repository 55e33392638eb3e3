"""The shape of Determined's tutorial `mnist_pytorch`: a script with `init` and `Trainer`, which
runs in a cluster and locally, and takes its length from its arguments."""

import argparse
import logging
import pathlib
from typing import Any

import determined as det
import model
import torch
import yaml
from determined import pytorch
from torch import nn


class MNistTrial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext, hparams: dict) -> None:
        self.context = context
        self.per_slot_batch_size = 16 // self.context.distributed.get_size()
        self.loss_fn = nn.NLLLoss()
        self.model = self.context.wrap_model(model.build_model(hparams=hparams))
        self.optimizer = self.context.wrap_optimizer(
            torch.optim.Adadelta(self.model.parameters(), lr=hparams["learning_rate"])
        )

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(model.get_dataset(True), batch_size=self.per_slot_batch_size)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(model.get_dataset(False), batch_size=self.per_slot_batch_size)

    def train_batch(
        self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int
    ) -> dict[str, torch.Tensor]:
        images, labels = batch
        loss = self.loss_fn(self.model(images), labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: pytorch.TorchData, batch_idx: int) -> dict[str, Any]:
        images, labels = batch
        output = self.model(images)
        correct = output.argmax(dim=1).eq(labels).sum().item()
        return {
            "validation_loss": self.loss_fn(output, labels).item(),
            "accuracy": correct / len(images),
            "batch": self.context.current_train_batch(),
        }


def run(max_length: pytorch.TrainUnit, local: bool) -> None:
    info = det.get_cluster_info()
    if local:
        conf = yaml.safe_load(pathlib.Path("const.yaml").read_text())
        hparams = conf["hyperparameters"]
        latest_checkpoint = None
    else:
        hparams = info.trial.hparams
        latest_checkpoint = info.latest_checkpoint
    with pytorch.init() as train_context:
        trial = MNistTrial(train_context, hparams=hparams)
        trainer = pytorch.Trainer(trial, train_context)
        trainer.fit(max_length=max_length, latest_checkpoint=latest_checkpoint)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    parser = argparse.ArgumentParser()
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--batches", type=int)
    group.add_argument("--epochs", type=int)
    args = parser.parse_args()
    length = pytorch.Epoch(args.epochs) if args.epochs else pytorch.Batch(args.batches or 100)
    run(length, local=det.get_cluster_info() is None)
