"""`trialflow deploy` in a test's own process, and what others do to its resources."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.schemas.automations import AutomationCore

from tests.support.prefect import PrefectServer
from tests.support.slots import toy_config
from trialflow.deployments.cli.deploy import wanted_resources
from trialflow.deployments.resources import set_up, take_down

POOL = "deployed"


@pytest.fixture
def client(prefect_server: PrefectServer) -> Iterator[SyncPrefectClient]:
    """A client of the server; afterwards, everything that the test has deployed is removed."""
    with prefect_server.configured(), get_client(sync_client=True) as client:
        yield client
        for _ in take_down(reversed(wanted_resources("process", POOL, 4, None)), client, False):
            pass


def deploy(
    client: SyncPrefectClient, dry_run: bool = False, only: Collection[str] = (), **changes: Any
) -> dict[str, str]:
    """Deploy with four GPUs, unless `changes` say otherwise; the verb for each resource.

    Args:
        only: the titles of the resources that the test needs; empty: all.
    """
    arguments = {"gpus": 4, "directory": Path("/srv/runs"), **changes}
    resources = wanted_resources("process", POOL, arguments.pop("gpus"), **arguments)
    resources = [each for each in resources if not only or each.title in only]
    return {change.resource: change.verb for change in set_up(resources, client, dry_run)}


def remove(client: SyncPrefectClient, dry_run: bool = False) -> dict[str, str]:
    resources = wanted_resources("process", POOL, 4, None)
    changes = take_down(reversed(resources), client, dry_run)
    return {change.resource: change.verb for change in changes}


def change_automation(client: SyncPrefectClient, name: str, **fields: Any) -> None:
    """As a person does in the UI."""
    (found,) = client.read_automations_by_name(name)
    present = found.model_dump(exclude={"id", "owner_resource"})
    client.update_automation(found.id, AutomationCore(**{**present, **fields}))


def create_run(client: SyncPrefectClient, folder: Path) -> UUID:
    """A run of `train` that no worker takes."""
    deployment = client.read_deployment_by_name("train/train")
    parameters = {"config": toy_config(folder).model_dump(mode="json")}
    return client.create_flow_run_from_deployment(deployment.id, parameters=parameters).id


def set_state(client: SyncPrefectClient, run: UUID, name: str, force: bool = True) -> None:
    """As a worker does."""
    client.request(
        "POST", f"/flow_runs/{run}/set_state",
        json={"state": {"type": name.upper(), "name": name}, "force": force},
    )  # fmt: skip
