"""The order that rank 0 of a script gives to its driver."""

from __future__ import annotations

from typing import Any

import msgspec

from trial_core.messages import FitBegun


class Order(msgspec.Struct, kw_only=True):
    """The run that rank 0 of a script has its driver drive.

    Attributes:
        new_trial: the trial's id, if the run begins a new one.
        fit: the arguments of `Trainer.fit`; None for a Core API script.
        latest_checkpoint: the checkpoint to resume from: its uuid or the beginning of it, a folder
            or URL, or ``latest``. None for a new trial.
        take_over: True to take the trial from another run that may be live.
        test_mode: True to train one batch, and keep nothing.
        has_metric: True if the script names a searcher metric.
        has_code: True if its folder holds code that checkpoints should name.
    """

    experiment: dict[str, Any]
    new_trial: str
    world_size: int
    has_other_machines: bool
    fit: FitBegun | None = None
    latest_checkpoint: str | None = None
    take_over: bool = False
    test_mode: bool = False
    has_metric: bool = True
    has_code: bool = True
