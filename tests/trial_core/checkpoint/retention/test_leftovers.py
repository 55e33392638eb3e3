"""Leftovers of trials that never run again are swept; leftovers of trials that may run stay."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.support.interleaving import FailingStore
from tests.support.manifests import FILES, LONG_AGO, keys_of, new_manifest, stored_keys, upload
from trial_core.checkpoint import layout
from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.json_objects import encode_json, user_at_host
from trial_core.checkpoint.manifest import Manifest, utc_now
from trial_core.checkpoint.retention.claims import Claim, RunClaim
from trial_core.checkpoint.retention.leftovers import (
    SweptLeftovers,
    find_leftovers,
    sweep_leftovers,
)
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import ConfigError, StorageError, Superseded
from trial_core.processes.machine.process_identity import this_process

TRIAL = "gpt-0123abcd"
OURS = user_at_host()


def leave_upload(
    store: CheckpointStore, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Manifest, Fence]:
    """Take over the trial and upload a checkpoint, long ago, and do not commit it."""
    with monkeypatch.context() as patch:
        for module in ("fencing", "commit"):
            patch.setattr(f"trial_core.checkpoint.{module}.utc_now", lambda: LONG_AGO)
        manifest = upload(store, staging, trial=TRIAL)
        fence = store.take_over(TRIAL, manifest.writer)
        store.announce_upload(TRIAL, manifest.uuid, manifest.writer, fence)
    return manifest, fence


@pytest.fixture
def lost(
    local_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Manifest, Fence]:
    """A run that died during an upload long ago."""
    return leave_upload(local_store, tmp_path / "lost", monkeypatch)


def test_leftovers_of_a_dead_trial_are_swept(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are shown with their size and the reason, and then deleted."""
    manifest, _ = leave_upload(store, tmp_path / "lost", monkeypatch)
    (found,) = find_leftovers(store)
    assert (found.uuid, found.trial, found.keep) == (manifest.uuid, TRIAL, False)
    assert (found.files, found.size_bytes) == (len(FILES), manifest.total_bytes)
    assert found.begun_at == LONG_AGO
    assert found.why == f"never committed; its trial was last active at {LONG_AGO}"
    told: list[object] = []
    swept = sweep_leftovers(store, [found], on_swept=told.append)
    assert [each.uuid for each in swept.swept] == [manifest.uuid]
    assert told == [*swept.swept]
    assert swept.freed_bytes == manifest.total_bytes
    assert stored_keys(store) == set()
    assert find_leftovers(store) == []


def test_a_swept_run_that_wakes_up_is_superseded(
    local_store: CheckpointStore, lost: tuple[Manifest, Fence]
) -> None:
    """It can neither commit nor announce another upload."""
    manifest, fence = lost
    sweep_leftovers(local_store, find_leftovers(local_store))
    with pytest.raises(Superseded):
        local_store.commit(manifest, fence)
    with pytest.raises(Superseded):
        local_store.announce_upload(TRIAL, manifest.uuid, manifest.writer, fence)
    assert local_store.list() == []


def claim(store: CheckpointStore, manifest: Manifest) -> None:
    RunClaim(store, TRIAL).__enter__()


def attempt(store: CheckpointStore, manifest: Manifest) -> None:
    store.take_over(TRIAL, "another")


def intent(store: CheckpointStore, manifest: Manifest) -> None:
    store.announce_upload(TRIAL, "u", "another")


def half_an_attempt(store: CheckpointStore, manifest: Manifest) -> None:
    store.storage.write(layout.attempt_key(TRIAL, 2), b'{"trial": "gp')


def half_an_intent(store: CheckpointStore, manifest: Manifest) -> None:
    store.storage.write(layout.intent_key(TRIAL, manifest.uuid), b'{"trial": "gp')


@pytest.mark.parametrize("activity", [claim, attempt, intent, half_an_attempt, half_an_intent])
def test_activity_of_the_trial_keeps_leftovers(
    local_store: CheckpointStore,
    lost: tuple[Manifest, Fence],
    activity: Callable[[CheckpointStore, Manifest], None],
) -> None:
    """Also if it comes after the leftovers were listed; and if its time is unreadable."""
    manifest, _ = lost
    before = find_leftovers(local_store)
    activity(local_store, manifest)
    listed = find_leftovers(local_store)
    assert all(each.keep for each in listed)
    assert sweep_leftovers(local_store, listed) == SweptLeftovers((), {})
    swept = sweep_leftovers(local_store, before)
    assert (swept.swept, list(swept.spared)) == ((), [TRIAL])
    assert keys_of([manifest]) - {manifest.name.key} <= stored_keys(local_store)


@pytest.mark.usefixtures("lost")
def test_a_recent_checkpoint_keeps_leftovers(local_store: CheckpointStore, tmp_path: Path) -> None:
    """Its trial may run, also without a claim."""
    local_store.commit(upload(local_store, tmp_path / "saved", trial=TRIAL))
    assert [each.keep for each in find_leftovers(local_store)] == [True]


