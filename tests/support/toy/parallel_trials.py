"""Toy trials whose model is split over ranks: a pipeline, and tensor parallelism by hand."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from toy_trial import ToyTrial, samples

from trial_core.deepspeed import DeepSpeedTrialContext, ModelParallelUnit
from trial_core.pytorch import DataLoader


def ds_config(hparams: dict[str, Any]) -> dict[str, Any]:
    """The toys' DeepSpeed configuration."""
    return {
        "train_micro_batch_size_per_gpu": hparams["micro_batch_size"],
        "gradient_accumulation_steps": hparams["accumulation"],
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": hparams["zero_stage"], "reduce_bucket_size": 1000},
        "steps_per_print": 1000000,
    }


class _SplitTrial(ToyTrial):
    """Records what a rank draws from its loaders. Builds loaders on every rank."""

    def _prepare(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.hparams = {
            "micro_batch_size": 2,
            "accumulation": 2,
            "zero_stage": 0,
            "train_samples": 64,
            "validation_samples": 32,
            "shuffle": True,
            **context.get_hparams(),
        }
        self.record = self.hparams.get("record")
        self.drawn: list[list[float]] = []

    def _noted(self, batches: Iterator[Any] | None) -> Iterator[Any] | None:
        """`batches`, with their indices recorded in `drawn`."""
        self.drawn = []
        if batches is None:
            return None

        def passing() -> Iterator[Any]:
            for inputs, index in batches:
                self.drawn.append(index.flatten().tolist())
                yield inputs, index

        return passing()

    def _write(self, *what: Any) -> None:
        if self.record:
            with self._file("samples").open("a") as file:
                file.write(json.dumps([*what, self.drawn]) + "\n")


def _loss(outputs: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(outputs.sum(1, keepdim=True), index / 64)


def pipeline(hparams: dict[str, Any], stages: int, training_data: Any = None) -> Any:
    """The engine of a pipeline, with dropout in the first stage."""
    model = PipelineModule(
        layers=[
            LayerSpec(torch.nn.Linear, 2, 16),
            LayerSpec(torch.nn.Dropout, 0.2),
            LayerSpec(torch.nn.Linear, 16, 16),
            LayerSpec(torch.nn.Tanh),
            LayerSpec(torch.nn.Linear, 16, 16),
            LayerSpec(torch.nn.Tanh),
            LayerSpec(torch.nn.Linear, 16, 8),
            LayerSpec(torch.nn.Linear, 8, 2),
        ],
        num_stages=stages,
        loss_fn=_loss,
        partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config=ds_config(hparams),
        training_data=training_data,
    )
    return engine


class PipelineTrial(_SplitTrial):
    """A pipeline of `stages` stages."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self._prepare(context)
        engine = pipeline(self.hparams, self.hparams.get("stages", 2))
        self.engine = context.wrap_model_engine(engine)
        self.seen_indices = context.wrap_reducer(sorted, name="indices", for_training=False)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self.engine.train_batch(self._noted(dataloader_iter))
        self._write(batch_idx, epoch_idx)
        return {"loss": loss, "stage": float(self.engine.stage_id)}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        loss = self.engine.eval_batch(self._noted(dataloader_iter))
        for micro_batch in self.drawn:
            for index in micro_batch:
                self.seen_indices.update(index)
        return {"loss": loss, "stage": float(self.engine.stage_id)}


class PipelineWithLoader(PipelineTrial):
    """Trains and validates on the loader of deepspeed.initialize, which repeats without end."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self._prepare(context)
        context.disable_dataset_reproducibility_checks()
        dataset = samples(self.hparams["train_samples"])
        engine = pipeline(self.hparams, self.hparams.get("stages", 2), dataset)
        self.engine = context.wrap_model_engine(engine)
        self.seen_indices = context.wrap_reducer(sorted, name="indices", for_training=False)

    def build_training_data_loader(self) -> Any:
        return self.engine.training_dataloader

    def build_validation_data_loader(self) -> Any:
        return self.engine.training_dataloader


class TwoPipelines(PipelineTrial):
    """Two pipelines with the same stages and data."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.second = context.wrap_model_engine(pipeline(self.hparams, stages=2))

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        batch = list(itertools.islice(dataloader_iter, self.hparams["accumulation"]))
        metrics = super().train_batch(iter(batch), epoch_idx, batch_idx)
        return {**metrics, "second": self.second.train_batch(iter(batch))}


class NoisyPipeline(PipelineTrial):
    """Loading draws noise, which is part of the recorded indices."""

    def build_training_data_loader(self) -> Any:
        return self._noisy(super().build_training_data_loader())

    def build_validation_data_loader(self) -> Any:
        return self._noisy(super().build_validation_data_loader())

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        metrics = super().evaluate_batch(dataloader_iter, batch_idx)
        self._write("validation", batch_idx)
        return metrics

    @staticmethod
    def _noisy(loader: Any) -> Any:
        if loader is None:
            return None
        collate = loader.collate_fn

        def noisy(rows: Any) -> Any:
            inputs, index = collate(rows)
            return inputs, index + torch.rand(()) + random.random()

        return DataLoader(loader.dataset, batch_size=loader.batch_size, collate_fn=noisy)


class _Grid:
    """An mpu for DeepSpeed: each pair of neighbouring ranks shares a copy of the model."""

    def __init__(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self.model = [dist.new_group([first, first + 1]) for first in range(0, size, 2)][rank // 2]
        self.data = [dist.new_group(list(range(part, size, 2))) for part in (0, 1)][rank % 2]
        self.part, self.copy, self.copies = rank % 2, rank // 2, size // 2

    def get_model_parallel_rank(self) -> int:
        return self.part

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_group(self) -> Any:
        return self.model

    def get_data_parallel_rank(self) -> int:
        return self.copy

    def get_data_parallel_world_size(self) -> int:
        return self.copies

    def get_data_parallel_group(self) -> Any:
        return self.data


class _SumOfParts(torch.autograd.Function):
    """The sum over the ranks of a model; each rank gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _HalfModel(torch.nn.Module):
    """Half of the hidden units of a perceptron."""

    def __init__(self, grid: _Grid) -> None:
        super().__init__()
        self.group = grid.model
        torch.manual_seed(100 + grid.part)
        self.hidden = torch.nn.Linear(2, 8)
        self.out = torch.nn.Linear(8, 2, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        part = self.out(torch.tanh(self.hidden(inputs)))
        total: torch.Tensor = _SumOfParts.apply(part, self.group)  # type: ignore[no-untyped-call]
        return total


class TensorParallelTrial(_SplitTrial):
    """Each model spans two ranks; the first of them loads data for both, and alone reports."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self._prepare(context)
        self.grid = _Grid()
        model = _HalfModel(self.grid)
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=ds_config(self.hparams),
            mpu=self.grid,
        )
        self.engine = context.wrap_model_engine(engine)
        context.set_mpu(
            ModelParallelUnit(
                data_parallel_rank=self.grid.copy,
                data_parallel_world_size=self.grid.copies,
                should_report_metrics=self.grid.part == 0,
                should_build_data_loader=self.grid.part == 0,
            )
        )
        self.seen_indices = context.wrap_reducer(sorted, name="indices", for_training=False)

    def _batch(self, dataloader_iter: Any) -> tuple[torch.Tensor, torch.Tensor]:
        box = [next(dataloader_iter)] if dataloader_iter is not None else [None]
        dist.broadcast_object_list(box, src=2 * self.grid.copy, group=self.grid.model)
        inputs, index = box[0]
        self.drawn = [index.flatten().tolist()]
        return inputs, index

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        inputs, index = self._batch(dataloader_iter)
        loss = _loss(self.engine(inputs), index)
        self.engine.backward(loss)
        self.engine.step()
        self._write(batch_idx, torch.rand(1).item())
        return {"loss": loss, "rank": float(self.context.distributed.get_rank())}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        inputs, index = self._batch(dataloader_iter)
        for one in self.drawn[0]:
            self.seen_indices.update(one)
        return {
            "loss": _loss(self.engine(inputs), index),
            "rank": float(self.context.distributed.get_rank()),
            "mean_index": index.mean(),
        }


class MisfitMPU(TensorParallelTrial):
    """Every rank claims to be the first of two data-parallel ranks."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self._prepare(context)
        model = torch.nn.Linear(2, 2)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=ds_config(self.hparams)
        )
        self.engine = context.wrap_model_engine(engine)
        context.set_mpu(ModelParallelUnit(0, 2, True, True))


class RankZeroReports(ToyTrial):
    """Gives a unit of another class, and lets rank 0 alone report; others return nothing."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        rank, size = context.distributed.get_rank(), context.distributed.get_size()
        unit: Any = SimpleNamespace(
            data_parallel_rank=rank,
            data_parallel_world_size=size,
            should_report_metrics=rank == 0,
            should_build_data_loader=True,
        )
        context.set_mpu(unit)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        metrics = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return metrics if self.context.distributed.get_rank() == 0 else None


class UnsizedPipeline(PipelineTrial):
    """Validates on an iterable dataset without a length."""

    def build_validation_data_loader(self) -> Any:
        return DataLoader(
            Unsized(self.hparams["validation_samples"]),
            batch_size=self.hparams["micro_batch_size"],
        )


class Unsized(torch.utils.data.IterableDataset[Any]):
    """Samples without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        dataset = samples(self.count)
        return (dataset[i] for i in range(self.count))
