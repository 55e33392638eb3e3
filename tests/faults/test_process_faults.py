"""Processes that save to S3 and are killed by SIGKILL at any of their requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest

from tests.support.faults.plan import Fault, Plan
from tests.support.faults.processes import ForkedSaves
from tests.support.faults.saving import ATTEMPT, TRIAL, check
from tests.support.faults.scene import Scene
from trial_core.checkpoint.transfer.upload import upload_files

KILLED = -9
SOME = 9

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


def of_a_rank(scene: Scene) -> int:
    """Number of requests of rank 1."""
    return sum(seen.client == "rank-1" for seen in scene.clean_save.seen)


@pytest.mark.long
def test_a_killed_driver_leaves_only_leftovers(
    scenes: Callable[[str], Scene], saves: ForkedSaves
) -> None:
    """Killed at some of the save's requests: listed checkpoints are intact, and a sweep deletes the
    rest."""
    scene = scenes("moto")
    for index in range(0, len(scene.clean_save.seen), SOME):
        kill(scene, saves, Fault("kill after", first=index))


@pytest.mark.long
def test_a_killed_rank_leaves_only_leftovers(
    scenes: Callable[[str], Scene], saves: ForkedSaves
) -> None:
    """Killed at some of its requests: nothing is listed, and a sweep deletes everything."""
    scene = scenes("moto")
    for index in range(0, of_a_rank(scene), SOME // 2):
        kill(scene, saves, Fault("kill before", first=index), rank=1)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("moment", ["kill before", "kill after"])
def test_killed_at_any_request(scene: Scene, saves: ForkedSaves, moment: Moment) -> None:
    """At every request of a save, and of a rank."""
    for index in range(len(scene.clean_save.seen)):
        kill(scene, saves, Fault(moment, first=index))
    for index in range(of_a_rank(scene)):
        kill(scene, saves, Fault(moment, first=index), rank=1)
