"""The registry: versions have numbers, and the aliases are moved one after the other."""

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
    new_registry,
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
from trial_core.models.registry import ANY, InsteadOf, Registry


def test_a_models_story(store: CheckpointStore) -> None:
    """On every kind of storage: versions are counted, promoted and rolled back, and a champion is
    never without its checkpoint's hold."""
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


def test_a_version_says_where_it_comes_from(local_store: CheckpointStore) -> None:
    """All that a person asks of it, without opening the checkpoint."""
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
    """However often it is registered, whatever is said of it then."""
    registry = new_registry(local_store, 2)
    manifest = local_store.list()[0]
    assert register(local_store, manifest, value=7.0) == registry.version(MODEL, 1)
    assert len(registry.versions(MODEL)) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_what_is_no_number_is_no_value(local_store: CheckpointStore, value: float | None) -> None:
    """JSON has no word for it, and nothing is better or worse than it."""
    made = register(local_store, commit(local_store, 7), value=value)
    assert made.value is None
    assert Registry(local_store).version(MODEL, 1) == made


def test_only_what_is_committed_is_registered(local_store: CheckpointStore) -> None:
    """A version without a checkpoint would be found out at its promotion, too late."""
    manifest = commit(local_store, 7)
    local_store.delete(manifest)
    with pytest.raises(CheckpointNotFound, match=manifest.uuid):
        register(local_store, manifest)
    assert Registry(local_store).versions(MODEL) == []


def test_what_is_not_there_is_said(local_store: CheckpointStore) -> None:
    """Questions say that there is nothing; who names something is told which there are."""
    registry = Registry(local_store)
    assert (registry.models(), registry.versions("ghost"), registry.moves("ghost")) == ([], [], [])
    assert (registry.state("ghost"), registry.champion("ghost")) == (None, None)
    new_registry(local_store, 2)
    with pytest.raises(ModelNotFound, match="called 'gtp'; there is: gpt"):
        registry.promote("gtp", 1)
    with pytest.raises(ModelNotFound, match="called 'gtp'; there is: gpt"):
        registry.rollback("gtp")
    with pytest.raises(ModelNotFound, match="no version 9; the last ones are 1, 2"):
        registry.promote(MODEL, 9)


@pytest.mark.parametrize("name", ["", "../gpt", "a/b", ".gpt", "a b", "größe"])
def test_names_that_may_lead_out_are_refused(local_store: CheckpointStore, name: str) -> None:
    """And what is allowed is said."""
    with pytest.raises(RegistryError, match="letters and digits"):
        Registry(local_store).versions(name)


def test_who_was_compared_with_another_champion_is_refused(local_store: CheckpointStore) -> None:
    """The conflict names who has moved the alias, to what, in which run and why."""
    registry = new_registry(local_store, 3)
    registry.promote(MODEL, 1, instead_of=None)
    winner = registry.promote(MODEL, 2, run="r-2", why="loss 0.2", instead_of=1)
    with pytest.raises(PromotionConflict) as refused:
        registry.promote(MODEL, 3, instead_of=1)
    said = str(refused.value)
    assert "version 3 of model gpt was not promoted" in said
    assert f"{winner.by} promoted version 2 instead of version 1 at {winner.at}" in said
    assert "in run r-2: loss 0.2" in said
    with pytest.raises(PromotionConflict, match="promoted version 2"):
        registry.promote(MODEL, 3, instead_of=None)
    with pytest.raises(PromotionConflict, match="promoted version 2"):
        registry.rollback(MODEL, instead_of=1)
    assert aliases(registry) == (2, 1)


def test_a_champion_that_was_expected_and_is_none(local_store: CheckpointStore) -> None:
    """Somebody has compared with what is not there."""
    registry = new_registry(local_store, 2)
    with pytest.raises(PromotionConflict, match="has no champion, and version 1 was expected"):
        registry.promote(MODEL, 2, instead_of=1)


