"""get_batch_length: the first dimension of the first tensor in a nested batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trial_core.errors import TrialError
from trial_core.rank.data.batch_length import data_length
from trial_core.rank.trial.trial_adapter import TrialAdapter

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
def test_the_first_tensor_gives_the_length(batch: Any) -> None:
    """Depth first; numbers, strings and scalar tensors are skipped."""
    assert data_length(batch) == 3


def test_an_empty_tensor_gives_length_0() -> None:
    """A tensor without rows is a batch without records."""
    assert data_length([torch.ones(0, 5), THREE]) == 0


@pytest.mark.parametrize("batch", [{}, [1, "two"], torch.tensor(2.0), object()])
def test_a_batch_without_a_tensor_is_refused(batch: Any) -> None:
    """The error names its type and what to do."""
    with pytest.raises(TrialError, match=f"{type(batch).__qualname__}.*override get_batch_length"):
        data_length(batch)


@pytest.mark.parametrize(("length", "samples"), [(lambda batch: np.int64(7), 7), (data_length, 0)])
def test_a_run_counts_by_it_unless_it_cannot(length: Any, samples: int) -> None:
    """A batch of strings counts as unknown."""
    assert TrialAdapter.samples_in(_trial_with(length), ["one", "two"]) == samples


def test_a_length_that_is_no_number_is_refused() -> None:
    """The error names the method and what it returned."""
    with pytest.raises(TrialError, match="get_batch_length returned None; return the number"):
        TrialAdapter.samples_in(_trial_with(lambda batch: None), [])


def _trial_with(length: Any) -> Any:
    return SimpleNamespace(_trial=SimpleNamespace(get_batch_length=length))
