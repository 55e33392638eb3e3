"""The trials that benchmarks train, and the bare DeepSpeed loop for comparison."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from torch.utils.data import DataLoader as TorchDataLoader, DistributedSampler, TensorDataset

from benchmarks.models import MODELS, SAMPLES, Small, Tiny
from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from trial_core.pytorch import DataLoader, Reducer


def new_engine(model: torch.nn.Module, micro_batch_size: int, zero_stage: int = 1) -> Any:
    """Return a typical DeepSpeed engine: ZeRO-1, Adam, a learning rate schedule."""
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": micro_batch_size,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
            "zero_optimization": {"stage": zero_stage},
        },
    )
    return engine


class BareLoop:
    """A training loop without trialflow: torch's loader and sampler, and an engine.

    It trains the controller's own engine: two equal engines differ in speed by their memory
    addresses.
    """

    def __init__(self, engine: Any, model: type[Tiny] | type[Small]) -> None:
        dataset = model.dataset()
        self.engine = engine
        self._sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, num_replicas=dist.get_world_size(), rank=dist.get_rank()
        )
        self._loader = TorchDataLoader(
            dataset, batch_size=model.micro_batch_size, sampler=self._sampler
        )
        self._batches = self._endless()

    def run(self, batches: int) -> float:
        """Train batches, and return the seconds. Collective: every rank calls this."""
        self.engine.train()
        began = time.perf_counter()
        for _ in range(batches):
            (batch,) = next(self._batches)
            loss = self.engine(batch.to(self.engine.device))
            self.engine.backward(loss)
            self.engine.step()
        get_accelerator().synchronize()
        return time.perf_counter() - began

    def _endless(self) -> Iterator[Any]:
        epoch = 0
        while True:
            self._sampler.set_epoch(epoch)
            yield from self._loader
            epoch += 1


class LoopTrial(DeepSpeedTrial):
    """Trains a model of `MODELS` like any trial; its validation is a turn of the bare loop.

    The validation metric ``seconds`` is the time of the bare loop on the slowest rank.

    Hyperparameters: model (a name in `MODELS`), bare_batches (batches in a turn of the bare loop).
    """

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.model = MODELS[context.get_hparam("model")]
        self.engine = context.wrap_model_engine(
            new_engine(self.model(), self.model.micro_batch_size)
        )
        self.bare = BareLoop(self.engine, self.model)
        self.bare_batches: int = context.get_hparam("bare_batches")

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        (batch,) = self.context.to_device(next(dataloader_iter))
        loss = self.engine(batch)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        with torch.enable_grad():
            return {"seconds": self.bare.run(self.bare_batches)}

    def evaluation_reducer(self) -> Reducer:
        return Reducer.MAX

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(
            self.model.dataset(), batch_size=self.model.micro_batch_size, shuffle=True
        )

    def build_validation_data_loader(self) -> DataLoader:
        # One micro-batch, so one turn, on every rank.
        return DataLoader(TensorDataset(torch.zeros(self.context.distributed.get_size())))


class TimedTrial(LoopTrial):
    """Also reports the metric ``seconds``: the time a batch took inside the trial."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        began = time.perf_counter()
        metrics = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return {**metrics, "seconds": time.perf_counter() - began}


class ShardedTrial(DeepSpeedTrial):
    """A model of `MODELS` under ZeRO. Hyperparameters: model, zero_stage (default 3)."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.model = MODELS[context.get_hparam("model")]
        stage = context.get_hparams().get("zero_stage", 3)
        self.engine = context.wrap_model_engine(new_engine(self.model(), 1, stage))

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        (batch,) = self.context.to_device(next(dataloader_iter))
        loss = self.engine(batch)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        (batch,) = self.context.to_device(next(dataloader_iter))
        return {"loss": self.engine(batch)}

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(self.model.dataset(), batch_size=1)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.model.dataset(), batch_size=1)


class PipelineTrial(DeepSpeedTrial):
    """A pipeline of small linear layers, with one stage per rank."""

    WIDTH = 4

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        stages = context.distributed.get_size()
        model = PipelineModule(
            layers=[LayerSpec(torch.nn.Linear, self.WIDTH, self.WIDTH) for _ in range(2 * stages)],
            num_stages=stages,
            loss_fn=torch.nn.functional.mse_loss,
            partition_method="uniform",
        )
        self.engine = context.wrap_model_engine(new_engine(model, 2, zero_stage=0))

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.engine.train_batch(dataloader_iter)}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.engine.eval_batch(dataloader_iter)}

    def build_training_data_loader(self) -> DataLoader:
        inputs, targets = torch.rand(2, SAMPLES, self.WIDTH)
        return DataLoader(TensorDataset(inputs, targets), batch_size=2)

    def build_validation_data_loader(self) -> DataLoader:
        return self.build_training_data_loader()
