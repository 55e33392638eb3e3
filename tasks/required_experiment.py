"""The experiment as the parameter of a flow: without it, a run ends as failed, and says why."""

from __future__ import annotations

from collections.abc import Callable
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


def experiment_form(**titles: str) -> Callable[[FlowT], FlowT]:
    """Arrange a flow's form in Prefect: its parameters in this order, and with these titles.

    `config` is marked as required, in spite of its default. `trialflow deploy` takes the form over.
    Prefect's `serve` and `deploy` read the signature, where it is optional: a run without it
    begins, and fails.
    """

    def arrange(flow: FlowT) -> FlowT:
        flow.parameters = form = flow.parameters.model_copy(deep=True)
        form.required = ["config"]
        form.properties = {name: form.properties[name] | {"title": titles[name]} for name in titles}
        for field in form.properties.values():
            text = field["description"].replace("`", "")
            field["description"] = text[0].upper() + text[1:]
        _number_fields([{"properties": form.properties}, form.definitions])
        return flow

    return arrange


def _number_fields(schema: Any) -> None:
    """Give each field its position: a server on PostgreSQL keeps no order of fields."""
    if isinstance(schema, dict):
        for position, field in enumerate(schema.get("properties", {}).values()):
            field["position"] = position
        schema = list(schema.values())
    for each in schema if isinstance(schema, list) else ():
        _number_fields(each)
