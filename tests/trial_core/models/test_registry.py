"""The registry: numbered versions, promotions and rollbacks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.support.manifests import new_manifest
from tests.trial_core.models.helpers import (
    MODEL,
    aliases,
    check_log,
    commit,
    held_versions,
    kept_versions,
    new_registry,
    prune_all,
    register,
)
from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ModelNotFound,
    PromotionConflict,
    PromotionRefused,
    RegistryError,
    StorageError,
)
from trial_core.models.registry import ANY, ExpectedChampion, Registry


def test_promotions_and_a_rollback(store: CheckpointStore) -> None:
    """On every kind of storage: versions are numbered, promoted and rolled back; champion and
    previous are held and never pruned, other versions are pruned."""
    registry = new_registry(store, 3)
    assert registry.models() == [MODEL]
    assert [version.number for version in registry.versions(MODEL)] == [1, 2, 3]
    assert registry.champion(MODEL) is None
    for number, expected in ((1, (1, None)), (2, (2, 1)), (3, (3, 2))):
        made = registry.promote(MODEL, number, run="r-1", why="lower loss")
        assert aliases(registry) == (made.champion, made.previous) == expected
        assert held_versions(registry) == {each for each in expected if each is not None}
    registry.rollback(MODEL, why="it stutters")
    assert aliases(registry) == (2, 3)
    assert registry.champion(MODEL) == registry.version(MODEL, 2)
    check_log(registry.moves(MODEL))
    assert [move.number for move in registry.moves(MODEL, after=2)] == [3, 4]
    prune_all(store)
    assert kept_versions(store) == {2, 3}


def test_the_fields_of_a_version(local_store: CheckpointStore) -> None:
    """They describe the checkpoint and its registration."""
    manifest = commit(local_store, 7)
    made = register(local_store, manifest, run="r-1", note="nightly")
    assert Registry(local_store).version(MODEL, 1) == made
    assert (made.checkpoint, made.trial, made.experiment, made.batches_trained) == (
        manifest.uuid, manifest.trial, manifest.experiment, 7,
    )  # fmt: skip
    assert (made.metric, made.smaller_is_better, made.value) == ("loss", True, 0.25)
    assert (made.run, made.note) == ("r-1", "nightly")
    assert made.manifest_key == manifest.name.key


def test_a_checkpoint_has_one_number(local_store: CheckpointStore) -> None:
    """Registering it again, with other fields, returns the existing version."""
    registry = new_registry(local_store, 2)
    manifest = local_store.list()[0]
    assert register(local_store, manifest, value=7.0) == registry.version(MODEL, 1)
    assert len(registry.versions(MODEL)) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_a_value_that_is_not_finite(local_store: CheckpointStore, value: float | None) -> None:
    """It is stored as None: JSON lacks it, and it cannot be compared."""
    made = register(local_store, commit(local_store, 7), value=value)
    assert made.value is None
    assert Registry(local_store).version(MODEL, 1) == made


def test_only_committed_checkpoints_are_registered(local_store: CheckpointStore) -> None:
    """A deleted checkpoint is refused."""
    manifest = commit(local_store, 7)
    local_store.delete(manifest)
    with pytest.raises(CheckpointNotFound, match=manifest.uuid):
        register(local_store, manifest)
    assert Registry(local_store).versions(MODEL) == []


def test_unknown_models_and_versions(local_store: CheckpointStore) -> None:
    """Reading returns nothing; promoting lists what exists."""
    registry = Registry(local_store)
    assert (registry.models(), registry.versions("ghost"), registry.moves("ghost")) == ([], [], [])
    assert (registry.last_move("ghost"), registry.champion("ghost")) == (None, None)
    new_registry(local_store, 2)
    with pytest.raises(ModelNotFound, match=r"no model 'gtp' .* models there: gpt"):
        registry.promote("gtp", 1)
    with pytest.raises(ModelNotFound, match=r"no model 'gtp' .* models there: gpt"):
        registry.rollback("gtp")
    with pytest.raises(ModelNotFound, match="no version 9; its last ones: 1, 2"):
        registry.promote(MODEL, 9)


@pytest.mark.parametrize("name", ["", "../gpt", "a/b", ".gpt", "größe"])
def test_names_that_are_no_key_are_refused(local_store: CheckpointStore, name: str) -> None:
    """The error says which names are valid."""
    with pytest.raises(RegistryError, match="letters and digits"):
        Registry(local_store).versions(name)


def test_another_champion_than_expected(local_store: CheckpointStore) -> None:
    """The error names who promoted which version, when, in which run and why."""
    registry = new_registry(local_store, 3)
    registry.promote(MODEL, 1, expected_champion=None)
    winner = registry.promote(MODEL, 2, run="r-2", why="loss 0.2", expected_champion=1)
    with pytest.raises(PromotionConflict) as refused:
        registry.promote(MODEL, 3, expected_champion=1)
    message = str(refused.value)
    assert "version 3 of model gpt was not promoted" in message
    assert f"{winner.by} promoted version 2 instead of version 1 at {winner.at}" in message
    assert "in run r-2: loss 0.2" in message
    with pytest.raises(PromotionConflict, match="promoted version 2"):
        registry.promote(MODEL, 3, expected_champion=None)
    with pytest.raises(PromotionConflict, match="promoted version 2"):
        registry.rollback(MODEL, expected_champion=1)
    assert aliases(registry) == (2, 1)


def test_an_expected_champion_where_there_is_none(local_store: CheckpointStore) -> None:
    """The error says which was expected."""
    registry = new_registry(local_store, 2)
    with pytest.raises(
        PromotionConflict, match=r"version 1 was expected to be champion, but .* no champion"
    ):
        registry.promote(MODEL, 2, expected_champion=1)


@pytest.mark.parametrize("expected_champion", [1, ANY])
def test_a_move_during_the_verification(
    local_store: CheckpointStore,
    monkeypatch: pytest.MonkeyPatch,
    expected_champion: ExpectedChampion,
) -> None:
    """The promotion succeeds only if it accepts any champion."""
    registry = new_registry(local_store, 3)
    registry.promote(MODEL, 1)
    verify = local_store.verify

    def verify_slowly(uuid: str) -> Manifest:
        monkeypatch.undo()
        registry.promote(MODEL, 2)
        return verify(uuid)

    monkeypatch.setattr(local_store, "verify", verify_slowly)
    if expected_champion is ANY:
        registry.promote(MODEL, 3, expected_champion=expected_champion)
        assert aliases(registry) == (3, 2)
    else:
        with pytest.raises(PromotionConflict, match="promoted version 2 instead of version 1"):
            registry.promote(MODEL, 3, expected_champion=expected_champion)
        assert aliases(registry) == (2, 1)


def test_a_run_may_retry_its_move(local_store: CheckpointStore) -> None:
    """After a crash it gets the move that it has made; nothing is moved twice."""
    registry = new_registry(local_store, 2)
    registry.promote(MODEL, 1)
    made = registry.promote(MODEL, 2, run="r-2", expected_champion=1)
    assert registry.promote(MODEL, 2, run="r-2", expected_champion=1) == made
    back = registry.rollback(MODEL, run="r-3", expected_champion=2)
    assert registry.rollback(MODEL, run="r-3", expected_champion=2) == back
    assert len(registry.moves(MODEL)) == 3


def test_promoting_the_champion_for_another_run_is_a_conflict(local_store: CheckpointStore) -> None:
    """That run compared with an earlier champion."""
    registry = new_registry(local_store, 2)
    registry.promote(MODEL, 1)
    registry.promote(MODEL, 2, run="r-2", expected_champion=1)
    with pytest.raises(PromotionConflict, match="in run r-2"):
        registry.promote(MODEL, 2, run="r-3", expected_champion=1)


def test_promoting_the_champion_changes_nothing(local_store: CheckpointStore) -> None:
    """The existing move is returned, and `previous` stays."""
    registry = new_registry(local_store, 2)
    registry.promote(MODEL, 1)
    made = registry.promote(MODEL, 2)
    assert registry.promote(MODEL, 2) == made
    assert aliases(registry) == (2, 1)


def test_a_rollback_does_not_jump_over_other_moves(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moves since it looked are a conflict, also if the champion is the same again: its previous
    is another one, and the earlier one is no longer held."""
    registry, verify = new_registry(local_store, 3), local_store.verify
    registry.promote(MODEL, 1)
    registry.promote(MODEL, 2)

    def move_and_verify(uuid: str) -> Manifest:
        monkeypatch.setattr(local_store, "verify", verify)
        Registry(CheckpointStore(local_store.url)).promote(MODEL, 3)
        Registry(CheckpointStore(local_store.url)).promote(MODEL, 2)
        return verify(uuid)

    monkeypatch.setattr(local_store, "verify", move_and_verify)
    with pytest.raises(PromotionConflict, match="promoted version 2 instead of version 3"):
        registry.rollback(MODEL)
    assert aliases(registry) == (2, 3)
    assert held_versions(registry) == {2, 3}


