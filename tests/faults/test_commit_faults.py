"""The commit, when its reply is lost: told from a race that is lost."""

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
    """A checkpoint without files that is about to be committed while `faults` come in the way."""
    site, uuid, _ = scene.new_site()
    site.behind.announce_upload(TRIAL, uuid, ATTEMPT)
    scene.endpoint.new_plan(*faults)
    return site, new_manifest(uuid=uuid, trial=TRIAL, attempt=ATTEMPT)


@pytest.mark.parametrize("times", [1, None])
def test_a_lost_reply_is_no_failure(s3fs_scene: Scene, times: int | None) -> None:
    """Once, or each time that it is tried again: what is stored tells that the commit was done."""
    site, manifest = begun(s3fs_scene, replace(COMMIT, times=times))
    site.stores()["driver"].commit(manifest)
    check(site, manifest.uuid, manifest)


def test_a_commit_of_which_nothing_more_is_heard(s3fs_scene: Scene) -> None:
    """The reply is lost and the server gone: the storage has failed, nobody else has won; and
    committing again finds that it was done."""
    again = Fault("500", method="PUT", key="/manifests/", first=1, times=None)
    site, manifest = begun(s3fs_scene, COMMIT, again, READ_BACK)
    assert isinstance(
        s3fs_scene.soon(lambda: site.stores()["driver"].commit(manifest)), StorageError
    )
    s3fs_scene.endpoint.new_plan()
    assert site.behind.list() == [manifest]
    site.stores()["driver"].commit(manifest)
    check(site, manifest.uuid, manifest)


def test_a_lost_race_is_a_conflict_although_its_reply_was_lost(s3fs_scene: Scene) -> None:
    """Another attempt had committed: whoever lost the reply is told so, and changes nothing."""
    site, manifest = begun(s3fs_scene, COMMIT)
    winner = msgspec.structs.replace(manifest, attempt="attempt-2")
    site.behind.commit(winner)
    with pytest.raises(CommitConflict, match="by another writer than attempt-1"):
        site.stores()["driver"].commit(manifest)
    assert site.behind.list() == [winner]


def test_a_commit_that_never_arrived_is_no_conflict(s3fs_scene: Scene) -> None:
    """The request is cut each time: nothing is stored, and the storage has failed."""
    site, manifest = begun(
        s3fs_scene, Fault("cut request", method="PUT", key="/manifests/", times=None, byte=50)
    )
    assert isinstance(
        s3fs_scene.soon(lambda: site.stores()["driver"].commit(manifest)), StorageError
    )
    s3fs_scene.endpoint.new_plan()
    assert site.behind.list() == []
    check(site, manifest.uuid, None)
