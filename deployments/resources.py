"""What `trialflow deploy` manages on a Prefect server: work pools, the GPU limit, automations.

Deployments are in `trialflow.deployments.flow_deployment`. A resource never overwrites people's
changes on the server: schedules, default parameters, job variables, a work pool's template, a
paused automation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import WorkPool
from prefect.events.schemas.automations import Automation, AutomationCore
from prefect.exceptions import ObjectNotFound

from trial_core.errors import ConfigError
from trialflow.deployments.desired_state import PoolType, job_template
from trialflow.flows.lifecycle.shared_gpus import GPU_LIMIT
from trialflow.flows.server.prefect_server import PERSISTENT_LEASE_STORAGE

# Marks our own pools: only a pool with this description is removed.
POOL_DESCRIPTION = "Made by `trialflow deploy`, which removes it again."
MEMORY_LEASE_STORAGE = "prefect.server.concurrency.lease_storage.memory"

Verb = Literal["created", "changed", "unchanged", "removed", "kept", "not found"]


@dataclass(frozen=True)
class Change:
    """A change of one resource that was made; in a dry run, one that would be made.

    Attributes:
        resource: the resource's title.
        detail: how it was changed, or why not; may be empty.
    """

    verb: Verb
    resource: str
    detail: str = ""


class Resource(ABC):
    """Something that the server should have; `title` is its name in the output."""

    title: str

    @abstractmethod
    def look(self, client: SyncPrefectClient) -> tuple[bool, str]:
        """Return whether the resource exists, and how it differs from the wanted one, else "".

        Raises:
            ConfigError: something else exists under its name.
        """

    @abstractmethod
    def put(self, client: SyncPrefectClient) -> None:
        """Create or update it."""

    @abstractmethod
    def remove(self, client: SyncPrefectClient) -> None:
        """Remove the resource, which exists."""

    def reason_to_keep(self, client: SyncPrefectClient) -> str:
        """Return why the existing resource is not removed; empty if it is removed."""
        return ""

    def side_effect_of_removal(self, client: SyncPrefectClient) -> str:
        """Return what else the server deletes with the existing resource; may be empty."""
        return ""


def set_up(
    resources: Iterable[Resource], client: SyncPrefectClient, dry_run: bool
) -> Iterator[Change]:
    """Create or update the resources, in their order; yield each change once it is made.

    Raises:
        ConfigError: something else exists under one of their names; nothing was changed.
    """
    for each, (exists, difference) in [(each, each.look(client)) for each in resources]:
        if exists and not difference:
            yield Change("unchanged", each.title)
            continue
        if not dry_run:
            each.put(client)
        yield Change("changed" if exists else "created", each.title, difference)


def take_down(
    resources: Iterable[Resource], client: SyncPrefectClient, dry_run: bool
) -> Iterator[Change]:
    """Remove the resources that exist and are ours, in their order; yield each change.

    Raises:
        ConfigError: something else exists under one of their names; nothing was changed.
    """
    for each, (exists, _) in [(each, each.look(client)) for each in resources]:
        if not exists:
            yield Change("not found", each.title)
        elif reason := each.reason_to_keep(client):
            yield Change("kept", each.title, reason)
        else:
            side_effect = each.side_effect_of_removal(client)
            if not dry_run:
                each.remove(client)
            yield Change("removed", each.title, side_effect)


class Pool(Resource):
    """A work pool with our job template, which replaces an existing one's on `overwrite`."""

    def __init__(self, name: str, pool_type: PoolType, overwrite: bool = False) -> None:
        self.title = f"work pool {name} ({pool_type})"
        self._name = name
        self._type = pool_type
        self._template = job_template(pool_type)
        self._overwrite = overwrite

    def look(self, client: SyncPrefectClient) -> tuple[bool, str]:
        found = find_pool(client, self._name)
        if found is None:
            return False, ""
        if found.type != self._type:
            raise ConfigError(
                f"work pool {self._name!r} exists with type {found.type}, not {self._type}: pass "
                f"--type {found.type}, or another name with --pool"
            )
        differs = self._overwrite and found.base_job_template != self._template
        return True, "its job template" if differs else ""

    def put(self, client: SyncPrefectClient) -> None:
        if find_pool(client, self._name) is not None:
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

    def reason_to_keep(self, client: SyncPrefectClient) -> str:
        found = find_pool(client, self._name)
        is_ours = found is None or found.description == POOL_DESCRIPTION
        return "" if is_ours else "it was not made by `trialflow deploy`"


class GpuLimit(Resource):
    """The limit of the GPUs that runs share; without a count, it keeps an existing limit."""

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
        client.upsert_global_concurrency_limit_by_name(GPU_LIMIT, self._count or 0)

    def remove(self, client: SyncPrefectClient) -> None:
        client.delete_global_concurrency_limit_by_name(GPU_LIMIT)

    def reason_to_keep(self, client: SyncPrefectClient) -> str:
        return "" if self._count else "--gpus was not given"


def find_pool(client: SyncPrefectClient, name: str) -> WorkPool | None:
    try:
        return client.read_work_pool(name)
    except ObjectNotFound:
        return None


class AutomationResource(Resource):
    """An automation, identified by its name.

    Args:
        wanted: the automation, or None if its deployment does not exist yet.
    """

    def __init__(
        self, name: str, wanted: Callable[[SyncPrefectClient], AutomationCore | None]
    ) -> None:
        self.title = f"automation {name!r}"
        self._name = name
        self._wanted = wanted

    def look(self, client: SyncPrefectClient) -> tuple[bool, str]:
        found, wanted = self._read(client), self._wanted(client)
        if found is None:
            return False, ""
        same = all(
            getattr(found, name) == getattr(wanted, name, None)
            for name in ("description", "trigger", "actions")
        )
        return True, "" if same else "trigger, action or description"

    def put(self, client: SyncPrefectClient) -> None:
        found, wanted = self._read(client), self._wanted(client)
        if wanted is None:
            return
        if found is None:
            client.create_automation(wanted)
            return
        # The server refuses any owner in an update, even the same one.
        ours = wanted.model_dump(exclude={"owner_resource", "enabled"})
        client.update_automation(found.id, AutomationCore(**ours, enabled=found.enabled))

    def remove(self, client: SyncPrefectClient) -> None:
        found = self._read(client)
        if found is not None:
            client.delete_automation(found.id)

    def _read(self, client: SyncPrefectClient) -> Automation | None:
        found = client.read_automations_by_name(self._name)
        return found[0] if found else None


def fixed_automation(wanted: AutomationCore) -> AutomationResource:
    """An automation that is the same on every server."""
    return AutomationResource(wanted.name, lambda client: wanted)


def lease_problem(client: SyncPrefectClient) -> str | None:
    """A warning if the server loses its leases when it restarts; else None."""
    settings = client.request("GET", "/admin/settings").json()
    storage = settings["server"]["concurrency"]["lease_storage"]
    if storage != MEMORY_LEASE_STORAGE:
        return None
    return (
        "the server keeps leases in memory. When it restarts, running trials lose their slots of "
        "the GPU limit, and other runs may start on the same GPUs; runs of a deployment with a "
        "concurrency limit crash. Start the server with "
        f"PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE={PERSISTENT_LEASE_STORAGE}"
    )
