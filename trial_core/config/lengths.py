"""Lengths and periods in the experiment file: ``{batches: n}`` or ``{epochs: n}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, PlainValidator, WithJsonSchema

from trial_core.config.error_text import did_you_mean, format_value, validation_error
from trial_core.config.values import MAX_COUNT
from trial_core.schedule.sequencer import Continuous
from trial_core.schedule.units import Batch, Epoch, TrainUnit

_UNITS: dict[str, type[Batch] | type[Epoch]] = {"batches": Batch, "epochs": Epoch}

OPEN_END = Batch(MAX_COUNT)
"""The maximum length of a Core API script whose experiment names none: the script ends itself."""


def named_length(experiment: Mapping[str, Any]) -> TrainUnit | None:
    """The length of training in a checked experiment, as plain data; None if it names none."""
    value = (experiment.get("searcher") or {}).get("max_length")
    length = None if value is None else _length(value)
    return None if length == OPEN_END else length


def _length(value: Any) -> TrainUnit:
    if isinstance(value, (Batch, Epoch)):
        value = {value.unit: value.value}
    if isinstance(value, int):
        value = {"batches": value}
    if not isinstance(value, Mapping):
        raise validation_error(
            f"expected {{batches: n}} or {{epochs: n}}, got {format_value(value)}"
        )
    value = {unit: number for unit, number in value.items() if number is not None}
    for unit in value:
        if unit == "records":
            raise validation_error(
                "lengths are not counted in records; give batches or epochs", unit
            )
        if unit not in _UNITS:
            raise validation_error(
                f"unknown field{did_you_mean(str(unit), list(_UNITS))}", str(unit)
            )
    if len(value) != 1:
        given = " and ".join(value) or "neither"
        raise validation_error(f"expected either batches or epochs, got {given}")
    ((unit, number),) = value.items()
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise validation_error(f"expected a positive integer, got {format_value(number)}", unit)
    if number > MAX_COUNT:
        raise validation_error(f"expected at most {MAX_COUNT}, got {format_value(number)}", unit)
    return _UNITS[unit](number)


def _none_for_zero(value: Any) -> Any:
    # Determined's default for a period, {batches: 0}, means no period.
    numbers = list(value.values()) if isinstance(value, Mapping) else [value]
    return None if len(numbers) == 1 and type(numbers[0]) is int and numbers[0] == 0 else value


_UNIT_SCHEMA = {"type": "integer", "minimum": 1, "maximum": MAX_COUNT}
_LENGTH_SCHEMA: dict[str, Any] = {
    "type": "object",
    "title": "Length",
    "description": "A number of batches or of epochs.",
    "properties": {
        "batches": {**_UNIT_SCHEMA, "title": "Batches"},
        "epochs": {**_UNIT_SCHEMA, "title": "Epochs"},
    },
    "minProperties": 1,
    "maxProperties": 1,
    "additionalProperties": False,
}

LengthField = Annotated[
    TrainUnit,
    PlainValidator(_length),
    PlainSerializer(lambda length: {length.unit: length.value}, return_type=dict[str, int]),
    WithJsonSchema(_LENGTH_SCHEMA),
]
Period = Annotated[LengthField | None, BeforeValidator(_none_for_zero)]


def _length_or_continuous(value: Any) -> TrainUnit | Continuous:
    if value == "continuous":
        return "continuous"
    if isinstance(value, str):
        raise validation_error(
            f'expected {{batches: n}}, {{epochs: n}} or "continuous", got {format_value(value)}'
        )
    return _length(value)


def _plain(length: TrainUnit | Continuous) -> dict[str, Any] | str:
    return length if isinstance(length, str) else {length.unit: length.value}


CheckpointPeriod = Annotated[
    Annotated[
        TrainUnit | Continuous,
        PlainValidator(_length_or_continuous),
        PlainSerializer(_plain),
        WithJsonSchema(
            {
                "anyOf": [
                    _LENGTH_SCHEMA,
                    {"type": "string", "title": "continuous", "const": "continuous"},
                ]
            }
        ),
    ]
    | None,
    BeforeValidator(_none_for_zero),
]
