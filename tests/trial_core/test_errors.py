"""The errors of trialflow."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import trial_core.errors
from trial_core.errors import RankFailed, TrialflowError

CLASSES = [
    found
    for found in vars(trial_core.errors).values()
    if isinstance(found, type) and issubclass(found, TrialflowError)
]

FIELDS: dict[str, Any] = {
    "rank": 3,
    "host": "node-1",
    "during": "train-workload",
    "exit_code": 7,
    "signal_name": "SIGKILL",
    "error_type": "TrialError",
    "is_ours": True,
    "error_message": "no engine",
    "rank_traceback": "Traceback …",
    "log_tail": "last words",
    "log_path": "/logs/rank-3.log",
}


@pytest.mark.parametrize("error_class", CLASSES)
def test_errors_survive_a_pickle(error_class: type[TrialflowError]) -> None:
    """Prefect stores a task's error; after loading, message and attributes are the same."""
    error = RankFailed(**FIELDS) if error_class is RankFailed else error_class("what was seen")
    error.__notes__ = ["a note"]
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is error_class
    assert (str(copy), copy.args, vars(copy)) == (str(error), error.args, vars(error))


def test_rank_failed_keeps_all_its_arguments() -> None:
    """Every argument is an attribute."""
    assert {name: vars(RankFailed(**FIELDS))[name] for name in FIELDS} == FIELDS


@pytest.mark.parametrize(
    ("error_type", "is_ours", "is_trial_mistake"),
    [
        ("TrialError", True, True),
        ("CheckpointUnrestorable", True, True),
        ("CheckpointRefused", True, True),
        ("TrialTypeError", True, True),
        ("TrialValueError", True, True),
        ("InvalidHP", True, True),
        ("TrialError", False, False),
        ("ConfigError", True, False),
    ],
)
def test_only_our_own_trial_error_is_a_trial_mistake(
    error_type: str, is_ours: bool, is_trial_mistake: bool
) -> None:
    """A user's class named TrialError is an ordinary exception."""
    failure = RankFailed(
        rank=0, host="h", during="build-trial", error_type=error_type, is_ours=is_ours
    )
    assert failure.is_trial_mistake is is_trial_mistake
