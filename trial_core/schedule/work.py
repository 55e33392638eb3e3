"""`Work`: what a batch, a sample or a step of training holds, from which a run's speed follows."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Literal, get_args

import msgspec

from trial_core.errors import TrialTypeError, TrialValueError

NumberType = Literal["bf16", "fp16", "tf32", "fp32"]
"""What a model multiplies its matrices in."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What so many samples hold, over all ranks. 0: unknown.

    Attributes:
        tokens: of the samples.
        flops: floating-point operations of the model's forward and backward passes on them.
        number_type: what the model multiplies in, which decides the peak of a device.
    """

    samples: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0
    number_type: NumberType = "bf16"

    def times(self, count: float) -> Work:
        """That of `count` such batches, samples or steps."""
        return msgspec.structs.replace(
            self,
            samples=count * self.samples,
            tokens=count * self.tokens,
            flops=count * self.flops,
        )


def said_work(source: str, number_type: Any, **numbers: Any) -> Work:
    """What a trial or script says. None: it does not say that number.

    Args:
        source: the method that it has called, for errors.

    Raises:
        TrialTypeError: a number is none.
        TrialValueError: it is not positive and finite, or there is no such number type.
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
