"""PyTorchTrials that cannot be sharded, or that shard in a way that is refused."""

from __future__ import annotations

from typing import Any

import torch
from sharded_trials import Net, Sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trial_core.pytorch import PyTorchTrial


class OneOfTwo(Sharded):
    """Shards one model, and another not."""

    def wrap(self) -> None:
        self.context.wrap_model(Net(0.0), sharding="fsdp2")
        self.context.wrap_model(nn.Linear(2, 1), sharding="none")


class EarlyOptimizer(Sharded):
    """Constructs the optimizer before the model is sharded."""

    def wrap(self) -> None:
        model = Net(0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.context.wrap_model(model, sharding="fsdp2")
        self.context.wrap_optimizer(optimizer)


class Misspelt(Sharded):
    """Asks for a sharding that does not exist."""

    def wrap(self) -> None:
        self.context.wrap_model(Net(0.0), sharding="fsdp")  # type: ignore[arg-type]


class NoForward(Sharded):
    """Wraps a list of modules."""

    def wrap(self) -> None:
        self.context.wrap_model(nn.ModuleList([nn.Linear(2, 2)]), sharding="fsdp2")


class LateCompression(Sharded):
    """Asks for compressed gradients when the model is sharded already."""

    def wrap(self) -> None:
        model = self.context.wrap_model(Net(0.0), sharding="fsdp2")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.context.wrap_optimizer(optimizer, fp16_compression=True)


class WholeSet(Sharded):
    """Validates on rank 0 alone."""

    evaluate_batch = PyTorchTrial.evaluate_batch

    def wrap(self) -> None:
        self.model = self.context.wrap_model(Net(0.0), sharding="fsdp2")
        self.context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        return {"loss": sum(self._loss(batch) for batch in data_loader)}


class OnHalfTheRanks(Sharded):
    """Shards over a mesh that has one rank only."""

    def wrap(self) -> None:
        size = self.context.distributed.get_size()
        mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("copies", "parts"))["parts"]
        self.context.wrap_model(fully_shard(nn.Linear(2, 1), mesh=mesh))


class OwnMoments(torch.optim.SGD):
    """Keeps a plain tensor of this rank's part as its state."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["own"] = parameter.grad.to_local().clone()
        return super().step(closure)


class OddOptimizer(Sharded):
    """Trains with `OwnMoments`."""

    def wrap(self) -> None:
        self.model = self.context.wrap_model(Net(0.0), sharding="fsdp2")
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = self.context.wrap_optimizer(OwnMoments(trained, lr=0.1))
