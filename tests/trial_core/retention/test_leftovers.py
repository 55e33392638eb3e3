"""What trials that never run again have left goes; what anybody may still be at stays."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import FILES, LONG_AGO, Breaking, new_manifest, upload
from tests.trial_core.checkpoint.test_intents import everything, keys_of
from trial_core.checkpoint import layout
from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import ConfigError, StorageError, Superseded
from trial_core.retention.claims import RunClaim
from trial_core.retention.leftovers import find_leftovers, sweep_leftovers

TRIAL = "gpt-0123abcd"


def left_by_a_dead_run(
    store: CheckpointStore, staging: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any
) -> tuple[Manifest, Fence]:
    """A run that took its trial over long ago, and died in an upload."""
    with monkeypatch.context() as patch:
        for module in ("fencing", "commit"):
            patch.setattr(f"trial_core.checkpoint.{module}.utc_now", lambda: LONG_AGO)
        manifest = upload(store, staging, trial=TRIAL, **fields)
        fence = store.take_over(TRIAL, manifest.attempt)
        store.announce_upload(TRIAL, manifest.uuid, manifest.attempt, fence)
    return manifest, fence


@pytest.fixture
def lost(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Manifest, Fence]:
    return left_by_a_dead_run(store, tmp_path / "lost", monkeypatch)


def test_what_a_dead_trial_has_left_goes(
    store: CheckpointStore, lost: tuple[Manifest, Fence]
) -> None:
    """On every kind of storage: it is shown with its size and why, then it is gone."""
    manifest, _ = lost
    (found,) = find_leftovers(store)
    assert (found.uuid, found.trial, found.keep) == (manifest.uuid, TRIAL, False)
    assert (found.files, found.size_bytes) == (len(FILES), manifest.total_bytes)
    assert found.why == f"never committed; its trial was last active at {LONG_AGO}"
    swept = sweep_leftovers(store, [found])
    assert [each.uuid for each in swept.swept] == [manifest.uuid]
    assert swept.freed_bytes == manifest.total_bytes
    assert everything(store) == set()
    assert find_leftovers(store) == []


def test_one_that_wakes_can_commit_nothing(
    store: CheckpointStore, lost: tuple[Manifest, Fence]
) -> None:
    """It was taken for dead, and is told so, whether it commits or begins anew."""
    manifest, fence = lost
    sweep_leftovers(store, find_leftovers(store))
    with pytest.raises(Superseded):
        store.commit(manifest, fence)
    with pytest.raises(Superseded):
        store.announce_upload(TRIAL, manifest.uuid, manifest.attempt, fence)
    assert store.list() == []


def claim(store: CheckpointStore, manifest: Manifest) -> None:
    RunClaim(store, TRIAL).renew(None)


def attempt(store: CheckpointStore, manifest: Manifest) -> None:
    store.take_over(TRIAL, "another")


def begin(store: CheckpointStore, manifest: Manifest) -> None:
    store.announce_upload(TRIAL, "u", "another")


def half_an_attempt(store: CheckpointStore, manifest: Manifest) -> None:
    store.storage.write(layout.attempt_key(TRIAL, 2), b'{"trial": "gp')


def half_an_intent(store: CheckpointStore, manifest: Manifest) -> None:
    store.storage.write(layout.intent_key(TRIAL, manifest.uuid), b'{"trial": "gp')


ALIVE = (claim, attempt, begin, half_an_attempt, half_an_intent)


@pytest.mark.parametrize("sign", ALIVE)
def test_a_sign_of_life_keeps_it(
    local_store: CheckpointStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sign: Callable[[CheckpointStore, Manifest], None],
) -> None:
    """A claim, a young attempt or upload, and what cannot be read; also where it comes between
    looking and sweeping."""
    manifest, _ = left_by_a_dead_run(local_store, tmp_path / "lost", monkeypatch)
    before = find_leftovers(local_store)
    sign(local_store, manifest)
    assert all(each.keep for each in find_leftovers(local_store))
    swept = sweep_leftovers(local_store, before)
    assert (swept.swept, list(swept.spared)) == ((), [TRIAL])
    assert keys_of(manifest) - {manifest.name.key} <= everything(local_store)


def test_a_young_commit_keeps_it(
    local_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial has saved since, so it runs, though nothing else says so."""
    left_by_a_dead_run(local_store, tmp_path / "lost", monkeypatch)
    local_store.commit(upload(local_store, tmp_path / "saved", trial=TRIAL))
    assert [each.keep for each in find_leftovers(local_store)] == [True]


def test_who_comes_just_then_wins(
    local_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that takes the trial over after it was looked at is not superseded by the sweep."""
    left_by_a_dead_run(local_store, tmp_path / "lost", monkeypatch)
    found = find_leftovers(local_store)
    fences = []
    create = local_store.storage.create

    def create_second(key: str, data: bytes) -> None:
        monkeypatch.undo()
        fences.append(local_store.take_over(TRIAL, "another"))
        create(key, data)

    monkeypatch.setattr(local_store.storage, "create", create_second)
    swept = sweep_leftovers(local_store, found)
    assert fences[0].is_last()
    assert "its newest attempt has number 2, expected 1" in swept.spared[TRIAL]


def test_a_committed_checkpoint_is_none(
    store: CheckpointStore, lost: tuple[Manifest, Fence]
) -> None:
    """Though its writer died before it took its intent back."""
    manifest, fence = lost
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trial_core.checkpoint.commit._tidy", lambda *_: None)
        store.commit(manifest, fence)
    assert find_leftovers(store) == []


@pytest.mark.parametrize("is_done", [False, True])
def test_a_sweep_that_failed_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    """At whatever request it broke off, carried out or not: that it has taken the trial over is no
    sign of life."""
    for nth in itertools.count(1):
        store = CheckpointStore(f"memory://{uuid.uuid4()}")
        left_by_a_dead_run(store, tmp_path / f"lost-{nth}", monkeypatch)
        broken = CheckpointStore(store.url)
        broken.storage = Breaking(broken.storage, nth, is_done)  # type: ignore[assignment]
        found = find_leftovers(store)
        try:
            sweep_leftovers(broken, found)
        except StorageError:
            sweep_leftovers(store, find_leftovers(store))
        assert everything(store) == set()
        if broken.storage.left > 0:  # type: ignore[attr-defined]  # it came through untouched
            break
    assert nth > 12


def test_other_experiments_and_trials_are_left_alone(
    local_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who names an experiment means its trials, and those of which nothing is known."""
    left_by_a_dead_run(local_store, tmp_path / "lost", monkeypatch)

    def found(**asked: Any) -> list[str]:
        return [each.trial for each in find_leftovers(local_store, **asked)]

    assert found(experiment="other") == found(trial=TRIAL) == [TRIAL]
    assert found(trial="gpt-0") == []
    saved = {"trial": TRIAL, "experiment": "gpt", "created_at": LONG_AGO}
    local_store.commit(new_manifest(7, **saved))
    assert found(experiment="gpt") == [TRIAL]
    assert found(experiment="other") == []


def test_an_age_that_an_upload_may_have_is_refused(local_store: CheckpointStore) -> None:
    """Whoever says so would delete what is being uploaded."""
    with pytest.raises(ConfigError, match=r"at least 1 day, got 0\.5"):
        find_leftovers(local_store, after_days=0.5)
