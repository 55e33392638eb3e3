"""get_batch_length: records are counted by the first tensor, wherever it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trial_core.errors import TrialError
from trial_core.pytorch.batch_length import batch_length

THREE = torch.ones(3, 5)


@pytest.mark.parametrize(
    "batch",
    [
        THREE,
        np.ones((3, 5)),
        [THREE, torch.ones(4)],
        {"ids": {"tokens": THREE}, "labels": torch.ones(4)},
        ("a name", 7, None, ({"scale": torch.tensor(2.0)}, [THREE])),
    ],
)
def test_the_first_tensor_counts(batch: Any) -> None:
    """Depth first; numbers, words and tensors of no dimension are passed over."""
    assert batch_length(batch) == 3


def test_no_records_are_none() -> None:
    """A tensor of no rows is a batch without records, not a batch without tensors."""
    assert batch_length([torch.ones(0, 5), THREE]) == 0


@pytest.mark.parametrize("batch", [{}, [1, "two"], torch.tensor(2.0), object()])
def test_a_batch_without_any_is_refused(batch: Any) -> None:
    """With its type, and what to do."""
    with pytest.raises(TrialError, match=f"{type(batch).__qualname__}.*override get_batch_length"):
        batch_length(batch)
