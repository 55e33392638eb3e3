"""How a rank reports an exception to the driver."""

from __future__ import annotations

import pytest

from trial_core.errors import ConfigError, TrialError
from trial_core.messages import Answer, encode
from trial_core.slots.rank_main import to_rank_error


class TrialErrorOfTheUser(Exception):
    """A user's class with the name of one of ours."""


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
def test_is_ours_depends_on_the_class(error: Exception, error_type: str, is_ours: bool) -> None:
    """Not on the class's name, which a user may reuse."""
    rank_error = to_rank_error(error)
    assert (rank_error.error_type, rank_error.is_ours) == (error_type, is_ours)


def test_an_error_message_with_invalid_unicode_can_be_sent() -> None:
    """A lone surrogate, from an undecodable file name, is replaced."""
    error = to_rank_error(OSError("no file \udcff"))
    assert error.message == "no file ?"
    assert encode(Answer(number=1, error=error))
