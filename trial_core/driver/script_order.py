"""What rank 0 of a script orders from the driver that its ranks join."""

from __future__ import annotations

from typing import Any

import msgspec

from trial_core.messages import FitBegun


class Order(msgspec.Struct, kw_only=True):
    """What rank 0 of a script has driven.

    Attributes:
        experiment: the script's, as plain data.
        new_trial: the trial's id, if the run begins a new one.
        world_size: how many ranks join.
        has_other_machines: whether ranks of other machines join.
        fit: the arguments of `Trainer.fit`; None: a Core API script.
        latest_checkpoint: what to resume from: a checkpoint's uuid or the beginning of it, a folder
            or URL, or ``latest``. None: a new trial.
        take_over: whether to take the trial from another run that may be live.
        test_mode: whether to train one batch, and keep nothing.
        has_metric: whether the script names a searcher metric.
        has_code: whether its folder holds code that checkpoints should name.
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
