"""The metrics of a script become plain data."""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from trial_core.errors import TrialError
from trial_core.rank.core_api.context import plain_metrics


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_("text"), "text"),
        (Level.HIGH, 3),
        (torch.tensor([[0.5]]), 0.5),
        (torch.tensor([1, 2]), [1, 2]),
        (np.array([np.float64(0.5), None], dtype=object), [0.5, None]),
        ({1: (np.float64(0.5),)}, {"1": [0.5]}),
        ([2**64 - 1, -(2**63)], [2**64 - 1, -(2**63)]),
        (torch.tensor(2**63 + 5, dtype=torch.uint64), 2**63 + 5),
    ],
)
def test_a_metric_can_be_sent_to_the_driver(value: Any, expected: Any) -> None:
    """Also a NumPy scalar that is a subclass of float or str."""
    plain = plain_metrics({"metric": value}, "report")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plain)) == {"metric": expected}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "object"),
        (torch.tensor(1j), "complex"),
        (np.longdouble(1), "longdouble"),
        (np.array([object()] * 2), "object"),
    ],
)
def test_what_no_driver_reads_is_refused(value: Any, kind: str) -> None:
    """The message has the name of the metric and the type."""
    with pytest.raises(TrialError, match=rf'report: metric "loss" is of type {kind}; a metric is'):
        plain_metrics({"loss": value}, "report")


@pytest.mark.parametrize(
    "value", [2**64, {"all": [-(2**63) - 1]}, 10**5000], ids=["positive", "negative", "huge"]
)
def test_an_integer_that_no_message_holds_is_refused(value: Any) -> None:
    """The message says how large it is, without its digits."""
    with pytest.raises(TrialError, match=r'report: metric "n" .* \d+ bits, .* as a float'):
        plain_metrics({"n": value}, "report")
