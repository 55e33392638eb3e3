"""`Work`: the tokens and operations in a batch, a sample or a step; speeds follow from it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, Literal, get_args

import msgspec

from trial_core.errors import TrialTypeError, TrialValueError

NumberType = Literal["bf16", "fp16", "tf32", "fp32"]
"""The number type of matrix multiplications."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The work in some samples, over all ranks; 0 if unknown.

    Attributes:
        flops: floating-point operations of the model's forward and backward passes on them.
        number_type: the type of the multiplied numbers, which decides a device's peak.
    """

    samples: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0
    number_type: NumberType = "bf16"

    def times(self, count: float) -> Work:
        """The work in `count` such batches, samples or steps."""
        return msgspec.structs.replace(
            self,
            samples=count * self.samples,
            tokens=count * self.tokens,
            flops=count * self.flops,
        )


def samples_of(ranks: Iterable[int]) -> int:
    """The samples that all ranks have trained on, each counted once; 0 if unknown.

    `ranks` has, of each, the samples of its micro-batches times the data-parallel ranks; 0 of a
    rank that takes none, as within a pipeline. Equally many ranks may have the samples of each
    shard, as those of a tensor-parallel group.
    """
    known = [each for each in ranks if each]
    return sum(known) // len(known) if known else 0


def said_work(source: str, number_type: Any, **numbers: Any) -> Work:
    """The work that a trial or script states to the method `source`; None for a number left out.

    Raises TrialTypeError or TrialValueError for a value that is not a positive, finite number, or
    an unknown number type.
    """
    if number_type not in get_args(NumberType):
        raise TrialValueError(
            f"{source}: number_type is one of {', '.join(get_args(NumberType))}, got "
            f"{number_type!r}"
        )
    given = {name: value for name, value in numbers.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TrialTypeError(f"{source}: {name} is a number, got {value!r}")
        if not (math.isfinite(value) and float(value) > 0):
            raise TrialValueError(f"{source}: {name} is a positive, finite number, got {value!r}")
    return Work(number_type=number_type, **{name: float(value) for name, value in given.items()})
