"""Fetching a checkpoint from S3: any request fails.

By default some faults at some requests, every one with ``make test-long``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.faults.plan import Fault, Plan
from tests.support.faults.saving import CODE, Site, rank_files
from tests.support.faults.scene import Scene
from tests.support.manifests import stored_files
from trial_core.checkpoint.layout import CODE_NAME
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.transfer.fetch import fetch_files
from trial_core.errors import StorageError

FAULTS = {
    "cut request": Fault("cut request"),
    "cut reply": Fault("cut reply"),
    "cut in the middle": Fault("cut reply", byte=500),
    "500": Fault("500"),
    "503": Fault("503"),
    "hang": Fault("hang"),
    "slow": Fault("slow"),
}
SOME = 5


@dataclass
class Stored:
    """A checkpoint, and the number of requests to fetch it."""

    scene: Scene
    site: Site
    manifest: Manifest
    files: Mapping[str, bytes]
    requests: int = 0

    def fetch(self, target: Path, *faults: Fault) -> tuple[object, Plan]:
        """Fetch everything with these faults; the outcome, within the deadline."""
        clients, _, plan = self.scene.new_site(*faults)
        site = replace(self.site, options=clients.options)
        entries, store = self.manifest.all_files, site.stores()["rank-0"]
        outcome = self.scene.soon(lambda: fetch_files(store, self.manifest.uuid, entries, target))
        self.scene.endpoint.new_plan()
        return outcome, plan

    def passes(self, target: Path, fault: Fault) -> None:
        """One request fails: the fetch returns all files or raises, and leaves no damaged file."""
        outcome, plan = self.fetch(target, fault)
        assert plan.has_struck, str(plan)
        found = stored_files(target) if target.exists() else {}
        assert found.items() <= self.files.items()
        assert isinstance(outcome, StorageError) or found == self.files

    def stays(self, target: Path, fault: Fault) -> None:
        """All requests fail from one on: the fetch raises in time (unless the fault is ``slow``),
        and a later fetch only fetches what is missing."""
        outcome, plan = self.fetch(target, replace(fault, times=None))
        assert fault.kind == "slow" or isinstance(outcome, StorageError), str(plan)
        found = stored_files(target) if target.exists() else {}
        assert found.items() <= self.files.items()
        fetched, _ = self.fetch(target)
        assert fetched == self.manifest.total_bytes - sum(map(len, found.values()))
        assert stored_files(target) == self.files


@pytest.fixture(scope="module")
def stored(
    scenes: Callable[[str], Scene], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Stored]:
    """A checkpoint in a scene, saved on first use."""
    made: dict[str, Stored] = {}

    def get(where: str) -> Stored:
        if where not in made:
            scene = scenes(where)
            site, uuid, _ = scene.new_site()
            manifest = scene.save(site, uuid)
            assert isinstance(manifest, Manifest)
            first, second = rank_files(scene.part_bytes).values()
            stored = Stored(scene, site, manifest, {**first, **second, CODE_NAME: CODE})
            outcome, plan = stored.fetch(tmp_path_factory.mktemp("clean"))
            assert outcome == manifest.total_bytes
            made[where] = replace(stored, requests=len(plan.seen))
        return made[where]

    return get


@pytest.mark.parametrize("kind", ["cut in the middle", pytest.param("503", marks=pytest.mark.long)])
def test_a_fault_that_passes(stored: Callable[[str], Stored], tmp_path: Path, kind: str) -> None:
    """At some of the requests, not the same for all kinds."""
    here = stored("moto")
    first = list(FAULTS).index(kind) % SOME
    for index in range(first, here.requests, SOME):
        here.passes(tmp_path / str(index), replace(FAULTS[kind], first=index))


def test_a_fault_that_stays(stored: Callable[[str], Stored], tmp_path: Path) -> None:
    """The server hangs from one request on."""
    here = stored("moto")
    here.stays(tmp_path / "target", replace(FAULTS["hang"], first=here.requests // 2))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("where", ["moto", pytest.param("ceph", marks=pytest.mark.gateway)])
def test_any_fault_at_any_request(
    stored: Callable[[str], Stored], tmp_path: Path, where: str, kind: str
) -> None:
    """At every request, once and from then on."""
    here = stored(where)
    for index in range(here.requests):
        here.passes(tmp_path / f"passes-{index}", replace(FAULTS[kind], first=index))
        here.stays(tmp_path / f"stays-{index}", replace(FAULTS[kind], first=index))
