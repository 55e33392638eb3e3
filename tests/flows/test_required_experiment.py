"""A run of a deployment to which no experiment was given, for example by its schedule."""

from __future__ import annotations

import importlib
import json
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.exceptions import ParameterTypeError
from prefect.flow_engine import run_flow

from tests.flows.lifecycle.conftest import state_of
from tests.support.prefect import PrefectServer
from trialflow.deployments.desired_state import DesiredDeployment, deployments

pytestmark = pytest.mark.server


def as_flow(wanted: DesiredDeployment) -> Any:
    """The flow of a deployment."""
    module, _, name = wanted.entrypoint.rpartition(".")
    return getattr(importlib.import_module(module), name)


def in_form(schema: Any, fields: dict[str, Any]) -> list[str]:
    """The titles of fields in the order of Prefect's form, with those of the fields in them."""
    titles = []
    for field in sorted(fields.values(), key=lambda field: field["position"]):
        kinds = [each.get("$ref", "") for each in (field, *field.get("anyOf", []))]
        section = schema["definitions"].get(max(kinds[:2]).rpartition("/")[2], field)
        titles += [field["title"], *in_form(schema, section.get("properties", {}))]
    return titles


@pytest.mark.parametrize("wanted", deployments(), ids=lambda each: each.name)
def test_a_form_begins_with_what_people_set(wanted: DesiredDeployment) -> None:
    """Also on a server that keeps no order of fields, as with PostgreSQL."""
    schema = json.loads(json.dumps(as_flow(wanted).parameters.model_dump(), sort_keys=True))
    titles = in_form(schema, schema["properties"])
    first = ["Entrypoint", "Hyperparameters", "Batches", "Epochs", "Metric", "Slots per trial"]
    rest = ["Channel", "URL", "Restarts", "Stopping", "Retraining"]
    found = [title for title in titles if title in (*first, *rest)]
    assert found == first + rest
    if wanted.name == "train":
        assert titles[:3] == ["Trial to continue", "Start of a new trial", "Experiment"]
    assert all(title[0].isupper() for title in titles)


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(each, id=each.name, marks=[] if each.name == "train" else pytest.mark.long)
        for each in deployments()
    ],
)
def test_a_run_without_an_experiment_fails(
    prefect_server: PrefectServer, wanted: DesiredDeployment
) -> None:
    """It says what is missing; a form asks for it."""
    flow = as_flow(wanted)
    assert flow.parameters.required == ["config"]
    with prefect_server.configured(), get_client(sync_client=True) as client:
        run = client.create_flow_run(flow, parameters={})
        with pytest.raises(ParameterTypeError, match=r"config: config is missing: .* deployment"):
            run_flow(flow, flow_run=run)
        assert state_of(UUID(str(run.id))) == "Failed"
