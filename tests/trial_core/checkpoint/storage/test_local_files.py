from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from trial_core.checkpoint.storage.local_files import atomic_file, read_at


def test_a_read_past_the_end_returns_the_bytes_that_exist(tmp_path: Path) -> None:
    """The caller can tell a short file from a full buffer."""
    (tmp_path / "file").write_bytes(b"0123456789")
    with open(tmp_path / "file", "rb") as file:
        view = memoryview(bytearray(6))
        assert read_at(file.fileno(), 4, view) == 6
        assert bytes(view) == b"456789"
        assert read_at(file.fileno(), 7, view) == 3


def test_a_storage_may_lie_in_a_folder_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On many clusters a user may enter /scratch, but not list it: its name is not synced.

    The folder of the object itself has to be.
    """
    open_it, refused = os.open, tmp_path

    def refuse(path: Any, flags: int, *others: Any, **more: Any) -> int:
        if path == refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_it(path, flags, *others, **more)

    monkeypatch.setattr(os, "open", refuse)
    with atomic_file(tmp_path / "storage" / "object", is_durable=True) as file:
        file.write(b"1")
    assert (tmp_path / "storage" / "object").read_bytes() == b"1"
    refused = tmp_path / "storage"
    with (
        pytest.raises(PermissionError),
        atomic_file(tmp_path / "storage" / "other", is_durable=True) as file,
    ):
        file.write(b"2")
