"""The registry's log beside incomplete and foreign objects."""

from __future__ import annotations

import logging

import pytest

from tests.trial_core.models.helpers import MODEL, new_registry
from trial_core.checkpoint import layout
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import RegistryError
from trial_core.models.registry import Registry


@pytest.mark.parametrize("data", [b"", b'{"number": 2, "model": "gp'])
def test_an_incomplete_move_is_named(local_store: CheckpointStore, data: bytes) -> None:
    """It was altered by hand, or the disk is damaged: the error has its URL, and what to do."""
    registry = new_registry(local_store, 2)
    registry.promote(MODEL, 1)
    local_store.storage.write(layout.numbered_key(layout.moves_folder(MODEL), 2), data)
    with pytest.raises(RegistryError, match=r"moves/000002\.json cannot be read: .*from a backup"):
        Registry(local_store).promote(MODEL, 2)


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
