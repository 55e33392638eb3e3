"""Toy trials that validate in every way.

Validation metrics are of the samples' indices, which differ by rank and by batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import RepeatingLoader
from parallel_trials import Unsized, ds_config
from toy_trial import ToyTrial, samples

from trial_core.deepspeed import DeepSpeedTrialContext
from trial_core.pytorch import DataLoader, MetricReducer, PyTorchCallback, Reducer


class SumAndCount(MetricReducer):
    """Counts the samples, and sums their indices."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sums = [0.0, 0.0]

    def update(self, index: torch.Tensor) -> None:
        self.sums[0] += index.sum().item()
        self.sums[1] += index.numel()

    def per_slot_reduce(self) -> list[float]:
        return self.sums  # not a copy: later updates change it

    def cross_slot_reduce(self, per_slot_metrics: list[list[float]]) -> dict[str, float]:
        sums, counts = zip(*per_slot_metrics, strict=True)
        return {"reducer_sum": sum(sums), "reducer_count": sum(counts)}


class Indices(ToyTrial):
    """Reports the indices of the samples, by metric and by both kinds of custom reducer."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.sum_and_count = context.wrap_reducer(SumAndCount(), for_training=False)
        self.sorted = context.wrap_reducer(sorted, name="indices", for_training=False)

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        inputs, index = self.context.to_device(next(dataloader_iter))
        self.sum_and_count.update(index)
        for one in index.flatten().tolist():
            self.sorted.update(one)
        return {"loss": self._loss(inputs, index), "mean_index": index.mean()}


class NamedReducer(ToyTrial):
    """Reports the indices by a custom reducer with a name."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.sorted = context.wrap_reducer(sorted, name="indices", for_training=False)

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        inputs, index = self.context.to_device(next(dataloader_iter))
        for one in index.flatten().tolist():
            self.sorted.update(one)
        return {"loss": self._loss(inputs, index)}


class ReadOnce(NamedReducer):
    """Its validation loader can be read only once, and has a length."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.disable_dataset_reproducibility_checks()

    def build_validation_data_loader(self) -> Any:
        dataset = samples(self.hparams["validation_samples"])
        rank, size = self.context.distributed.get_rank(), self.context.distributed.get_size()
        shard = range(rank, len(dataset), size)
        micro_batches = ([part.unsqueeze(0) for part in dataset[i]] for i in shard)

        class OnePass:
            def __len__(self) -> int:
                return len(shard)

            def __iter__(self) -> Any:
                return self

            def __next__(self) -> Any:
                return next(micro_batches)

        return OnePass()


class Prepares(PyTorchCallback):
    """Sets what the evaluation needs."""

    def __init__(self, trial: Prepared) -> None:
        self.trial = trial

    def on_validation_start(self) -> None:
        self.trial.is_prepared = True


class Prepared(NamedReducer):
    """Its evaluation needs its callback."""

    is_prepared = False

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        assert self.is_prepared
        return super().evaluate_batch(dataloader_iter, batch_idx)

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"prepares": Prepares(self)}


class WithoutLength(Indices):
    """The validation set has no length."""

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(
            Unsized(self.hparams["validation_samples"]),
            batch_size=self.hparams["micro_batch_size"],
        )


class OwnLoader(Indices):
    """A custom loader that shards itself and has no length."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.disable_dataset_reproducibility_checks()

    def build_validation_data_loader(self) -> Any:
        dataset = samples(self.hparams["validation_samples"])
        rank, size = self.context.distributed.get_rank(), self.context.distributed.get_size()

        class Shard:
            def __iter__(self) -> Iterator[Any]:
                return (
                    [part.unsqueeze(0) for part in dataset[i]]
                    for i in range(rank, len(dataset), size)
                )

        return Shard()


class OwnTrainingLoader(ToyTrial):
    """A custom training loader that shards itself, and ends with each epoch."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.disable_dataset_reproducibility_checks()

    def build_training_data_loader(self) -> Any:
        dataset = samples(self.hparams["train_samples"])
        sampler = torch.utils.data.DistributedSampler(dataset, shuffle=False)  # this rank's half
        return torch.utils.data.DataLoader(
            dataset, batch_size=self.hparams["micro_batch_size"], sampler=sampler
        )


class DeepSpeedsLoader(ToyTrial):
    """The loader of deepspeed.initialize, as in the reference's example."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.disable_dataset_reproducibility_checks()
        context.models.clear()
        model = torch.nn.Linear(2, 2)
        engine, _, self.loader, _ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=ds_config(self.hparams),
            training_data=samples(self.hparams["train_samples"]),
        )
        self.engine = context.wrap_model_engine(engine)

    def build_training_data_loader(self) -> Any:
        return self.loader


