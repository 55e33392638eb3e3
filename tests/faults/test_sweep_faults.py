"""A sweep, or a deletion, on S3: any request fails."""

from __future__ import annotations

import uuid as uuids
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.faults.plan import Fault
from tests.support.faults.saving import ATTEMPT, TRIAL, Site, keys_of
from tests.support.faults.scene import Scene
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.transfer.upload import upload_files
from trial_core.errors import StorageError

FAULTS = (
    Fault("cut request"),
    Fault("cut reply", byte=10),
    Fault("lose reply"),
    Fault("500"),
    Fault("503"),
)
SOME = 10
Scenes = Callable[[str], Scene]


def littered(scene: Scene) -> tuple[Site, Manifest]:
    """A committed checkpoint whose intent is left; half of another, and a multipart upload."""
    site, uuid, _ = scene.new_site()
    manifest = scene.save(site, uuid)
    assert isinstance(manifest, Manifest)
    store, orphan = site.behind, str(uuids.uuid4())
    for begun in (uuid, orphan):
        store.announce_upload(TRIAL, begun, ATTEMPT)
    upload_files(store, orphan, scene.staged[0], 0)
    site.begin_multipart_upload(f"checkpoints/{orphan}/in-part")
    return site, manifest


def sweep(scene: Scene, fault: Fault) -> bool:
    """Sweep with `fault`, then without; whether a request has met the fault."""
    site, manifest = littered(scene)
    plan = scene.endpoint.new_plan(fault)
    store = site.stores()["driver"]
    outcome = scene.soon(lambda: store.sweep(TRIAL))
    scene.endpoint.new_plan()
    assert site.behind.list() == [manifest]
    assert site.behind.find_damage(manifest.uuid, manifest.all_files) == []
    if not isinstance(outcome, StorageError):
        assert site.objects() == keys_of([manifest]), str(plan)
    site.behind.sweep(TRIAL)
    assert site.objects() == keys_of([manifest]), str(plan)
    assert site.multipart_uploads() == [], str(plan)
    site.clear()
    return plan.has_struck


def delete(scene: Scene, fault: Fault) -> bool:
    """Delete with `fault`, then without; whether a request has met the fault."""
    site, uuid, _ = scene.new_site()
    manifest = scene.save(site, uuid)
    assert isinstance(manifest, Manifest)
    plan = scene.endpoint.new_plan(fault)
    store = site.stores()["driver"]
    outcome = scene.soon(lambda: store.delete(manifest))
    scene.endpoint.new_plan()
    for listed in site.behind.list():
        assert site.behind.find_damage(listed.uuid, listed.all_files) == []
    if not isinstance(outcome, StorageError):
        assert site.objects() == set(), str(plan)
    site.behind.delete(manifest)
    assert site.objects() == set(), str(plan)
    return plan.has_struck


def rotating(index: int) -> Fault:
    """A fault of another kind for each index."""
    return replace(FAULTS[index // SOME % len(FAULTS)], first=index)


@pytest.mark.long
def test_the_next_sweep_finishes_a_failed_one(scenes: Scenes) -> None:
    """At some of its requests. Committed checkpoints stay intact."""
    index = 0
    while sweep(scenes("moto"), rotating(index)):
        index += SOME
    assert index > SOME


def test_the_next_deletion_finishes_a_failed_one(scenes: Scenes) -> None:
    """At some of its requests. Listed checkpoints are intact."""
    index = 0
    while delete(scenes("moto"), rotating(index)):
        index += SOME
    assert index > SOME


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("times", [1, None], ids=["once", "from then on"])
@pytest.mark.parametrize("work", [sweep, delete])
def test_any_fault_at_any_request(
    scene: Scene, times: int | None, work: Callable[[Scene, Fault], bool]
) -> None:
    """At every request."""
    for fault in FAULTS:
        index = 0
        while work(scene, replace(fault, first=index, times=times)):
            index += 1
