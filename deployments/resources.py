"""The things that `trialflow deploy` keeps on a Prefect server: each can look whether it is there
as it should be, put itself there, and remove itself. Deployments are in `trialflow.deployments.flow_deployment`.

What a person has set there in the meantime stays: schedules, default parameters, job variables, a
work pool's template, an automation that was paused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import (
    GlobalConcurrencyLimitCreate,
    GlobalConcurrencyLimitUpdate,
    WorkPoolCreate,
    WorkPoolUpdate,
)
from prefect.client.schemas.objects import WorkPool
from prefect.events.schemas.automations import Automation, AutomationCore
from prefect.exceptions import ObjectNotFound

from trial_core.errors import ConfigError
from trialflow.deployments.desired_state import PoolType, job_template
from trialflow.flows.lifecycle.gpu_slots import GPU_LIMIT

POOL_DESCRIPTION = "Made by `trialflow deploy`, which removes it again."
FORGETFUL_LEASE_STORAGE = "prefect.server.concurrency.lease_storage.memory"
LASTING_LEASE_STORAGE = "prefect.server.concurrency.lease_storage.filesystem"

Verb = Literal["created", "changed", "unchanged", "removed", "kept", "not there"]


@dataclass(frozen=True)
class Change:
    """What was done about one thing.

    Attributes:
        verb: what; in a dry run, what would be.
        thing: about what.
        detail: more about it, for people; may be empty.
    """

    verb: Verb
    resource: str
    detail: str = ""


class Resource(ABC):
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


def set_up(
    things: Iterable[Resource], client: SyncPrefectClient, dry_run: bool
) -> Iterator[Change]:
    """Put there what is not, one after the other; what was done (in a dry run: would be).

    Raises:
        ConfigError: something else is there under one of their names; nothing was done.
    """
    for thing, (exists, difference) in [(thing, thing.look(client)) for thing in things]:
        if exists and not difference:
            yield Change("unchanged", thing.title)
            continue
        if not dry_run:
            thing.put(client)
        yield Change("changed" if exists else "created", thing.title, difference)


def take_down(
    things: Iterable[Resource], client: SyncPrefectClient, dry_run: bool
) -> Iterator[Change]:
    """Remove what is there and ours; what was done (in a dry run: would be).

    Raises:
        ConfigError: something else is there under one of their names; nothing was done.
    """
    for thing, (exists, _) in [(thing, thing.look(client)) for thing in things]:
        if not exists:
            yield Change("not there", thing.title)
        elif why := thing.why_kept(client):
            yield Change("kept", thing.title, why)
        else:
            gone_too = thing.goes_with_it(client)
            if not dry_run:
                thing.remove(client)
            yield Change("removed", thing.title, gone_too)


class Pool(Resource):
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


class GpuLimit(Resource):
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


def find_pool(client: SyncPrefectClient, name: str) -> WorkPool | None:
    """The work pool of that name, if there is one."""
    try:
        return client.read_work_pool(name)
    except ObjectNotFound:
        return None


class AutomationResource(Resource):
    """An automation, which is known by its name."""

    def __init__(self, name: str) -> None:
        self.title = f"automation {name!r}"
        self._name = name

    @abstractmethod
    def wanted(self, client: SyncPrefectClient) -> AutomationCore | None:
        """The automation as it should be; None: what it is about is not there yet."""

    def look(self, client: SyncPrefectClient) -> tuple[bool, str]:
        found, wanted = self._read(client), self.wanted(client)
        if found is None:
            return False, ""
        same = all(
            getattr(found, name) == getattr(wanted, name, None)
            for name in ("description", "trigger", "actions")
        )
        return True, "" if same else "what it does"

    def put(self, client: SyncPrefectClient) -> None:
        found, wanted = self._read(client), self.wanted(client)
        if wanted is None:
            return
        if found is None:
            client.create_automation(wanted)
            return
        # The server refuses a change of the owner, even to what it is.
        ours = wanted.model_dump(exclude={"owner_resource", "enabled"})
        client.update_automation(found.id, AutomationCore(**ours, enabled=found.enabled))

    def remove(self, client: SyncPrefectClient) -> None:
        found = self._read(client)
        if found is not None:
            client.delete_automation(found.id)

    def _read(self, client: SyncPrefectClient) -> Automation | None:
        found = client.read_automations_by_name(self._name)
        return found[0] if found else None


class FixedAutomation(AutomationResource):
    """An automation that is the same on every server."""

    def __init__(self, wanted: AutomationCore) -> None:
        super().__init__(wanted.name)
        self._wanted = wanted

    def wanted(self, client: SyncPrefectClient) -> AutomationCore:
        return self._wanted


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
