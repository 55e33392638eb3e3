"""An optimizer whose states are of all kinds. torch casts or spoils many of them in a load."""

from __future__ import annotations

from typing import Any

import torch


class OddOptimizer(torch.optim.Optimizer):
    """A momentum in 16 bits; all other entries count and remember steps."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "note": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group["lr"])

    def _step(self, parameter: torch.Tensor, lr: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["blocks"] = torch.zeros(parameter.numel() // 2 + 1, dtype=torch.uint8)
            state["scale"] = torch.ones((), dtype=torch.float64)
            state["count"], state["rate"], state["none"], state["text"] = 0, 0.5, None, "a text"
            state["nested"] = {
                "half": torch.zeros(3, dtype=torch.float16),
                "parts": [torch.zeros(2, dtype=torch.int64), (torch.zeros(1), 0)],
            }
            state["step"] = torch.zeros((), dtype=torch.float32)
        momentum, nested = state["momentum"], state["nested"]
        momentum.mul_(0.9).add_(parameter.grad.to(momentum.dtype))
        state["blocks"] += 7
        state["scale"] *= 1.1
        state["step"] += 1
        state["count"] += 1
        state["rate"] /= 3
        nested["half"] += state["rate"]
        nested["parts"][0] += 1
        nested["parts"][1][0].add_(0.1)
        noise = state["scale"].item() + float(nested["half"].sum()) + float(state["blocks"][0])
        parameter.sub_(lr * momentum.to(parameter.dtype) * (1 + noise / 1000))
