"""Training loops of other libraries, and a bare one, with the same model, data and optimizer.

Each follows its library's documentation. They share the process group of the rank.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.models import MODELS, Small, Tiny

LEARNING_RATE = 1e-3
DEVICE = get_accelerator().device_name()
"""The kind of the ranks' devices, in Lightning's words, too: ``cpu``, ``cuda``, …"""


class PeerLoop(Protocol):
    """A loop that trains more batches when asked."""

    def run(self, batches: int) -> float:
        """Train batches, and return the seconds. Collective: every rank calls this."""


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of all loops."""
    return torch.optim.Adam(parameters, lr=LEARNING_RATE)


def _loader(model: type[Tiny] | type[Small], sharded: bool) -> DataLoader[Any]:
    dataset = model.dataset()
    sampler: Any = DistributedSampler(dataset) if sharded else None
    return DataLoader(
        dataset, batch_size=model.micro_batch_size, sampler=sampler, shuffle=not sharded
    )


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


class _Stepwise:
    """A loop written by its user: `step` trains one batch."""

    def __init__(self) -> None:
        self._batches: Iterator[Any] = iter(())

    def step(self, batch: Tensor) -> None:
        raise NotImplementedError

    def run(self, batches: int) -> float:
        began = time.perf_counter()
        for _ in range(batches):
            (batch,) = next(self._batches)
            self.step(batch)
        get_accelerator().synchronize()
        return time.perf_counter() - began


class Bare(_Stepwise):
    """PyTorch alone, with the mean loss of a turn, as most hand-written loops report it.

    It trains the trial's model, since equal models differ in speed by their addresses.

    Args:
        replica: the model; DistributedDataParallel if there are several ranks.
    """

    def __init__(
        self,
        model: type[Tiny] | type[Small],
        replica: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        super().__init__()
        self._model, self._optimizer = replica, optimizer
        self._batches = _endless(_loader(model, sharded=True))
        self._losses: list[Tensor] = []

    def run(self, batches: int) -> float:
        self._model.train()  # the controller validates: else no gradients would be averaged
        began = time.perf_counter()
        super().run(batches)
        torch.stack(self._losses).mean().item()
        # Small tensors that stay slow the next turn, of any loop, by 1 to 2 %: big ones have other
        # addresses beside them.
        self._losses.clear()
        return time.perf_counter() - began

    def step(self, batch: Tensor) -> None:
        batch = batch.to(get_accelerator().current_device_name())
        if isinstance(self._model, DistributedDataParallel) and [*self._model.buffers()]:
            sync: Any = self._model._sync_buffers  # its default, which the trial has turned off
            sync()
        loss = self._model(batch)
        self._losses.append(loss.detach())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


class Fabric(_Stepwise):
    """Lightning Fabric."""

    def __init__(self, model: type[Tiny] | type[Small]) -> None:
        from lightning.fabric import Fabric as Library

        ranks = dist.get_world_size()
        self._fabric = Library(
            accelerator=DEVICE, devices=ranks, strategy="ddp" if ranks > 1 else "auto"
        )
        self._fabric.launch()
        module = model()
        self._model, self._optimizer = self._fabric.setup(module, adam(module.parameters()))
        self._batches = _endless(self._fabric.setup_dataloaders(_loader(model, sharded=False)))

    def step(self, batch: Tensor) -> None:
        loss = self._model(batch)
        self._fabric.backward(loss)
        self._optimizer.step()
        self._optimizer.zero_grad()


class Accelerate(_Stepwise):
    """Hugging Face Accelerate. It uses DistributedDataParallel with a single rank, too."""

    def __init__(self, model: type[Tiny] | type[Small]) -> None:
        from accelerate import Accelerator

        self._accelerator = Accelerator(cpu=DEVICE == "cpu")
        module = model()
        self._model, self._optimizer, loader = self._accelerator.prepare(
            module, adam(module.parameters()), _loader(model, sharded=False)
        )
        self._batches = _endless(loader)

    def step(self, batch: Tensor) -> None:
        loss = self._model(batch)
        self._accelerator.backward(loss)
        self._optimizer.step()
        self._optimizer.zero_grad()


class Lightning:
    """Lightning's Trainer, without logger, checkpoints and progress bar.

    Timed from the end of a first batch, so that its preparations do not count.
    """

    def __init__(self, model: type[Tiny] | type[Small]) -> None:
        import lightning

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

        class Module(lightning.LightningModule):  # type: ignore[misc]  # it ships no types here
            def __init__(self) -> None:
                super().__init__()
                self.model = model()

            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                loss: Tensor = self.model(batch[0])
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return adam(self.parameters())

        class Clock(lightning.Callback):  # type: ignore[misc]
            def __init__(self, batches: int) -> None:
                self.ends: list[float] = []
                self._compared = (0, batches)

            def on_train_batch_end(self, *_: Any) -> None:
                if len(self.ends) in self._compared:
                    get_accelerator().synchronize()
                self.ends.append(time.perf_counter())

        self._library, self._clock_class = lightning, Clock
        self._module, self._loader = Module(), _loader(model, sharded=False)

    def run(self, batches: int) -> float:
        ranks, clock = dist.get_world_size(), self._clock_class(batches)
        trainer = self._library.Trainer(
            accelerator=DEVICE, devices=ranks, strategy="ddp" if ranks > 1 else "auto",
            max_steps=batches + 1, max_epochs=-1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[clock],
        )  # fmt: skip
        trainer.fit(self._module, self._loader)
        return float(clock.ends[-1] - clock.ends[0])


PEERS: dict[str, Callable[[type[Tiny] | type[Small]], PeerLoop]] = {
    "fabric": Fabric,
    "lightning": Lightning,
    "accelerate": Accelerate,
}


def build_peers(model: str, names: Iterable[str]) -> dict[str, PeerLoop]:
    """Return the loops of these libraries. Each trains a separate model."""
    os.environ.setdefault("TORCHELASTIC_RUN_ID", "benchmark")  # so that Lightning sees the ranks
    warnings.filterwarnings("ignore", module="(lightning|accelerate).*")
    return {name: PEERS[name](MODELS[model]) for name in names}
