"""Toy trials with unusual training loaders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Subset
from toy_trial import ToyTrial, samples

from trial_core.deepspeed import DeepSpeedTrialContext
from trial_core.pytorch import DataLoader


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Augmented samples: reading one draws from the global generator."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, label = self.dataset[index]
        return inputs + 0.1 * torch.rand(2), label


class Listed(Noisy):
    """Samples whose names are the lines of a file, as they may be those of a folder."""

    def __init__(self, dataset: Any, file: Path) -> None:
        super().__init__(dataset)
        self.names = file.read_text().split()

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return super().__getitem__(int(self.names[index]))


class Stream(IterableDataset[Any]):
    """The samples of a dataset as a stream, in another order in each epoch."""

    def __init__(self, dataset: Noisy) -> None:
        self.dataset = dataset
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(self.epoch))
        return (self.dataset[i] for i in order.tolist())


class Epochs(ToyTrial):
    """Augmented samples in a `trial_core.pytorch.DataLoader` with `workers`."""

    def build_training_data_loader(self) -> DataLoader:
        everything = Noisy(samples(self.hparams["train_samples"]))
        is_iterable = self.hparams.get("iterable", False)
        return DataLoader(
            Stream(everything) if is_iterable else everything,
            batch_size=self.hparams["micro_batch_size"],
            shuffle=self.hparams["shuffle"] and not is_iterable,
            num_workers=self.hparams.get("workers", 0),
            persistent_workers=self.hparams.get("persistent_workers", False),
        )


class ByName(ToyTrial):
    """Each rank has the names of the samples in a file of its own."""

    def build_training_data_loader(self) -> DataLoader:
        file = Path(self.hparams["record"], f"names-{self.context.distributed.get_rank()}")
        everything = samples(self.hparams["train_samples"])
        return DataLoader(
            Listed(everything, file), batch_size=self.hparams["micro_batch_size"], shuffle=True
        )


class Unchecked(ToyTrial):
    """Shards the data itself."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.disable_dataset_reproducibility_checks()

    def shard(self) -> Any:
        everything = samples(self.hparams["train_samples"])
        ranks = self.context.distributed
        return Subset(everything, range(ranks.get_rank(), len(everything), ranks.get_size()))


class Torchdata(Unchecked):
    """torchdata's loader, which shuffles itself and loads ahead with workers."""

    def build_training_data_loader(self) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        workers = self.hparams.get("workers", 0)
        return StatefulDataLoader(
            self.shard() if workers else Noisy(self.shard()),
            batch_size=self.hparams["micro_batch_size"],
            shuffle=True,
            num_workers=workers,
            persistent_workers=bool(workers),
        )


class Drawing:
    """A loader that draws its micro-batches with replacement, and ends after `length` of them."""

    def __init__(self, dataset: Any, length: int) -> None:
        self.dataset, self.length = dataset, length
        self.given = 0
        self.generator = torch.Generator()

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        torch.rand(1)  # as torch's loader, draws from the global generator when a pass begins
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        while self.given < self.length:
            self.given += 1
            picked = torch.randint(len(self.dataset), (2,), generator=self.generator).tolist()
            parts = zip(*(self.dataset[i] for i in picked), strict=True)
            yield tuple(torch.stack(part) for part in parts)
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]
        self.generator.set_state(state["generator"])


class Stateful(Unchecked):
    """A custom loader that saves its state."""

    def build_training_data_loader(self) -> Any:
        return Drawing(self.shard(), self.hparams.get("pass_length", 3))


class TwoPerBatch(ToyTrial):
    """Takes two micro-batches for a batch, and with `unevenly` a third on even batches."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.disable_auto_grad_accumulation()

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        parts = zip(next(dataloader_iter), next(dataloader_iter), strict=True)
        inputs, index = (torch.cat(part) for part in parts)
        if self.hparams.get("unevenly") and batch_idx % 2 == 0:
            next(dataloader_iter)
        loss = self._loss(inputs, index)
        self.engine.backward(loss)
        self.engine.step()
        with self._file("samples").open("a") as file:
            file.write(json.dumps([batch_idx, *index.flatten().tolist()]) + "\n")
        return {"loss": loss}


class LargeSamples(ToyTrial):
    """Samples of 64 KiB, which a worker process brings in shared memory."""

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(Padded(samples(64)), batch_size=2, num_workers=1, prefetch_factor=1)

    def train_batch(
        self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int
    ) -> dict[str, torch.Tensor]:
        assert dataloader_iter is not None
        inputs, index = next(dataloader_iter)
        return super().train_batch(iter([(inputs[:, :2], index)]), epoch_idx, batch_idx)


class Padded(Noisy):
    """The samples of a dataset as they are, each of 64 KiB."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, label = self.dataset[index]
        return torch.cat([inputs, torch.zeros(2**14)]), label
