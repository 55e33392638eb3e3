"""How a rank tells the driver of an exception."""

from __future__ import annotations

import pytest

from trial_core.errors import ConfigError, TrialError
from trial_core.slots.worker import describe


class TrialErrorOfTheUser(Exception):
    """A class of the user's that bears the name of one of ours."""


TrialErrorOfTheUser.__name__ = "TrialError"


@pytest.mark.parametrize(
    ("error", "error_type", "is_ours"),
    [
        (TrialError("x"), "TrialError", True),
        (ConfigError("x"), "ConfigError", True),
        (TrialErrorOfTheUser("x"), "TrialError", False),
        (KeyError("x"), "KeyError", False),
    ],
)
def test_whose_error_it_is(error: Exception, error_type: str, is_ours: bool) -> None:
    """Told by its class, not by its name, which anyone may give."""
    described = describe(error)
    assert (described.error_type, described.is_ours) == (error_type, is_ours)
