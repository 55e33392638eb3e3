"""Toys whose ranks share samples without `set_mpu`: AutoTP, and Ulysses sequence parallelism."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from parallel_trials import _SplitTrial, ds_config

from trial_core.deepspeed import DeepSpeedTrialContext


class _MeshTrial(_SplitTrial):
    """Trains the engine of `_engine`. Hyperparameters: tp, sp, optimizer, zero."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self._prepare(context)
        torch.manual_seed(self.hparams.get("seed", 1))
        self.engine = context.wrap_model_engine(self._engine())
        self.seen_indices = context.wrap_reducer(sorted, name="indices", for_training=False)

    def _engine(self) -> Any:
        raise NotImplementedError

    def _config(self) -> dict[str, Any]:
        config = ds_config(self.hparams)
        if self.hparams.get("optimizer"):
            config["optimizer"] = self.hparams["optimizer"]
        config["zero_optimization"].update(self.hparams.get("zero", {}))
        return config

    def _loss(self, batch: Any) -> torch.Tensor:
        inputs, index = batch
        self.drawn = [index.flatten().tolist()]
        return torch.nn.functional.mse_loss(self.engine(inputs).sum(1, keepdim=True), index / 64)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self._loss(next(dataloader_iter))
        self.engine.backward(loss)
        self.engine.step()
        self._write(batch_idx, torch.rand(1).item())
        return {"loss": loss, "rank": float(self.context.distributed.get_rank())}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        loss = self._loss(next(dataloader_iter))
        for one in self.drawn[0]:
            self.seen_indices.update(one)
        return {"loss": loss, "rank": float(self.context.distributed.get_rank())}


class _Block(torch.nn.Module):
    """A perceptron with the names of a transformer's, which AutoTP divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = torch.nn.Linear(2, 8)
        self.down_proj = torch.nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.down_proj(torch.tanh(self.up_proj(inputs)))
        return outputs


class _Blocks(torch.nn.Module):
    """Two blocks, and a layer that is not divided."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([_Block(), _Block()])
        self.norm = torch.nn.LayerNorm(2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = inputs + layer(inputs)
        outputs: torch.Tensor = self.norm(inputs)
        return outputs


class AutoTP(_MeshTrial):
    """Each model spans `tp` ranks."""

    def _engine(self) -> Any:
        config = self._config()
        model = _Blocks()
        if self.hparams.get("model_init"):
            model = deepspeed.tp_model_init(model, self.hparams["tp"], torch.float32)
        if self.hparams["tp"] > 1:
            specs = [
                {"patterns": [r".*\.up_proj\.weight$"], "partition_type": "column"},
                {"patterns": [r".*\.down_proj\.weight$"], "partition_type": "row"},
            ]
            config["tensor_parallel"] = {
                "autotp_size": self.hparams["tp"],
                "partition_config": {"use_default_specs": False, "layer_specs": specs},
            }
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        return engine


class _Attention(torch.nn.Module):
    """Attention over a sequence that `sp` ranks divide; a token for each of 4 features."""

    def __init__(self, divided: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(2, 8)
        self.qkv = torch.nn.Linear(8, 24)
        self.out = torch.nn.Linear(8, 2)
        self.divided = divided
        self.attend = (
            DistributedAttention(_attention, parallel_state_sp.get_sequence_parallel_group(), 2, 1)
            if divided else _attention
        )  # fmt: skip

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = torch.stack([inputs * scale for scale in (1.0, 2.0, 3.0, 4.0)], dim=1)
        if self.divided:
            part = parallel_state_sp.get_sequence_parallel_rank()
            size = parallel_state_sp.get_sequence_parallel_world_size()
            tokens = tokens.chunk(size, dim=1)[part]
        heads = self.qkv(self.embed(tokens)).unflatten(2, (3, 4, 2)).unbind(2)
        mixed = self.attend(*heads) if not self.divided else self.attend(*heads, 0)
        outputs: torch.Tensor = self.out(mixed.flatten(2)).mean(dim=1)
        return outputs


def _attention(query: Any, key: Any, value: Any) -> torch.Tensor:
    """Attention of (batch, sequence, heads, size)."""
    parts = [each.transpose(1, 2) for each in (query, key, value)]
    return torch.nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2)


class Ulysses(_MeshTrial):
    """Each sequence spans `sp` ranks."""

    def _engine(self) -> Any:
        sp = self.hparams["sp"]
        if sp > 1:
            parallel_state_sp.initialize_sequence_parallel(sp)
        model = _Attention(sp > 1)
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=self._config(),
            mpu=parallel_state_sp if sp > 1 else None,
        )
        return engine
