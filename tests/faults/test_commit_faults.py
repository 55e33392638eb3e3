"""A commit whose reply is lost is not mistaken for a conflict, nor the other way round."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tests.support.faults.plan import Fault
from tests.support.faults.saving import ATTEMPT, TRIAL, Site, check
from tests.support.faults.scene import Scene
from tests.support.manifests import new_manifest
from trial_core.checkpoint.manifest import Manifest
from trial_core.errors import CommitConflict, StorageError

COMMIT = Fault("lose reply", method="PUT", key="/manifests/")
READ_BACK = Fault("500", method="GET", key="/manifests/", times=None)


def begun(scene: Scene, *faults: Fault) -> tuple[Site, Manifest]:
    """A checkpoint without files that is about to be committed, with these faults."""
    site, uuid, _ = scene.new_site()
    site.behind.announce_upload(TRIAL, uuid, ATTEMPT)
    scene.endpoint.new_plan(*faults)
    return site, new_manifest(uuid=uuid, trial=TRIAL, writer=ATTEMPT)


@pytest.mark.parametrize("times", [1, pytest.param(None, marks=pytest.mark.long)])
def test_a_lost_reply_is_no_failure(scene: Scene, times: int | None) -> None:
    """The stored manifest shows that the commit has succeeded, also if all retries fail."""
    site, manifest = begun(scene, replace(COMMIT, times=times))
    site.stores()["driver"].commit(manifest)
    check(site, manifest.uuid, manifest)


def test_a_lost_reply_and_a_lost_server_are_a_storage_error(scene: Scene) -> None:
    """Not a conflict. Committing again finds that the commit has succeeded."""
    again = Fault("500", method="PUT", key="/manifests/", first=1, times=None)
    site, manifest = begun(scene, COMMIT, again, READ_BACK)
    assert isinstance(scene.soon(lambda: site.stores()["driver"].commit(manifest)), StorageError)
    scene.endpoint.new_plan()
    assert site.behind.list() == [manifest]
    site.stores()["driver"].commit(manifest)
    check(site, manifest.uuid, manifest)


def test_a_conflict_with_a_lost_reply_is_a_conflict(scene: Scene) -> None:
    """Another attempt has committed before, and its manifest stays."""
    site, manifest = begun(scene, COMMIT)
    winner = msgspec.structs.replace(manifest, writer="attempt-2")
    site.behind.commit(winner)
    with pytest.raises(CommitConflict, match="by another writer than attempt-1"):
        site.stores()["driver"].commit(manifest)
    assert site.behind.list() == [winner]


def test_a_commit_that_never_arrives_is_a_storage_error(scene: Scene) -> None:
    """The request is cut each time, and nothing is stored."""
    site, manifest = begun(
        scene, Fault("cut request", method="PUT", key="/manifests/", times=None, byte=50)
    )
    assert isinstance(scene.soon(lambda: site.stores()["driver"].commit(manifest)), StorageError)
    scene.endpoint.new_plan()
    assert site.behind.list() == []
    check(site, manifest.uuid, None)
