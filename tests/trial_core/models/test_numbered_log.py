"""The registry's log on a storage that may show incomplete objects, and beside foreign objects."""

from __future__ import annotations

import logging

import pytest

from tests.trial_core.models.helpers import MODEL, aliases, check_log, new_registry
from trial_core.checkpoint import layout
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import PromotionConflict
from trial_core.models.registry import Registry


def test_an_incomplete_move_is_ignored(unknown_store: CheckpointStore) -> None:
    """The move before it is valid, and the next move takes its number."""
    registry = new_registry(unknown_store, 3)
    registry.promote(MODEL, 1)
    key = layout.numbered_key(layout.moves_folder(MODEL), 2)
    for incomplete in (b"", b'{"number": 2, "model": "gp'):
        unknown_store.storage.write(key, incomplete)
        assert aliases(registry) == (1, None)
    registry.promote(MODEL, 2)
    assert aliases(registry) == (2, 1)
    check_log(registry.moves(MODEL))


def test_an_incomplete_version_is_ignored(unknown_store: CheckpointStore) -> None:
    """The next version takes its number."""
    registry = new_registry(unknown_store, 1)
    key = layout.numbered_key(layout.versions_folder(MODEL), 2)
    unknown_store.storage.write(key, b'{"number": 2, "model": "gp')
    new_registry(unknown_store, 1)
    assert [version.number for version in registry.versions(MODEL)] == [1, 2]


def test_an_incomplete_move_on_a_storage_with_conditional_writes(
    local_store: CheckpointStore,
) -> None:
    """It was altered by hand: a promotion fails with the advice to delete it."""
    registry = new_registry(local_store, 2)
    registry.promote(MODEL, 1)
    local_store.storage.write(layout.numbered_key(layout.moves_folder(MODEL), 2), b'{"n')
    with pytest.raises(PromotionConflict, match="that object is incomplete: delete it"):
        Registry(local_store).promote(MODEL, 2)
    assert aliases(registry) == (1, None)


def test_a_foreign_object_is_ignored_with_a_warning(
    local_store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names the object."""
    registry = new_registry(local_store, 1)
    key = f"{layout.versions_folder(MODEL)}/000001 (copy).json"
    local_store.storage.write(key, b"{}")
    with caplog.at_level(logging.WARNING):
        assert [version.number for version in registry.versions(MODEL)] == [1]
    assert f"{local_store.url}/{key} is ignored" in caplog.text
