"""A storage whose clock differs from this machine's."""

from __future__ import annotations

from datetime import timedelta

import pytest

from trial_core.checkpoint.storage.base import Storage, StoredObject


def shift_clock(monkeypatch: pytest.MonkeyPatch, storage: Storage, shift: timedelta) -> None:
    """Shift the clock of all storages of that kind. Repeated calls add up."""
    real = type(storage).objects

    def differing(self: Storage, folder: str) -> dict[str, StoredObject]:
        return {
            key: each._replace(modified_at=each.modified_at + shift)
            for key, each in real(self, folder).items()
            if each.modified_at is not None
        }

    monkeypatch.setattr(type(storage), "objects", differing)
