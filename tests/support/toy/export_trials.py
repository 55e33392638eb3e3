"""A toy whose weights are hard to export: tied, frozen, of odd sizes, and with buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from parallel_trials import ds_config
from toy_trial import ToyTrial

from trial_core.deepspeed import DeepSpeedTrialContext


class Tied(torch.nn.Module):
    """A shared parameter, a frozen layer, and (`twice`) a module that has two names."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.inputs = torch.nn.Linear(2, 5)
        self.frozen = torch.nn.Linear(5, 3).requires_grad_(False)
        self.back = torch.nn.Linear(3, 5)
        self.outputs = torch.nn.Linear(5, 3)
        self.outputs.weight = torch.nn.Parameter(torch.randn(3, 5))
        self.decoder = torch.nn.ModuleDict({"head": torch.nn.Linear(5, 3, bias=False)})
        self.decoder["head"].weight = self.outputs.weight
        if twice:
            self.again = self.back
        self.register_buffer("calls", torch.tensor(7))
        self.register_buffer("scale", torch.tensor([0.5, 0.25, 1 / 3]))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.back(torch.tanh(self.frozen(self.inputs(inputs))))
        mixed = self.back(self.outputs(torch.tanh(hidden)))
        result: torch.Tensor = self.decoder["head"](mixed) * self.scale
        return result


def live_weights(engine: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The module's weights and buffers; and the same as the optimizer steps on them.

    Collective: every rank calls this.
    """
    masters = {id(each): safe_get_full_fp32_param(each) for each in engine.module.parameters()}
    live: dict[str, Any] = {}
    exact: dict[str, Any] = {}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for name, tensor in engine.module.state_dict(keep_vars=True).items():
            master = masters.get(id(tensor))
            live[name] = tensor.detach().clone()
            is_half = tensor.dtype in (torch.bfloat16, torch.float16)
            exact[name] = live[name].float() if is_half else live[name]
            # In fp32 the module's are those: DeepSpeed gives others with round_robin_gradients.
            if master is not None and is_half:
                exact[name] = master.detach().clone()
    return live, exact


class ExportTrial(ToyTrial):
    """Beside each checkpoint, in the folder `record`, keeps the weights as the engine has them, and
    the file that DeepSpeed's save_16bit_model makes of them."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.models.clear()
        model = Tied(self.hparams.get("twice", False))
        zero = {
            "stage": self.hparams["zero_stage"],
            "stage3_gather_16bit_weights_on_model_save": True,
        }
        own = {
            "bf16": {"enabled": self.hparams.get("bf16", False)},
            "zero_optimization": zero,
        }
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=[each for each in model.parameters() if each.requires_grad],
            config={**ds_config(self.hparams), **own},
        )
        self.engine = context.wrap_model_engine(engine)

    def _loss(self, inputs: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        dtype = next(self.engine.module.parameters()).dtype
        outputs = self.engine(inputs.to(dtype)).float()
        return torch.nn.functional.mse_loss(outputs.sum(1, keepdim=True), index / 64)

    def save(self, context: DeepSpeedTrialContext, path: Path) -> None:
        super().save(context, path)
        self.engine.save_16bit_model(self.hparams["record"], "deepspeed.bin")
        live, exact = live_weights(self.engine)
        if context.distributed.get_rank() == 0:
            torch.save({"16bit": live, "fp32": exact}, Path(self.hparams["record"]) / "truth.pt")
