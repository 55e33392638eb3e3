"""Which of several ranks' failures is reported as the cause."""

from __future__ import annotations

import itertools

import pytest

from trial_core.errors import RankFailed
from trial_core.processes.slots.first_cause import first_cause


def failed(rank: int, error_type: str | None) -> RankFailed:
    signal_name = None if error_type else "SIGABRT"
    return RankFailed(
        rank=rank, host="here", during="training", error_type=error_type, signal_name=signal_name
    )


@pytest.mark.parametrize(
    ("noted", "cause"),
    [
        ([(0, "KeyError"), (1, "NetworkError")], (0, "KeyError")),
        ([(0, "NetworkError"), (1, None)], (1, None)),
        # A device-side assertion: the exception, then NCCL's watchdog ends the process.
        ([(1, "AcceleratorError"), (1, None)], (1, "AcceleratorError")),
        ([(0, "NetworkError"), (1, "AcceleratorError"), (1, None)], (1, "AcceleratorError")),
        # Rank 1 is killed. Rank 0 raises, since its peer is gone, and is ended by NCCL's watchdog.
        ([(0, "NetworkError"), (0, None), (1, None)], (1, None)),
    ],
)
def test_the_first_cause(
    noted: list[tuple[int, str | None]], cause: tuple[int, str | None]
) -> None:
    """In any order of arrival; of two equal ones the first."""
    for order in itertools.permutations(noted) if any(not error for _, error in noted) else [noted]:
        found = first_cause([failed(*each) for each in order])
        assert (found.rank, found.error_type) == cause
