"""A save on 2 ranks to S3: any request fails.

By default one kind of fault at some kinds of requests, on moto. ``make test-long`` tries every kind
at every single request, and on a real gateway too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tests.support.faults.plan import Fault, Plan
from tests.support.faults.saving import RANKS, Site, check
from tests.support.faults.scene import Scene
from trial_core.checkpoint.manifest import Manifest
from trial_core.errors import StorageError

REQUESTS = {
    "mark": ("PUT", "/trialflow-storage.json"),
    "mark is read": ("GET", "/trialflow-storage.json"),
    "take-over": ("PUT", "/attempts/"),
    "intent": ("PUT", "/uploads/"),
    "small file": ("PUT", "/state/rank-1.pt"),
    "multipart begins": ("POST", "?uploads"),
    "first part": ("PUT", "partNumber=1"),
    "last part": ("PUT", "partNumber=3"),
    "multipart ends": ("POST", "?uploadId="),
    "listing": ("GET", "list-type=2"),
    "commit": ("PUT", "/manifests/"),
    "uploads listed": ("GET", "?uploads"),
    "intent goes": ("DELETE", "/uploads/"),
    "code": ("PUT", "/trial-code.tar"),
}
DEFAULT = ("first part", "commit")
FAULTS = {
    "cut before": Fault("cut request"),
    "cut in the middle": Fault("cut request", byte=100),
    "cut reply": Fault("cut reply", byte=10),
    "lost reply": Fault("lose reply"),
    "500": Fault("500"),
    "503": Fault("503"),
    "hang": Fault("hang"),
    "slow": Fault("slow"),
}
HARD = ("cut before", "500", "503", "hang")
LONG = pytest.mark.long

Scenes = Callable[[str], Scene]


def fault_at(request_kind: str, names: Sequence[str]) -> Fault:
    """One of these kinds of fault, at a kind of request: another one for each."""
    method, key = REQUESTS[request_kind]
    name = names[list(REQUESTS).index(request_kind) % len(names)]
    return replace(FAULTS[name], method=method, key=key)


def fail(scene: Scene, fault: Fault) -> tuple[Site, str, Manifest | StorageError, Plan]:
    """Save with `fault`; the folder, the checkpoint's uuid, the outcome and the plan."""
    site, uuid, plan = scene.new_site(fault)
    outcome = scene.save(site, uuid)
    scene.endpoint.new_plan()
    assert plan.has_struck, f"{fault} met nothing:\n{plan}"
    return site, uuid, outcome, plan


def passes(scene: Scene, fault: Fault) -> None:
    """One request fails: the save succeeds by a retry, or raises in time."""
    site, uuid, outcome, _ = fail(scene, fault)
    check(site, uuid, outcome)


def stays(scene: Scene, fault: Fault) -> None:
    """A request and its retries fail: the save raises and leaves no multipart upload open, except
    one whose begin a client on a slow machine has sent again, or whose abort, after its client has
    given up there, is what fails. If the request only tidies up after the commit, the save
    succeeds."""
    site, uuid, outcome, plan = fail(scene, replace(fault, times=None, is_alike=True))
    met = plan.struck()[0]
    is_tidying = met.method == "DELETE" or (met.method == "GET" and "?uploads" in met.key)
    expected = Manifest if is_tidying and is_after_the_commit(plan, met.index) else StorageError
    assert isinstance(outcome, expected), f"{outcome}\n{plan}"
    assert set(site.multipart_uploads()) <= begun_twice(plan) | not_aborted(plan), str(plan)
    check(site, uuid, outcome)


def begun_twice(plan: Plan) -> set[str]:
    """The keys of which more than one multipart upload was begun."""
    begun = Counter(
        each.key.partition("?")[0].split("/", 2)[2]
        for each in plan.seen
        if each.method == "POST" and each.key.endswith("?uploads") and not each.fault
    )
    return {key for key, times in begun.items() if times > 1}


