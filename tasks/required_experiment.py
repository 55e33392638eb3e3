"""The experiment as the parameter of a flow: without it, a run ends as failed, and says why."""

from __future__ import annotations

from typing import Any, TypeVar

from prefect import Flow
from pydantic import BeforeValidator

from trial_core.config.error_text import validation_error

FlowT = TypeVar("FlowT", bound=Flow[..., Any])

MISSING: Any = None
"""Default of the parameter `config`. Prefect ends a run as crashed whose parameter has none and is
not given, for example by a schedule, before the flow can say anything."""


def _require(value: Any) -> Any:
    if value is None:
        raise validation_error(
            "config is missing: a run needs an experiment. Give the content of an experiment file "
            "as the parameter config: to this run, to its schedule or to its deployment"
        )
    return value


GIVEN = BeforeValidator(_require)
"""Refuses a missing experiment."""


def require_experiment(flow: FlowT) -> FlowT:
    """Mark the parameter `config` as required in the forms of a flow, in spite of its default.

    `trialflow deploy` takes the mark over. Prefect's `serve` and `deploy` read the signature, where
    it is optional: a run without it begins, and fails.
    """
    flow.parameters.required = ["config"]
    return flow
