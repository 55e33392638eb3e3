"""The driver's requests."""

from __future__ import annotations

from typing import get_args

from tests.support.stages import all_stages
from trial_core.messages import AnyRequest, RunHook

WITHOUT_A_REQUEST = {"callbacks", "checkpoint-prune", "own-stage"}


def test_messages_name_stages_as_the_ui_does() -> None:
    """An error says "during train-workload", not the class of the request."""
    titles = {request.__name__: request.stage for request in get_args(AnyRequest)}
    others = {
        titles.pop("Ping"): "a check of the channel",
        titles.pop("RunHook"): "callbacks",
        titles.pop("EndFit"): "the end of fit",
        titles.pop("Shutdown"): "the shutdown",
    }
    assert all(seen == expected for seen, expected in others.items())
    names = {stage.name for stage in all_stages().values()}
    assert set(titles.values()) == names - WITHOUT_A_REQUEST


def test_a_hook_is_named() -> None:
    """As in the name of its task."""
    assert RunHook(hook="on_validation_end").title == "callbacks on_validation_end"
