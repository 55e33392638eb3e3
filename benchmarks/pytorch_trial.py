"""The PyTorchTrial that benchmarks train. It also runs other libraries' loops."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.utils.data import TensorDataset

from benchmarks.models import MODELS
from benchmarks.peer_loops import Bare, PeerLoop, adam, build_peers
from benchmarks.pytorch_loop import BARE
from trial_core.pytorch import DataLoader, PyTorchTrial, PyTorchTrialContext, Reducer


class PyTorchLoopTrial(PyTorchTrial):
    """Trains a model of `MODELS` like any trial. Its validation is a turn of another loop.

    The loops come in the given order, then in the reverse order, and so on. The validation metric
    ``seconds`` is the turn's time on the slowest rank.

    Hyperparameters: model (a name in `MODELS`), loops (`BARE` and names in `PEERS`), bare_batches
    (batches in a turn).
    """

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        name, loops = context.get_hparam("model"), context.get_hparam("loops")
        self.shape = MODELS[name]
        self.model = context.wrap_model(self.shape())
        self.optimizer = context.wrap_optimizer(adam(self.model.parameters()))
        self.loops: dict[str, PeerLoop] = {
            BARE: Bare(self.shape, self.model, self.optimizer),
            **build_peers(name, [each for each in loops if each != BARE]),
        }
        self.turns = itertools.cycle([*loops, *reversed(loops)])
        self.batches: int = context.get_hparam("bare_batches")

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self.model(batch[0])
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        with torch.enable_grad():
            return {"seconds": self.loops[next(self.turns)].run(self.batches)}

    def evaluation_reducer(self) -> Reducer:
        return Reducer.MAX

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(
            self.shape.dataset(), batch_size=self.shape.micro_batch_size, shuffle=True
        )

    def build_validation_data_loader(self) -> DataLoader:
        # One batch, so one turn, on every rank.
        return DataLoader(TensorDataset(torch.zeros(self.context.distributed.get_size())))
