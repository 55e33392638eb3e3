"""Toy trials for a rank on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.utils.data import TensorDataset
from toy_trial import ToyTrial

from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from trial_core.pytorch import DataLoader, PyTorchTrial, PyTorchTrialContext

WIDTH = 1024


class BrokenKernel(ToyTrial):
    """A toy whose kernels can also end badly.

    `do: assert` indexes beyond a tensor, so that CUDA refuses all later work of the process;
    `do: spin` waits for a kernel that does not end.
    """

    def _misbehave(self) -> None:
        if self.hparams["do"] not in ("assert", "spin"):
            super()._misbehave()
            return
        once = Path(self.hparams["once"])
        if once.exists():
            return
        once.touch()
        device = self.engine.device
        if self.hparams["do"] == "assert":
            torch.zeros(4, device=device)[torch.tensor([9], device=device)].sum().item()
        torch.cuda._sleep(10**14)  # clock cycles, so most of a day
        torch.cuda.synchronize()


class Wide(DeepSpeedTrial):
    """Layers of some MiB each, which train on random numbers.

    Hyperparameters: layers, ds_config.
    """

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(context.get_hparam("layers"))]
        model = torch.nn.Sequential(*layers)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            **context.get_hparam("ds_config"),
        }
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        self.engine = context.wrap_model_engine(engine)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self._loss(dataloader_iter)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self._loss(dataloader_iter)}

    def _loss(self, batches: Any) -> torch.Tensor:
        (inputs,) = self.context.to_device(next(batches))
        dtype = next(self.engine.module.parameters()).dtype
        outputs: torch.Tensor = self.engine(inputs.to(dtype))
        return outputs.float().square().mean()

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(64, WIDTH)), batch_size=4, num_workers=2)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(8, WIDTH)), batch_size=4)


class Amp(PyTorchTrial):
    """A `PyTorchTrial` in mixed precision: `scaler`: with a scaler of the trial's own."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1)
        )
        self.model = context.wrap_model(model)
        # Doubles every other batch, so that a wrong scale after resuming is seen.
        self.scaler: Any = None
        if context.get_hparam("scaler"):
            self.scaler = context.wrap_scaler(
                torch.amp.grad_scaler.GradScaler("cuda", init_scale=64.0, growth_interval=2)
            )
        else:
            context.experimental.use_amp()
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=1e-3))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if self.scaler is None:
            loss = self._loss(batch)
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            return {"loss": loss}
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self._loss(batch)
        self.context.backward(self.scaler.scale(loss))
        self.context.step_optimizer(self.optimizer, scaler=self.scaler)
        self.scaler.update()
        return {"loss": loss, "scale": self.scaler.get_scale()}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"loss": self._loss(batch)}

    def _loss(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch[0]).float().square().mean()
        return loss

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(64, WIDTH)), batch_size=4, shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(8, WIDTH)), batch_size=4)
