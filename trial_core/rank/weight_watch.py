"""Looks whether a batch trains the weights that it is to train: for tests of a trial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trial_core.common.text_format import first_few, plural


class WeightWatch:
    """Sees which parameters of a rank's modules get a gradient, and whether any of them changes.

    A context manager around a batch. Nothing is copied: a parameter is compared by two sums.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._parameters = {
            f"models[{i}].{name}" if len(modules) > 1 else name: parameter
            for i, module in enumerate(modules)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self._without = set(self._parameters)
        self._hooks: list[Any] = []
        self._before: list[torch.Tensor] = []

    def __enter__(self) -> WeightWatch:
        for name, parameter in self._parameters.items():
            if _is_sharded(parameter):  # FSDP2 gives it its gradient without autograd
                self._without.discard(name)
                continue
            hook = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, name=name: self._without.discard(name)
            )
            self._hooks.append(hook)
        self._before = self._sums()
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def warnings(self, may_change: bool) -> list[str]:
        """What is wrong, after the batch.

        Args:
            may_change: False if nothing steps after this batch, or with a learning rate of 0.
        """
        if not self._parameters:
            return ["the test has trained nothing: no parameter of the models has requires_grad"]
        found = []
        pairs = zip(self._before, self._sums(), strict=True)
        if may_change and all(torch.equal(before, after) for before, after in pairs):
            found.append(
                "no weight has changed in the test's batch: the trial's train_batch has to step "
                "the optimizer, as with context.step_optimizer or engine.step"
            )
        if self._without:
            names = first_few(sorted(self._without))
            found.append(
                f"{plural(len(self._without), 'parameter')} got no gradient in the test's batch: "
                f"{names}; what gets none is not trained. If that is meant, set requires_grad to "
                "False"
            )
        return found

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