class DeepSpeedsLoaderForBoth(DeepSpeedsLoader):
    """Trains and validates on the same loader of deepspeed.initialize."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.indices = context.wrap_reducer(sorted, name="indices", for_training=False)

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        inputs, index = self.context.to_device(next(dataloader_iter))
        for one in index.flatten().tolist():
            self.indices.update(one)
        return {"loss": self._loss(inputs, index)}

    def build_validation_data_loader(self) -> Any:
        return self.loader


class RepeatingLoaders(DeepSpeedsLoaderForBoth):
    """Its loaders are RepeatingLoaders, one of them twice over."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        dataset = samples(self.hparams["train_samples"])
        shard = torch.utils.data.DistributedSampler(dataset, shuffle=False)
        size = self.hparams["micro_batch_size"]
        inside = torch.utils.data.DataLoader(dataset, batch_size=size, sampler=shard)
        self.loader = RepeatingLoader(RepeatingLoader(inside))

    def build_validation_data_loader(self) -> Any:
        return RepeatingLoader(self.loader.loader.loader)


class RepeatingFullDataset(RepeatingLoaders):
    """Validates a RepeatingLoader at once."""

    evaluate_batch = ToyTrial.__mro__[1].evaluate_batch

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        parts = list(itertools.islice(data_loader, 100))
        return {"loss": 0.5, "micro_batches": float(len(parts))}


class TwoPerCall(Indices):
    """Takes two micro-batches in each call."""

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        super().evaluate_batch(dataloader_iter, batch_idx)
        return super().evaluate_batch(dataloader_iter, batch_idx)


class WithoutIndex(Indices):
    """The older form of evaluate_batch."""

    def evaluate_batch(self, dataloader_iter: Any) -> dict[str, Any]:  # type: ignore[override]
        return super().evaluate_batch(dataloader_iter, 0)


class ReducerPerMetric(Indices):
    """A reducer for each metric."""

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        inputs, index = next(dataloader_iter)
        values = {"loss": self._loss(inputs, index)}
        for name in ("avg", "sum", "max", "min"):
            values[name] = index.mean()
        return values

    def evaluation_reducer(self) -> dict[str, Reducer]:
        return {
            "loss": Reducer.AVG,
            "avg": Reducer.AVG,
            "sum": Reducer.SUM,
            "max": Reducer.MAX,
            "min": Reducer.MIN,
        }


class FullDataset(ToyTrial):
    """Validates the whole set at once."""

    evaluate_batch = ToyTrial.__mro__[1].evaluate_batch  # not defined

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        batches = list(data_loader)
        inputs, index = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return {
            "loss": self._loss(inputs, index),
            "indices": sorted(index.flatten().tolist()),
            "rank": self.context.distributed.get_rank(),
        }


class BothWays(FullDataset):
    """Defines both methods."""

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        return {}


class NeitherWay(ToyTrial):
    """Defines neither method."""

    evaluate_batch = ToyTrial.__mro__[1].evaluate_batch


class TouchAfterEvaluation(PyTorchCallback):
    """Creates a file when a rank has evaluated all batches."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        self.path.touch()


class Drawing(ToyTrial):
    """Its validation metric depends on random numbers.

    With ZeRO-3, ranks wait for each other in each evaluation, as they do for larger parameters.
    A rank creates a file once it has evaluated all batches and can no longer end early.
    """

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        rank = self.context.distributed.get_rank()
        return {"touch": TouchAfterEvaluation(Path(self.hparams["record"], f"evaluated-{rank}"))}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        metrics = super().evaluate_batch(dataloader_iter, batch_idx)
        if self.hparams["zero_stage"] == 3:
            self.context.distributed.allgather(batch_idx)
        return {**metrics, "drawn": torch.rand(())}


class DrawingAlone(Drawing):
    """The same, without the callback."""

    build_callbacks = ToyTrial.build_callbacks
