"""A run of a deployment to which no experiment was given, for example by its schedule."""

from __future__ import annotations

import importlib
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
    module, _, name = wanted.entrypoint.rpartition(".")
    flow: Any = getattr(importlib.import_module(module), name)
    assert flow.parameters.required == ["config"]
    with prefect_server.configured(), get_client(sync_client=True) as client:
        run = client.create_flow_run(flow, parameters={})
        with pytest.raises(ParameterTypeError, match=r"config: config is missing: .* deployment"):
            run_flow(flow, flow_run=run)
        assert state_of(UUID(str(run.id))) == "Failed"