def test_a_rollback_needs_a_previous_champion(local_store: CheckpointStore) -> None:
    """The error says what to do instead."""
    registry = new_registry(local_store, 1)
    with pytest.raises(PromotionRefused, match="it has no champion; promote a version"):
        registry.rollback(MODEL)
    registry.promote(MODEL, 1)
    with pytest.raises(PromotionRefused, match="first champion"):
        registry.rollback(MODEL)


def test_a_damaged_checkpoint_does_not_become_champion(local_store: CheckpointStore) -> None:
    """By promotion or rollback: the error names version and file; no hold is left."""
    registry = new_registry(local_store, 3)
    registry.promote(MODEL, 1)
    registry.promote(MODEL, 2)
    for number in (3, 1):
        damaged = registry.version(MODEL, number).checkpoint
        local_store.storage.write(layout.file_key(damaged, "shard"), b"y")
    with pytest.raises(
        CheckpointDamaged, match=r"version 3 of model gpt was not promoted: .*shard"
    ):
        registry.promote(MODEL, 3)
    with pytest.raises(CheckpointDamaged, match=r"version 1 of model gpt was not rolled back to"):
        registry.rollback(MODEL)
    assert aliases(registry) == (2, 1)
    assert held_versions(registry) == {1, 2}


def test_a_pruned_checkpoint_does_not_become_champion(local_store: CheckpointStore) -> None:
    """The error says that the checkpoint was deleted."""
    registry = new_registry(local_store, 1)
    local_store.delete(local_store.list()[0])
    with pytest.raises(CheckpointNotFound, match="version 1 of model gpt was not promoted"):
        registry.promote(MODEL, 1)


