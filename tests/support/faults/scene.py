"""Fixtures: S3 servers behind an endpoint that fails on purpose.

The default suite uses moto. A real gateway has the marker `long`.
"""

from __future__ import annotations

import logging
import uuid as uuids
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import pytest
from botocore.retries.standard import ExponentialBackoff
from moto.s3 import models as moto_models
from s3fs import S3FileSystem

from tests.support.faults.plan import Fault, Plan
from tests.support.faults.processes import ForkedSaves, forked_saves
from tests.support.faults.s3 import FaultyS3, faulty_s3
from tests.support.faults.saving import Site, Sites, check, parts_of, save, stage_ranks, within
from tests.support.s3 import S3Server
from trial_core.checkpoint.manifest import Manifest
from trial_core.errors import StorageError

Result = TypeVar("Result")

DEADLINE_SECONDS = 120.0
# The gateway's, as AWS's, is the smallest that it accepts.
PART_BYTES = {"moto": 2**16, "ceph": 5 * 2**20}


@dataclass
class Scene:
    """A server and the files to save.

    Attributes:
        staged: each rank's folder.
    """

    endpoint: FaultyS3
    sites: Sites
    staged: Mapping[int, Path]
    part_bytes: int

    def new_site(self, *faults: Fault) -> tuple[Site, str, Plan]:
        """An empty folder, a checkpoint's uuid, and a plan of `faults` from now on."""
        hasty = any(fault.kind == "hang" for fault in faults)
        site = self.sites.new(hasty=hasty)
        paced = [replace(fault, bytes_per_second=4 * self.part_bytes) for fault in faults]
        return site, str(uuids.uuid4()), self.endpoint.new_plan(*paced)

    def save(self, site: Site, uuid: str) -> Manifest | StorageError:
        """Save on 2 ranks; the manifest or the error, within the deadline."""
        stores = site.stores()
        return self.soon(lambda: save(stores, self.staged, uuid))

    def soon(self, work: Callable[[], Result]) -> Result | StorageError:
        """Work in small pieces; the result or the error, within the deadline."""
        with parts_of(self.part_bytes):
            return within(DEADLINE_SECONDS, work)

    @cached_property
    def clean_save(self) -> Plan:
        """All requests of a save without faults."""
        site, uuid, plan = self.new_site()
        outcome = self.save(site, uuid)
        self.endpoint.new_plan()
        assert isinstance(outcome, Manifest), outcome
        check(site, uuid, outcome)
        return plan


@pytest.fixture(scope="session")
def scenes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Scene]]:
    """Scenes by the name of their server (``moto``, ``ceph``), created on first use."""
    made: dict[str, Scene] = {}
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(moto_models, "S3_UPLOAD_PART_MIN_SIZE", 1)
        patch.setattr(logging.getLogger("werkzeug"), "disabled", True)  # a line a request
        # Clients retry soon: their pauses are up to 1 s, and longer before each of 5 retries.
        patch.setattr(ExponentialBackoff, "delay_amount", lambda backoff, context: 0.02)
        patch.setattr(S3FileSystem, "retries", 2)

        def get(name: str) -> Scene:
            if name not in made:
                backend: S3Server = request.getfixturevalue(f"{name}_s3")
                endpoint = stack.enter_context(faulty_s3(backend))
                part_bytes = PART_BYTES[name]
                staged = stage_ranks(tmp_path_factory.mktemp(name), part_bytes)
                made[name] = Scene(endpoint, Sites(endpoint), staged, part_bytes)
            return made[name]

        yield get


@pytest.fixture(
    params=["moto", pytest.param("ceph", marks=(pytest.mark.gateway, pytest.mark.long))]
)
def scene(request: pytest.FixtureRequest, scenes: Callable[[str], Scene]) -> Scene:
    """On moto and on a real gateway."""
    return scenes(request.param)


@pytest.fixture(scope="session")
def saves() -> Iterator[ForkedSaves]:
    """Saves in processes that a test kills."""
    with forked_saves() as processes:
        yield processes
