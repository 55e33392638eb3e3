from __future__ import annotations

from pathlib import Path

from trial_core.storage.local_files import read_at


def test_a_read_past_the_end_returns_the_bytes_that_exist(tmp_path: Path) -> None:
    """The caller can tell a short file from a full buffer."""
    (tmp_path / "file").write_bytes(b"0123456789")
    with open(tmp_path / "file", "rb") as file:
        view = memoryview(bytearray(6))
        assert read_at(file.fileno(), 4, view) == 6
        assert bytes(view) == b"456789"
        assert read_at(file.fileno(), 7, view) == 3
