"""Sees whether a batch trains the weights that it is to train: for tests of a trial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trial_core.messages import WeightsSeen


class WeightWatch:
    """Sees, around a batch, which parameters of a rank's modules get a gradient, and whether any of
    them changes. Nothing is copied: a parameter is compared by two sums."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._parameters = {
            f"models[{i}].{name}" if len(modules) > 1 else name: parameter
            for i, module in enumerate(modules)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and not is_lazy(parameter)
        }
        # FSDP2 gives a sharded parameter its gradient without autograd, which tells of none.
        self._got = {name for name, each in self._parameters.items() if _is_sharded(each)}
        self._hooks: list[Any] = []
        self._before: list[torch.Tensor] = []

    def __enter__(self) -> WeightWatch:
        for name, parameter in self._parameters.items():
            if name not in self._got:
                hook = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, name=name: self._got.add(name)
                )
                self._hooks.append(hook)
        self._before = self._sums()
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def seen(self, may_change: bool) -> WeightsSeen:
        """What was seen, after the batch, which `may_change` weights unless nothing steps after it,
        or with a learning rate of 0."""
        pairs = zip(self._before, self._sums(), strict=True)
        return WeightsSeen(
            with_gradient=sorted(self._got),
            without_gradient=sorted(self._parameters.keys() - self._got),
            has_changed=not may_change or any(not torch.equal(*pair) for pair in pairs),
        )

    def _sums(self) -> list[torch.Tensor]:
        return [_sums(parameter) for parameter in self._parameters.values()]


def _is_sharded(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "to_local")


@torch.no_grad()
def _sums(parameter: Any) -> torch.Tensor:
    """Two sums over what this rank has of a parameter: ZeRO 3 and FSDP2 leave it a part."""
    values = getattr(parameter, "ds_tensor", parameter)
    values = values.to_local() if _is_sharded(values) else values
    values = torch.view_as_real(values) if values.is_complex() else values
    norm = torch.linalg.vector_norm(values, dtype=torch.float64)
    return torch.stack([values.sum(dtype=torch.float64), norm])
