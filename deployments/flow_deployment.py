"""Deployments of our flows on a Prefect server, as resources of `trialflow deploy`."""

from __future__ import annotations

import importlib
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.filters import FlowFilter
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound
from prefect.flows import Flow

from trial_core.common.text_format import plural
from trial_core.errors import ConfigError
from trialflow.deployments.desired_state import (
    RETRAIN_ENTRYPOINT,
    DeploymentTarget,
    DesiredDeployment,
    base_deployment,
    deployments,
)
from trialflow.deployments.resources import Resource

WORKING_FOLDER = "prefect.deployments.steps.set_working_directory"
A_PAGE = 200


class FlowDeployment(Resource):
    def __init__(self, wanted: DesiredDeployment, target: DeploymentTarget) -> None:
        module, _, name = wanted.entrypoint.rpartition(".")
        self._flow: Flow[..., Any] = getattr(importlib.import_module(module), name)
        self._wanted = wanted
        self._target = target
        self._name = f"{self._flow.name}/{wanted.name}"
        self.title = f"deployment {self._name}"
        self._ours: dict[str, Any] = {
            "entrypoint": wanted.entrypoint,
            "work_pool_name": target.pool,
            # No pull step: an image has its own working folder.
            "pull_steps": (
                [{WORKING_FOLDER: {"directory": target.directory}}] if target.directory else []
            ),
            "parameter_openapi_schema": self._flow.parameters.model_dump(mode="json"),
            "enforce_parameter_schema": True,
        }

    def look(self, client: SyncPrefectClient) -> tuple[bool, str]:
        found = self.read(client)
        if found is None:
            return False, ""
        if found.entrypoint != self._wanted.entrypoint:
            raise ConfigError(
                f"{self.title} exists and is not trialflow's: its entrypoint is "
                f"{found.entrypoint}, not {self._wanted.entrypoint}. Delete it (`prefect "
                f"deployment delete {self._name}`), or deploy it again under another name"
            )
        return True, ", ".join(_FIELD_TITLES.get(name, name) for name in self._changes(found))

    def put(self, client: SyncPrefectClient) -> None:
        found = self.read(client)
        if found is not None:
            # An update: Prefect's upsert would delete the schedules.
            client.update_deployment(found.id, DeploymentUpdate(**self._changes(found)))
            return
        client.create_deployment(
            flow_id=client.create_flow_from_name(self._flow.name),
            name=self._wanted.name,
            description=self._wanted.description,
            tags=self._wanted.tags,
            parameters={**self._wanted.parameters, **self._wanted.from_file},
            job_variables={"env": self._wanted.environment},
            **self._ours,
        )

    def remove(self, client: SyncPrefectClient) -> None:
        found = self.read(client)
        if found is not None:
            client.delete_deployment(found.id)

    def side_effect_of_removal(self, client: SyncPrefectClient) -> str:
        found = self.read(client)
        if found is None:
            return ""
        # Prefect deletes queued runs with their deployment.
        queued = {
            "deployments": {"id": {"any_": [str(found.id)]}},
            "flow_runs": {
                "state": {"type": {"any_": ["SCHEDULED"]}}, "start_time": {"is_null_": True}
            },
        }  # fmt: skip
        count: int = client.request("POST", "/flow_runs/count", json=queued).json()
        return f"with {plural(count, 'run')} that had not started" if count else ""

    def read(self, client: SyncPrefectClient) -> DeploymentResponse | None:
        return deployment_named(client, self._name)

    def _changes(self, found: DeploymentResponse) -> dict[str, Any]:
        """The fields to update, with their new values."""
        wanted = {name: ours for name, ours in self._ours.items() if not self._keeps(name, found)}
        wanted["tags"] = [*found.tags, *(set(self._wanted.tags) - set(found.tags))]
        variables = found.job_variables or {}
        wanted["job_variables"] = {
            **variables, "env": {**self._wanted.environment, **variables.get("env", {})}
        }  # fmt: skip
        wanted["parameters"] = {**(found.parameters or {}), **self._wanted.from_file}
        return {
            name: value
            for name, value in wanted.items()
            if (getattr(found, name) or type(value)()) != value
        }

    def _keeps(self, field: str, found: DeploymentResponse) -> bool:
        """Return whether a field keeps the value that people have set."""
        keeps_pool = self._target.keeps_pool and found.work_pool_name is not None
        if field == "work_pool_name":
            return keeps_pool
        if field != "pull_steps" or not self._target.keeps_directory:
            return False
        if keeps_pool or found.work_pool_name == self._target.pool:
            return True
        # The pool changes: a folder of this machine does not exist in an image, nor vice versa.
        is_custom = bool(found.pull_steps) and working_folder(found) is None
        return is_custom or bool(found.pull_steps) == bool(self._target.directory)


def found_deployments(client: SyncPrefectClient) -> list[DeploymentResponse]:
    """Return our existing deployments: from ``prefect.yaml`` first, then the models'."""
    nowhere = DeploymentTarget("", None)
    ours = [*deployments(), *map(base_deployment, models_on_server(client))]
    each = (FlowDeployment(wanted, nowhere).read(client) for wanted in ours)
    return [found for found in each if found is not None]


def models_on_server(client: SyncPrefectClient) -> list[str]:
    """The models that have a deployment of `retrain`."""
    general = {each.name for each in deployments()}
    named = FlowFilter.model_validate({"name": {"any_": ["retrain"]}})
    found: list[DeploymentResponse] = []
    while page := client.read_deployments(flow_filter=named, limit=A_PAGE, offset=len(found)):
        found += page
    ours = [each.name for each in found if each.entrypoint == RETRAIN_ENTRYPOINT]
    return sorted(name for name in ours if name not in general)


def deployment_named(client: SyncPrefectClient, name: str) -> DeploymentResponse | None:
    """Read a deployment, such as ``train/train``; None if there is none."""
    try:
        return client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None


def working_folder(deployment: DeploymentResponse) -> str | None:
    """Return the working folder of its runs; None if its pull steps do anything else."""
    match deployment.pull_steps:
        case [{"prefect.deployments.steps.set_working_directory": {"directory": str(folder)}}]:
            return folder
    return None


_FIELD_TITLES = {
    "work_pool_name": "work pool",
    "pull_steps": "working folder",
    "parameter_openapi_schema": "parameter schema",
    "enforce_parameter_schema": "parameter check",
    "job_variables": "environment",
    "parameters": "experiment",
}
