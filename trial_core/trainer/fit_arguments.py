"""The arguments of `Trainer.fit`, checked and as plain data."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, get_args

from trial_core.errors import ConfigError
from trial_core.messages import FitBegun, Length
from trial_core.schedule.sequencer import CheckpointPolicy
from trial_core.schedule.units import Batch, Epoch, TrainUnit


def fit_begun(
    checkpoint_period: TrainUnit | None,
    validation_period: TrainUnit | None,
    max_length: TrainUnit | None,
    reporting_period: TrainUnit,
    checkpoint_policy: CheckpointPolicy | None,
    step_zero_validation: bool,
) -> FitBegun:
    """`fit`'s arguments, for its driver. Raises ConfigError if an argument is invalid."""
    length = _optional("max_length", max_length, None)
    if length is not None and not isinstance(length.value, int):
        raise ConfigError(f"fit: max_length is one number of batches or epochs, got {max_length!r}")
    if checkpoint_policy is not None and checkpoint_policy not in get_args(CheckpointPolicy):
        raise ConfigError(
            f'fit: checkpoint_policy is "best", "all" or "none", got {checkpoint_policy!r}'
        )
    return FitBegun(
        max_length=length,
        reporting_period=_plain("reporting_period", reporting_period, max_length),
        validation_period=_optional("validation_period", validation_period, max_length),
        checkpoint_period=_optional("checkpoint_period", checkpoint_period, max_length),
        checkpoint_policy=checkpoint_policy,
        step_zero_validation=step_zero_validation,
    )


def _optional(name: str, unit: TrainUnit | None, max_length: TrainUnit | None) -> Length | None:
    return None if unit is None else _plain(name, unit, max_length)


def _plain(name: str, unit: TrainUnit, max_length: TrainUnit | None) -> Length:
    _check_unit(name, unit)
    value = unit.value
    if not isinstance(value, int):
        if isinstance(value, Iterable):
            value = _numbers(name, value)
        elif type(max_length) is type(unit) and isinstance(max_length.value, int):
            value = [number for number in range(1, max_length.value + 1) if number in value]
        else:
            raise ConfigError(
                f"fit: {name} is a container that cannot be listed, {value!r}: give a list or a "
                "range of numbers"
            )
    return Length(unit="batches" if isinstance(unit, Batch) else "epochs", value=value)


def _numbers(name: str, values: Iterable[Any]) -> list[int]:
    try:
        return sorted(map(operator.index, values))
    except TypeError:
        raise ConfigError(
            f"fit: {name} is a number of batches or epochs, or a container of such numbers, got "
            f"{values!r}"
        ) from None


def _check_unit(name: str, value: object) -> None:
    if not isinstance(value, (Batch, Epoch)):
        hint = f"; did you mean Batch({value})?" if isinstance(value, int) else ""
        raise ConfigError(f"fit: {name} is a Batch or an Epoch, got {value!r}{hint}")
