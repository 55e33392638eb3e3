"""When the ranks' gradients are averaged.

A trial with one model and one optimizer averages them in its backward pass: torch's
DistributedDataParallel sends some gradients while it still computes others. That is right only if
each forward pass is followed by one backward pass. A trial with several models or optimizers may
run forward and backward passes in any order, so its gradients are averaged in `step_optimizer`.
FSDP2 averages the gradients of sharded parameters in every backward pass.

Averaging twice is harmless: the mean of equal gradients is the same.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.tensor import DTensor

from trial_core.errors import TrialError
from trial_core.pytorch.distributed_model import DistributedModel, average, pass_error


class GradientAveraging:
    """Averages the gradients of a trial's models over its ranks.

    Attributes:
        overlaps: True if the backward pass averages; if not, `before_step` does.
        compresses: True if gradients are sent as float16.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._models: list[DistributedModel] = []
        self._averaged_by_models: set[int] = set()
        self.overlaps = True
        self.compresses = False
        self._forwards = 0
        self._has_begun = False
        self._is_incomplete = True

    def add_model(self, model: DistributedModel, in_backward: bool) -> None:
        """Average this model's gradients, too: not `in_backward` if a batch may leave out some, but
        in `step_optimizer`."""
        self._models.append(model)
        self._averaged_by_models |= {id(each) for each in model.parameters() if each.requires_grad}
        self.overlaps &= in_backward and len(self._models) == 1

    def batch(self, steps: bool) -> AbstractContextManager[Any]:
        """A batch, in which optimizers step or only collect gradients."""
        if not self._has_begun and self.overlaps and self.compresses:
            for model in self._models:
                model.register_comm_hook(None, fp16_compress_hook)
        self._has_begun = True
        self._is_incomplete = True
        self._forwards = self._forward_count()
        if steps and self.overlaps:
            return nullcontext()
        stack = ExitStack()
        for model in self._models:
            stack.enter_context(model.no_sync())
        return stack

    def explain(self, error: RuntimeError) -> None:
        """Raise TrialError if a backward pass failed as it gave a parameter several gradients."""
        if "mark a variable ready only once" in str(error):
            name = type(self._models[0].module).__name__
            raise pass_error(name, "reached some parameters twice") from error

    def backward_ended(self) -> None:
        """Note a backward pass. Without a forward pass before it, it averages nothing.

        That is so for a second backward pass through the same graph, and for a model whose other
        methods the trial calls instead of the model itself.
        """
        forwards = self._forward_count()
        self._is_incomplete = not self.overlaps or forwards == self._forwards
        self._forwards = forwards

    def before_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Average the gradients of `optimizer` that the backward pass has not. Collective.

        Returns True if there were any: the trial has seen this rank's own gradients until now.
        Raises TrialError if the backward pass left out some parameters, or a gradient is sparse.
        """
        if self._ranks == 1:
            return False
        parameters = [e for e in trained_parameters(optimizer) if not isinstance(e, DTensor)]
        if not self._is_incomplete:
            for model in self._models:
                model.check_all_averaged()
            parameters = [each for each in parameters if id(each) not in self._averaged_by_models]
        if not parameters:
            return False
        with_gradient = torch.tensor([each.grad is not None for each in parameters])
        used = with_gradient.to(parameters[0].device, torch.int32)
        dist.all_reduce(used, dist.ReduceOp.MAX)
        gradients = []
        for parameter, is_used in zip(parameters, used.tolist(), strict=True):
            if is_used:  # on some rank
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if parameter.grad.is_sparse:
                    raise _sparse_error(parameter)
                gradients.append(parameter.grad)
        average(gradients, self._ranks, self.compresses)
        return True

    def _forward_count(self) -> int:
        return sum(model.forwards for model in self._models)


def _sparse_error(parameter: nn.Parameter) -> TrialError:
    return TrialError(
        f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, and ranks cannot "
        "average it in step_optimizer; build its layer with sparse=False, or train it in a trial "
        "with a single model and optimizer, wrapped without find_unused_parameters"
    )


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [each for each in parameters_of(optimizer) if each.requires_grad]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [each for group in optimizer.param_groups for each in group["params"]]
