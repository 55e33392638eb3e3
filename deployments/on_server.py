"""The things that `trialflow deploy` keeps on a Prefect server: each can look whether it is there
as it should be, put itself there, and remove itself.

What a person has set there in the meantime stays: schedules, default parameters, job variables, a
work pool's template, an automation that was paused.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import (
    DeploymentUpdate,
    GlobalConcurrencyLimitCreate,
    GlobalConcurrencyLimitUpdate,
    WorkPoolCreate,
    WorkPoolUpdate,
)
from prefect.client.schemas.objects import WorkPool
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events.schemas.automations import Automation, AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.flows import Flow

from deployments.wanted import Place, PoolType, WantedDeployment, deployments, job_template
from flows.gpu_slots import GPU_LIMIT
from trial_core.errors import ConfigError
from trial_core.words import plural

WORKING_FOLDER = "prefect.deployments.steps.set_working_directory"
POOL_DESCRIPTION = "Made by `trialflow deploy`, which removes it again."
FORGETFUL_LEASE_STORAGE = "prefect.server.concurrency.lease_storage.memory"
LASTING_LEASE_STORAGE = "prefect.server.concurrency.lease_storage.filesystem"

Verb = Literal["created", "changed", "unchanged", "removed", "kept", "not there"]


@dataclass(frozen=True)
class Done:
    """What was done about one thing.

    Attributes:
        verb: what; in a dry run, what would be.
        thing: about what.
        detail: more about it, for people; may be empty.
    """

    verb: Verb
    thing: str
    detail: str = ""


class Thing(ABC):
    """Something that the server should have.

    Attributes:
        title: what it is called.
    """

    title: str

    @abstractmethod
    def look(self, client: SyncPrefectClient) -> tuple[bool, str]:
        """Whether it is there, and in what it differs from how it should be, in words.

        Raises:
            ConfigError: something else is there under its name.
        """

    @abstractmethod
    def put(self, client: SyncPrefectClient) -> None:
        """Create it, or make it as it should be."""

    @abstractmethod
    def remove(self, client: SyncPrefectClient) -> None:
        """Remove it, which is there."""

    def why_kept(self, client: SyncPrefectClient) -> str:
        """Why it, which is there, is not to be removed, in words; empty: it is."""
        return ""

    def goes_with_it(self, client: SyncPrefectClient) -> str:
        """What is removed together with it, which is there, in words; may be empty."""
        return ""


def set_up(things: Iterable[Thing], client: SyncPrefectClient, dry_run: bool) -> Iterator[Done]:
    """Put there what is not, one after the other; what was done (in a dry run: would be).

    Raises:
        ConfigError: something else is there under one of their names; nothing was done.
    """
    for thing, (exists, difference) in [(thing, thing.look(client)) for thing in things]:
        if exists and not difference:
            yield Done("unchanged", thing.title)
            continue
        if not dry_run:
            thing.put(client)
        yield Done("changed" if exists else "created", thing.title, difference)


def take_down(things: Iterable[Thing], client: SyncPrefectClient, dry_run: bool) -> Iterator[Done]:
    """Remove what is there and ours; what was done (in a dry run: would be).

    Raises:
        ConfigError: something else is there under one of their names; nothing was done.
    """
    for thing, (exists, _) in [(thing, thing.look(client)) for thing in things]:
        if not exists:
            yield Done("not there", thing.title)
        elif why := thing.why_kept(client):
            yield Done("kept", thing.title, why)
        else:
            gone_too = thing.goes_with_it(client)
            if not dry_run:
                thing.remove(client)
            yield Done("removed", thing.title, gone_too)


class Pool(Thing):
    """A work pool with our job template.

    Args:
        overwrite: whether a pool that is there already is given our template.
    """

    def __init__(self, name: str, pool_type: PoolType, overwrite: bool = False) -> None:
        self.title = f"work pool {name} ({pool_type})"
        self._name = name
        self._type = pool_type
        self._template = job_template(pool_type)
        self._overwrite = overwrite

    def look(self, client: SyncPrefectClient) -> tuple[bool, str]:
        found = self._read(client)
        if found is None:
            return False, ""
        if found.type != self._type:
            raise ConfigError(
                f"work pool {self._name!r} is there, and of type {found.type}, not {self._type}: "
                f"give --type {found.type}, or another name with --pool"
            )
        differs = self._overwrite and found.base_job_template != self._template
        return True, "its job template" if differs else ""

    def put(self, client: SyncPrefectClient) -> None:
        if self._read(client) is not None:
            client.update_work_pool(self._name, WorkPoolUpdate(base_job_template=self._template))
            return
        client.create_work_pool(
            WorkPoolCreate(
                name=self._name,
                type=self._type,
                description=POOL_DESCRIPTION,
                base_job_template=self._template,
            )
        )

    def remove(self, client: SyncPrefectClient) -> None:
        client.delete_work_pool(self._name)

    def why_kept(self, client: SyncPrefectClient) -> str:
        found = self._read(client)
        is_ours = found is None or found.description == POOL_DESCRIPTION
        return "" if is_ours else "it was not made by `trialflow deploy`"

    def _read(self, client: SyncPrefectClient) -> WorkPool | None:
        return find_pool(client, self._name)


class GpuLimit(Thing):
    """The number of GPUs that runs share.

    Args:
        count: how many; None: nobody has asked for one, and so one that is there stays.
    """

    def __init__(self, count: int | None) -> None:
        self.title = f"concurrency limit {GPU_LIMIT}" + (f" of {count}" if count else "")
        self._count = count

    def look(self, client: SyncPrefectClient) -> tuple[bool, str]:
        try:
            found = client.read_global_concurrency_limit_by_name(GPU_LIMIT)
        except ObjectNotFound:
            return False, ""
        return True, "" if found.limit == self._count else f"was {found.limit}"

    def put(self, client: SyncPrefectClient) -> None:
        exists, _ = self.look(client)
        if exists:
            client.update_global_concurrency_limit(
                GPU_LIMIT, GlobalConcurrencyLimitUpdate(limit=self._count)
            )
        else:
            client.create_global_concurrency_limit(
                GlobalConcurrencyLimitCreate(name=GPU_LIMIT, limit=self._count or 0)
            )

    def remove(self, client: SyncPrefectClient) -> None:
        client.delete_global_concurrency_limit_by_name(GPU_LIMIT)

    def why_kept(self, client: SyncPrefectClient) -> str:
        return "" if self._count else "was not asked for: --gpus"


class FlowDeployment(Thing):
    """A deployment of one of our flows.

    Args:
        wanted: the deployment.
        place: where its runs are to be.
    """

    def __init__(self, wanted: WantedDeployment, place: Place) -> None:
        module, _, name = wanted.entrypoint.rpartition(".")
        self._flow: Flow[..., Any] = getattr(importlib.import_module(module), name)
        self._wanted = wanted
        self._place = place
        self._name = f"{self._flow.name}/{wanted.name}"
        self.title = f"deployment {self._name}"
        self._ours: dict[str, Any] = {
            "entrypoint": wanted.entrypoint,
            "work_pool_name": place.pool,
            # None at all: an image has its own working folder.
            "pull_steps": (
                [{WORKING_FOLDER: {"directory": place.directory}}] if place.directory else []
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
                f"{self.title} is there, and is somebody else's: it runs {found.entrypoint}, not "
                f"{self._wanted.entrypoint}. Delete it first (`prefect deployment delete "
                f"{self._name}`), or make it again under another name"
            )
        return True, ", ".join(_WORDS.get(name, name) for name in self._changes(found))

    def put(self, client: SyncPrefectClient) -> None:
        found = self.read(client)
        if found is not None:
            # Not Prefect's upsert, which would delete the schedules.
            client.update_deployment(found.id, DeploymentUpdate(**self._changes(found)))
            return
        client.create_deployment(
            flow_id=client.create_flow_from_name(self._flow.name),
            name=self._wanted.name,
            description=self._wanted.description,
            tags=self._wanted.tags,
            parameters=self._wanted.parameters,
            job_variables={"env": self._wanted.environment},
            **self._ours,
        )

    def remove(self, client: SyncPrefectClient) -> None:
        found = self.read(client)
        if found is not None:
            client.delete_deployment(found.id)

    def goes_with_it(self, client: SyncPrefectClient) -> str:
        found = self.read(client)
        if found is None:
            return ""
        # Prefect deletes them with their deployment.
        queued = {
            "deployments": {"id": {"any_": [str(found.id)]}},
            "flow_runs": {
                "state": {"type": {"any_": ["SCHEDULED"]}}, "start_time": {"is_null_": True}
            },
        }  # fmt: skip
        count: int = client.request("POST", "/flow_runs/count", json=queued).json()
        return f"and {plural(count, 'run')} that had not started yet" if count else ""

    def read(self, client: SyncPrefectClient) -> DeploymentResponse | None:
        """What is there under its name."""
        try:
            return client.read_deployment_by_name(self._name)
        except ObjectNotFound:
            return None

    def _changes(self, found: DeploymentResponse) -> dict[str, Any]:
        """The fields that are to be another."""
        wanted = {name: ours for name, ours in self._ours.items() if not self._keeps(name, found)}
        wanted["tags"] = [*found.tags, *(set(self._wanted.tags) - set(found.tags))]
        variables = found.job_variables or {}
        wanted["job_variables"] = {
            **variables, "env": {**self._wanted.environment, **variables.get("env", {})}
        }  # fmt: skip
        return {
            name: value
            for name, value in wanted.items()
            if (getattr(found, name) or type(value)()) != value
        }

    def _keeps(self, field: str, found: DeploymentResponse) -> bool:
        """Whether a field stays as somebody has set it."""
        keeps_pool = self._place.keeps_pool and found.work_pool_name is not None
        if field == "work_pool_name":
            return keeps_pool
        if field != "pull_steps" or not self._place.keeps_directory:
            return False
        if keeps_pool or found.work_pool_name == self._place.pool:
            return True
        # It moves. A folder of this machine is no folder of an image's, and the other way round.
        is_own = bool(found.pull_steps) and working_folder(found) is None
        return is_own or bool(found.pull_steps) == bool(self._place.directory)


def find_pool(client: SyncPrefectClient, name: str) -> WorkPool | None:
    """The work pool of that name, if there is one."""
    try:
        return client.read_work_pool(name)
    except ObjectNotFound:
        return None


def found_deployments(client: SyncPrefectClient) -> list[DeploymentResponse]:
    """Those of our deployments that are there."""
    nowhere = Place("", None)
    each = (FlowDeployment(wanted, nowhere).read(client) for wanted in deployments())
    return [found for found in each if found is not None]


def working_folder(deployment: DeploymentResponse) -> str | None:
    """The working folder of its runs, if that is all that is done before they start."""
    match deployment.pull_steps:
        case [{"prefect.deployments.steps.set_working_directory": {"directory": str(folder)}}]:
            return folder
    return None


_WORDS = {
    "work_pool_name": "work pool",
    "pull_steps": "working folder",
    "parameter_openapi_schema": "parameters' schema",
    "enforce_parameter_schema": "checking of parameters",
    "job_variables": "environment of its runs",
}


class Rule(Thing):
    """An automation."""

    def __init__(self, wanted: AutomationCore) -> None:
        self.title = f"automation {wanted.name!r}"
        self._wanted = wanted

    def look(self, client: SyncPrefectClient) -> tuple[bool, str]:
        found = self._read(client)
        if found is None:
            return False, ""
        same = all(
            getattr(found, name) == getattr(self._wanted, name)
            for name in ("description", "trigger", "actions")
        )
        return True, "" if same else "what it does"

    def put(self, client: SyncPrefectClient) -> None:
        found = self._read(client)
        if found is None:
            client.create_automation(self._wanted)
            return
        # The server refuses a change of the owner, even to what it is.
        wanted = self._wanted.model_dump(exclude={"owner_resource", "enabled"})
        client.update_automation(found.id, AutomationCore(**wanted, enabled=found.enabled))

    def remove(self, client: SyncPrefectClient) -> None:
        found = self._read(client)
        if found is not None:
            client.delete_automation(found.id)

    def _read(self, client: SyncPrefectClient) -> Automation | None:
        found = client.read_automations_by_name(self._wanted.name)
        return found[0] if found else None


def lease_problem(client: SyncPrefectClient) -> str | None:
    """What is wrong with how the server keeps leases of GPUs; None when nothing is."""
    settings = client.request("GET", "/admin/settings").json()
    storage = settings["server"]["concurrency"]["lease_storage"]
    if storage != FORGETFUL_LEASE_STORAGE:
        return None
    return (
        "the server keeps leases in its memory: when it is restarted, running trials lose their "
        "GPUs' places in the queue, and others may start beside them; runs of a deployment with a "
        "concurrency limit crash. Start it with "
        f"PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE={LASTING_LEASE_STORAGE}"
    )
