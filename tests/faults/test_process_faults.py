"""Processes that save to S3 and are killed by SIGKILL at any of their requests."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.support.faults.plan import Fault, Plan
from tests.support.faults.processes import ForkedSaves
from tests.support.faults.saving import ATTEMPT, TRIAL, check
from tests.support.faults.scene import Scene
from trial_core.transfer.files import upload_files

KILLED = -9
SOME = 5

each_moment = pytest.mark.parametrize(
    "moment", [pytest.param("kill before", marks=pytest.mark.long), "kill after"]
)
Moment = Literal["kill before", "kill after"]


def kill(scene: Scene, saves: ForkedSaves, fault: Fault, rank: int | None = None) -> Plan:
    """Save in a process that is killed when a request meets `fault`; check and sweep."""
    site, uuid, plan = scene.new_site(fault)
    if rank is not None:
        # The driver and the other rank have done their part before.
        site.behind.announce_upload(TRIAL, uuid, ATTEMPT)
        upload_files(site.behind, uuid, scene.staged[1 - rank], 1 - rank)
    scene.endpoint.on_kill = lambda seen: saves.kill()
    code = saves.run(site, scene.staged, uuid, scene.part_bytes, rank)
    scene.endpoint.new_plan()
    assert (code, plan.has_struck) == (KILLED, True), str(plan)
    check(site, uuid, None)
    return plan


def some(scene: Scene, count: int, moment: Moment) -> range:
    """A few indexes of requests, not the same for both moments."""
    step = 2 * SOME if scene.is_real else SOME
    return range(0 if moment == "kill before" else step // 2, count, step)


def of_a_rank(scene: Scene) -> int:
    """Number of requests of rank 1."""
    return sum(seen.client == "rank-1" for seen in scene.clean_save.seen)


@each_moment
def test_a_killed_driver_leaves_only_leftovers(
    s3fs_scene: Scene, saves: ForkedSaves, moment: Moment
) -> None:
    """Killed at some of the save's requests: listed checkpoints are intact, and a sweep deletes the
    rest."""
    for index in some(s3fs_scene, len(s3fs_scene.clean_save.seen), moment):
        kill(s3fs_scene, saves, Fault(moment, first=index))


@each_moment
def test_a_killed_rank_leaves_only_leftovers(
    scene: Scene, saves: ForkedSaves, moment: Moment
) -> None:
    """Killed at some of its requests: nothing is listed, and a sweep deletes everything."""
    for index in some(scene, of_a_rank(scene), moment):
        kill(scene, saves, Fault(moment, first=index), rank=1)


@pytest.mark.faults
@pytest.mark.timeout(1800)
@each_moment
def test_killed_at_any_request(scene: Scene, saves: ForkedSaves, moment: Moment) -> None:
    """At every request of a save, and of a rank."""
    for index in range(len(scene.clean_save.seen)):
        kill(scene, saves, Fault(moment, first=index))
    for index in range(of_a_rank(scene)):
        kill(scene, saves, Fault(moment, first=index), rank=1)
