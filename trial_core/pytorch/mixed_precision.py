"""Automatic mixed precision: torch's, also for Apex's settings."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from trial_core.errors import TrialError

GROWS_NEVER = 2**31 - 1
"""A growth interval longer than any training."""

SHRINKS_NEVER = math.nextafter(1.0, 0.0)
"""A backoff factor that changes no scale: torch wants less than 1, and scales are float32."""


class MixedPrecision:
    """The use of autocast in a trial's batches, and the scaler that follows from it.

    Attributes:
        scaler: scales losses by itself, in `backward` and `step_optimizer`; None for no scaling.
        has_stepped: True if a scaler has stepped an optimizer in this batch.
        steps, skipped: how often a scaler has stepped an optimizer, or skipped the step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_on = False
        self._type: torch.dtype | None = None
        self.scaler: GradScaler | None = None
        self.has_stepped = False
        self.steps = 0
        self.skipped: torch.Tensor | int = 0

    def note_step(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Count a step that `scaler` has made or skipped. Does not wait for the accelerator."""
        self.has_stepped = True
        if scaler.is_enabled():
            self.steps += 1
            found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            for on_device in list(found.values())[:1]:  # of all devices that a rank uses
                self.skipped = self.skipped + on_device.clamp(max=1)

    def switch_on(self, scaler: GradScaler | None, dtype: torch.dtype | None = None) -> None:
        """Use autocast from now on, with torch's default type if `dtype` is None."""
        self._is_on, self.scaler, self._type = True, scaler, dtype

    def autocast(self) -> AbstractContextManager[Any]:
        """Within the block, operations run in mixed precision, if it is switched on."""
        return torch.autocast(self._device.type, self._type) if self._is_on else nullcontext()

    def paused(self) -> AbstractContextManager[Any]:
        """Within the block, operations run in the precision of their tensors."""
        return torch.autocast(self._device.type, enabled=False) if self._is_on else nullcontext()


def apex_scaler(
    device: torch.device, opt_level: str, cast_model_type: torch.dtype | None, loss_scale: Any
) -> tuple[bool, GradScaler | None]:
    """Translate arguments of ``apex.amp.initialize``: autocast or not, and a scaler. Raises
    TrialError if Apex has no such level or loss scale."""
    if opt_level not in ("O0", "O1", "O2", "O3"):
        raise TrialError(f'configure_apex_amp: opt_level is "O0" to "O3", got {opt_level!r}')
    if opt_level == "O0":
        return False, None
    if cast_model_type is torch.bfloat16:
        return True, None
    if loss_scale in (None, "dynamic"):
        return True, GradScaler(device.type)
    try:
        scale = float(loss_scale)
    except (TypeError, ValueError):
        scale = 0.0
    if scale <= 0:
        raise TrialError(
            f'configure_apex_amp: loss_scale is a positive number or "dynamic", got {loss_scale!r}'
        )
    constant = GradScaler(
        device.type, init_scale=scale, growth_interval=GROWS_NEVER, backoff_factor=SHRINKS_NEVER
    )
    return True, constant


def share_overflow(
    scaler: GradScaler, optimizer: torch.optim.Optimizer, device: torch.device
) -> None:
    """Have all ranks skip a step if one has gradients that were not finite when it unscaled them,
    before they were averaged. Collective, also for a rank that had none to unscale."""
    if not scaler.is_enabled():
        return
    # GradScaler has no public access to the results of unscale_; FSDP's scaler does the same.
    found_on = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    overflow = torch.zeros((), device=device)
    for found in found_on.values():  # empty without a gradient
        overflow = torch.maximum(overflow, found.to(device))
    dist.all_reduce(overflow, dist.ReduceOp.MAX)
    found_on[device] = overflow