@pytest.mark.parametrize("instead_of", [1, ANY])
def test_another_moves_the_alias_while_a_checkpoint_is_read(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, instead_of: InsteadOf
) -> None:
    """That may take an hour: who does not care whom it replaces succeeds all the same."""
    registry = new_registry(local_store, 3)
    registry.promote(MODEL, 1)
    verify = local_store.verify

    def slowly(uuid: str) -> Manifest:
        monkeypatch.undo()
        registry.promote(MODEL, 2)
        return verify(uuid)

    monkeypatch.setattr(local_store, "verify", slowly)
    if instead_of is ANY:
        registry.promote(MODEL, 3, instead_of=instead_of)
        assert aliases(registry) == (3, 2)
    else:
        with pytest.raises(PromotionConflict, match="promoted version 2 instead of version 1"):
            registry.promote(MODEL, 3, instead_of=instead_of)
        assert aliases(registry) == (2, 1)


def test_a_run_that_asks_again_gets_its_own_move(local_store: CheckpointStore) -> None:
    """As one does that was killed before it heard of its success: nothing is moved twice."""
    registry = new_registry(local_store, 2)
    registry.promote(MODEL, 1)
    made = registry.promote(MODEL, 2, run="r-2", instead_of=1)
    assert registry.promote(MODEL, 2, run="r-2", instead_of=1) == made
    back = registry.rollback(MODEL, run="r-3", instead_of=2)
    assert registry.rollback(MODEL, run="r-3", instead_of=2) == back
    assert len(registry.moves(MODEL)) == 3


def test_another_run_that_promotes_the_champion_is_told(local_store: CheckpointStore) -> None:
    """It was found better than another one, and somebody else has moved the alias."""
    registry = new_registry(local_store, 2)
    registry.promote(MODEL, 1)
    registry.promote(MODEL, 2, run="r-2", instead_of=1)
    with pytest.raises(PromotionConflict, match="in run r-2"):
        registry.promote(MODEL, 2, run="r-3", instead_of=1)


def test_promoting_the_champion_moves_nothing(local_store: CheckpointStore) -> None:
    """A person who is not sure may say it again; previous stays what it was."""
    registry = new_registry(local_store, 2)
    registry.promote(MODEL, 1)
    made = registry.promote(MODEL, 2)
    assert registry.promote(MODEL, 2) == made
    assert aliases(registry) == (2, 1)


def test_without_a_previous_champion_nothing_is_rolled_back(local_store: CheckpointStore) -> None:
    """The reason is said, and what to do instead."""
    registry = new_registry(local_store, 1)
    with pytest.raises(PromotionRefused, match="it has no champion; promote a version"):
        registry.rollback(MODEL)
    registry.promote(MODEL, 1)
    with pytest.raises(PromotionRefused, match="first champion"):
        registry.rollback(MODEL)


def test_what_is_damaged_does_not_become_champion(local_store: CheckpointStore) -> None:
    """Neither promoted nor rolled back to: the version and the file are named, nothing is held."""
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


def test_what_was_pruned_does_not_become_champion(local_store: CheckpointStore) -> None:
    """Its version is there still; that its checkpoint is not, is said."""
    registry = new_registry(local_store, 1)
    local_store.delete(local_store.list()[0])
    with pytest.raises(CheckpointNotFound, match="version 1 of model gpt was not promoted"):
        registry.promote(MODEL, 1)


def test_models_do_not_mix(local_store: CheckpointStore) -> None:
    """A checkpoint may be a version of two models, each with aliases and holds of its own."""
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


def test_an_altered_object_is_said(local_store: CheckpointStore) -> None:
    """Nothing is guessed where somebody has changed what is written once."""
    registry = new_registry(local_store, 2)
    registry.promote(MODEL, 1)
    key = layout.numbered_key(layout.moves_folder(MODEL), 1)
    local_store.storage.write(key, b'{"number": "one"}')
    with pytest.raises(RegistryError, match=rf"{key} cannot be read.*restore"):
        registry.state(MODEL)
    local_store.storage.write(key, b"{}")
    with pytest.raises(RegistryError, match="missing required field"):
        registry.promote(MODEL, 2)


def test_the_layout_is_the_one_to_keep(tmp_path: Path) -> None:
    """Stored models outlive releases: these names never change."""
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


def test_a_storage_that_is_not_there(tmp_path: Path) -> None:
    """A failing storage is a StorageError, as everywhere."""
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="correct the path"):
        Registry(CheckpointStore(str(tmp_path / "file" / "folder"))).register(
            MODEL, new_manifest(), metric=None, smaller_is_better=True, value=None
        )