def test_foreign_objects_beside_models_are_named(
    local_store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """They are no models, and hide none."""
    registry = new_registry(local_store, 1)
    for key in ("models/notes.txt", "models/my model/versions/000001.json"):
        local_store.storage.write(key, b"{}")
    assert registry.models() == [MODEL]
    for name in ("notes.txt", "my model"):
        assert f"{local_store.url}/models/{name} is ignored" in caplog.text


def test_models_are_independent(local_store: CheckpointStore) -> None:
    """A checkpoint may be a version of two models, each with its own aliases and holds."""
    registry = new_registry(local_store, 2)
    first = local_store.list()[0]
    registry.register("gpt-2", first, metric=None, smaller_is_better=True, value=None)
    registry.promote(MODEL, 1)
    registry.promote("gpt-2", 1)
    registry.promote(MODEL, 2)
    registry.rollback(MODEL)
    assert registry.models() == ["gpt", "gpt-2"]
    assert [str(held) for held in registry.held()[first.uuid]] == [
        "held by model gpt, version 1 (champion)",
        "held by model gpt-2, version 1 (champion)",
    ]


def test_an_altered_object(local_store: CheckpointStore) -> None:
    """The error has the key, the problem and the advice to restore it."""
    registry = new_registry(local_store, 2)
    registry.promote(MODEL, 1)
    key = layout.numbered_key(layout.moves_folder(MODEL), 1)
    local_store.storage.write(key, b'{"number": "one"}')
    with pytest.raises(RegistryError, match=rf"{key} cannot be read.*restore"):
        registry.last_move(MODEL)
    local_store.storage.write(key, b"{}")
    with pytest.raises(RegistryError, match="missing required field"):
        registry.promote(MODEL, 2)


def test_the_layout(tmp_path: Path) -> None:
    """Stored models outlive releases: these keys never change."""
    store = CheckpointStore(str(tmp_path))
    new_registry(store, 1).promote(MODEL, 1)
    hold = next((tmp_path / "pins" / store.list()[0].uuid / MODEL).iterdir()).name
    assert sorted(store.storage.sizes("models")) == [
        "models/gpt/moves/000001.json",
        "models/gpt/versions/000001.json",
    ]
    assert hold.startswith("000001-")
    assert (
        layout.retraining_key("gpt", "f-1", "plan.json") == "models/gpt/retrainings/f-1/plan.json"
    )


def test_a_storage_that_fails(tmp_path: Path) -> None:
    """It is a StorageError."""
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="correct the path"):
        Registry(CheckpointStore(str(tmp_path / "file" / "folder"))).register(
            MODEL, new_manifest(), metric=None, smaller_is_better=True, value=None
        )