@pytest.mark.usefixtures("lost")
def test_a_run_that_starts_during_a_sweep_wins(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes over after the sweep has looked; the sweep does not supersede it."""
    found = find_leftovers(local_store)
    fences = []
    create = local_store.storage.create

    def create_second(key: str, data: bytes) -> None:
        monkeypatch.undo()
        fences.append(local_store.take_over(TRIAL, "another"))
        create(key, data)

    monkeypatch.setattr(local_store.storage, "create", create_second)
    swept = sweep_leftovers(local_store, found)
    assert fences[0].is_newest()
    assert "its newest attempt has number 2, expected 1" in swept.spared[TRIAL]


def test_a_committed_checkpoint_is_not_a_leftover(
    local_store: CheckpointStore, lost: tuple[Manifest, Fence]
) -> None:
    """Also if its driver died before it deleted the intent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trial_core.checkpoint.commit._tidy", lambda *_: None)
        local_store.commit(*lost)
    assert find_leftovers(local_store) == []


@pytest.mark.parametrize("is_done", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_next_sweep_finishes_a_failed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    """At whichever request it failed: its own take-over does not count as activity."""
    for nth in itertools.count(1):
        store = CheckpointStore(f"memory://{uuid.uuid4()}")
        leave_upload(store, tmp_path / f"lost-{nth}", monkeypatch)
        failing = FailingStore(store, nth, is_done)
        try:
            sweep_leftovers(failing, find_leftovers(store))
        except StorageError:
            sweep_leftovers(store, find_leftovers(store))
        assert stored_keys(store) == set()
        if not failing.has_failed:
            break
    assert nth > 12


@pytest.mark.usefixtures("lost")
def test_only_the_named_experiment_is_swept(local_store: CheckpointStore) -> None:
    """And trials without checkpoints, which may belong to any experiment."""

    def found(**asked: Any) -> list[str]:
        return [each.trial for each in find_leftovers(local_store, **asked)]

    assert found(experiment="other") == found(trial=TRIAL) == [TRIAL]
    assert found(trial="gpt-0") == []
    saved = {"trial": TRIAL, "experiment": "gpt", "created_at": LONG_AGO}
    local_store.commit(new_manifest(7, **saved))
    assert found(experiment="gpt") == [TRIAL]
    assert found(experiment="other") == []


@pytest.mark.parametrize(
    ("days", "expected"),
    [(0.5, r"at least 1 day, got 0\.5"), (1e9, r"at most .* days, got 1e\+09")],
)
def test_an_age_out_of_range_is_refused(
    local_store: CheckpointStore, days: float, expected: str
) -> None:
    """A short one would delete an upload in progress; no date is so long ago."""
    with pytest.raises(ConfigError, match=expected):
        find_leftovers(local_store, after_days=days)


# --------------------------------------------------------- a driver that is known to have ended

DEAD = "4194303@1"  # no machine has so old a process


def killed(
    store: CheckpointStore, folder: Path, *, by: str = OURS, process: str = DEAD
) -> Manifest:
    """What a run leaves that was just killed during its first upload: also its claim."""
    manifest = upload(store, folder, trial=TRIAL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trial_core.checkpoint.fencing.user_at_host", lambda: by)
        fence = store.take_over(TRIAL, manifest.writer)
    claim = Claim(trial=TRIAL, by=by, at=utc_now(), needs=[], owner="ab", process=process)
    store.storage.write(layout.claim_key(TRIAL, "ab"), encode_json(claim))
    store.announce_upload(TRIAL, manifest.uuid, manifest.writer, fence)
    return manifest


def test_leftovers_of_a_driver_that_has_ended_are_swept_at_once(
    store: CheckpointStore, tmp_path: Path
) -> None:
    """On the machine that tells it; the claim does not keep them, and no age is waited for."""
    manifest = killed(store, tmp_path / "lost")
    (found,) = find_leftovers(store)
    assert not found.keep
    assert found.why.startswith(f"never committed; its driver, {OURS}, has ended; its trial was")
    swept = sweep_leftovers(store, [found])
    assert [each.uuid for each in swept.swept] == [manifest.uuid]
    assert find_leftovers(store) == []
    assert stored_keys(store) == set()


@pytest.mark.parametrize(
    "theirs", [{"by": "ann@far"}, {"process": this_process()}, {"process": f"{DEAD}/boot/1"}]
)
def test_leftovers_of_a_driver_that_may_live_stay(
    local_store: CheckpointStore, tmp_path: Path, theirs: dict[str, str]
) -> None:
    """It lives, or is of another machine, of another container or from before a restart."""
    killed(local_store, tmp_path / "lost", **theirs)
    assert [each.keep for each in find_leftovers(local_store)] == [True]


def attempt_elsewhere(store: CheckpointStore, manifest: Manifest) -> None:
    """By a machine whose clock is behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trial_core.checkpoint.fencing.user_at_host", lambda: "ann@far")
        patch.setattr("trial_core.checkpoint.fencing.utc_now", lambda: LONG_AGO)
        attempt(store, manifest)


@pytest.mark.parametrize("later", [attempt, attempt_elsewhere, half_an_attempt, claim])
def test_a_later_run_than_the_driver_that_has_ended_keeps_leftovers(
    local_store: CheckpointStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    later: Callable[[CheckpointStore, Manifest], None],
) -> None:
    """It may run although it could not write its claim: the older claim says nothing of it."""
    an_hour_ago = datetime.now(timezone.utc) - timedelta(hours=1)
    with monkeypatch.context() as patch:  # a claim of long ago would not count at all
        for module in (__name__, "trial_core.checkpoint.fencing"):
            patch.setattr(f"{module}.utc_now", lambda: f"{an_hour_ago:%Y-%m-%dT%H:%M:%S.%fZ}")
        manifest = killed(local_store, tmp_path / "lost")
    assert [each.keep for each in find_leftovers(local_store)] == [False]
    later(local_store, manifest)
    assert [each.keep for each in find_leftovers(local_store)] == [True]