def not_aborted(plan: Plan) -> set[str]:
    """The keys of which the abort of a multipart upload has met the fault."""
    return {
        each.key.partition("?")[0].split("/", 2)[2]
        for each in plan.struck()
        if each.method == "DELETE" and "?uploadId=" in each.key
    }


def goes_away(scene: Scene, index: int, fault: Fault) -> None:
    """All requests fail from one on: the save raises in time, unless it has committed before. A
    sweep deletes what is left."""
    site, uuid, outcome, plan = fail(scene, replace(fault, first=index, times=None))
    if not is_after_the_commit(plan, plan.struck()[0].index):
        assert isinstance(outcome, StorageError), f"{outcome}\n{plan}"
    check(site, uuid, outcome)


def is_after_the_commit(plan: Plan, index: int) -> bool:
    """Whether the manifest was written before that request."""
    return any("/manifests/" in each.key and each.method == "PUT" for each in plan.seen[:index])


def test_a_save_sends_all_kinds_of_requests(scene: Scene) -> None:
    """Those that the tests below fail. Both ranks send large files in parts; the driver's requests
    are the first and the last."""
    for method, key in REQUESTS.values():
        assert [s for s in scene.clean_save.seen if s.method == method and key in s.key], (
            method,
            key,
        )
    for rank in RANKS:
        sent = [seen.key for seen in scene.clean_save.seen if seen.client == f"rank-{rank}"]
        assert sum("partNumber=" in key for key in sent) == 3
    first, *_, last = scene.clean_save.seen
    assert (first.client, last.client) == ("driver", "driver")


@pytest.mark.parametrize(
    "request_kind",
    [pytest.param(kind, marks=() if kind in DEFAULT else pytest.mark.long) for kind in REQUESTS],
)
def test_a_fault_that_passes(scenes: Scenes, request_kind: str) -> None:
    """At each kind of request, one kind of fault, once."""
    passes(scenes("moto"), fault_at(request_kind, tuple(FAULTS)))


@pytest.mark.parametrize(
    "request_kind",
    ["last part", "commit", *(pytest.param(it, marks=LONG) for it in ("intent", "intent goes"))],
)
def test_a_fault_that_stays(scenes: Scenes, request_kind: str) -> None:
    """At a request and all its retries."""
    stays(scenes("moto"), fault_at(request_kind, HARD))


def test_a_server_that_goes_away(scenes: Scenes) -> None:
    """All requests fail from the commit on."""
    scene, (method, key) = scenes("moto"), REQUESTS["commit"]
    requests = scene.clean_save.seen
    index = next(each.index for each in requests if each.method == method and key in each.key)
    goes_away(scene, index, Fault("500"))


@pytest.mark.parametrize(
    "request_kind", [pytest.param("multipart ends", marks=pytest.mark.long), "commit"]
)
def test_a_failed_save_can_be_repeated(scene: Scene, request_kind: str) -> None:
    """A retried task saves the same checkpoint again, over its leftovers."""
    method, key = REQUESTS[request_kind]
    site, uuid, failed, _ = fail(scene, Fault("500", method=method, key=key, times=None))
    assert isinstance(failed, StorageError)
    outcome = scene.save(site, uuid)
    assert isinstance(outcome, Manifest)
    check(site, uuid, outcome)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_passes_at_any_request(scene: Scene, name: str) -> None:
    """At every request."""
    for seen in scene.clean_save.seen:
        passes(scene, replace(FAULTS[name], first=seen.index))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", HARD)
def test_a_fault_that_stays_at_any_request(scene: Scene, name: str) -> None:
    """At every request."""
    for seen in scene.clean_save.seen:
        stays(scene, replace(FAULTS[name], first=seen.index))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", HARD)
def test_a_server_that_goes_away_at_any_request(scene: Scene, name: str) -> None:
    """At every request."""
    for seen in scene.clean_save.seen:
        goes_away(scene, seen.index, FAULTS[name])
