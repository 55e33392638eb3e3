"""Mixed precision on a single rank: steps within a batch, and scales of the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD

from trial_core.pytorch import PyTorchTrialContext
from trial_core.pytorch.mixed_precision import MixedPrecision, apex_scaler, share_overflow
from trial_core.pytorch.pytorch_state import load_state, state_of


def context_of_line() -> tuple[PyTorchTrialContext, Any, Any]:
    """A context with a model whose weight is 1, and its optimizer, which subtracts gradients."""
    context = PyTorchTrialContext.from_config({})
    model: Any = context.wrap_model(nn.Linear(1, 1, bias=False))
    nn.init.ones_(model.weight)
    return context, model, context.wrap_optimizer(SGD(model.parameters(), lr=1.0))


def test_a_forward_pass_after_a_step_uses_the_new_weights() -> None:
    """In the same batch, as when a discriminator steps before the generator."""
    context, model, optimizer = context_of_line()
    context.experimental.use_amp()
    with context.training_batch():
        context.backward(model(torch.full((1, 1), 3.0)).sum())
        context.step_optimizer(optimizer)
        assert model(torch.ones(1, 1)).item() == model.weight.item() == -2.0


def test_a_constant_loss_scale_stays_after_an_overflow() -> None:
    """The step is skipped."""
    context, model, optimizer = context_of_line()
    context.configure_apex_amp(model, optimizer, loss_scale=128.0)
    for factor in (float("inf"), 1.0):
        with context.training_batch():
            context.backward(model(torch.ones(1, 1)).sum() * factor)
            context.step_optimizer(optimizer)
        assert context.scaler.get_scale() == 128.0
    assert model.weight.item() == 0.0


def test_the_state_of_a_scaler_that_was_switched_off() -> None:
    """Torch switches a scaler for CUDA off on the CPU: a run on a GPU begins with its own scale."""
    saving, *_ = context_of_line()
    saving.wrap_scaler(GradScaler("cpu", enabled=False))
    resuming, *_ = context_of_line()
    resuming.wrap_scaler(GradScaler("cpu", init_scale=8.0))
    load_state(resuming, state_of(saving))
    assert resuming.scaler.get_scale() == 8.0


def test_a_scaler_that_is_switched_off_has_no_overflow_to_share() -> None:
    """On no rank: there is no collective, which would fail here."""
    _, _, optimizer = context_of_line()
    share_overflow(GradScaler("cpu", enabled=False), optimizer, torch.device("cpu"))


def test_skipped_steps_are_counted() -> None:
    """Also if the scale is constant, and tells nothing."""
    weight = nn.Parameter(torch.ones(1))
    optimizer, precision = SGD([weight], lr=0.1), MixedPrecision(torch.device("cpu"))
    _, scaler = apex_scaler(torch.device("cpu"), "O1", None, 8.0)
    assert scaler is not None
    for gradient in (1.0, float("inf"), float("nan"), 2.0):
        scaler.scale(weight.sum())
        weight.grad = torch.tensor([gradient])
        scaler.step(optimizer)
        precision.note_step(scaler, optimizer)
        scaler.update()
    assert (precision.steps, int(precision.skipped)) == (4, 2)
