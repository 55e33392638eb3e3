"""No key leads out of a storage, and no object outside its folders is listed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from trial_core.checkpoint.storage.base import Storage
from trial_core.checkpoint.storage.open_storage import open_storage
from trial_core.errors import CheckpointError

USES: dict[str, Callable[[Storage, str], object]] = {
    "read": lambda storage, key: storage.read(key),
    "exists": lambda storage, key: storage.exists(key),
    "list": lambda storage, key: storage.sizes(key),
    "write": lambda storage, key: storage.write(key, b"changed"),
    "create": lambda storage, key: storage.create(key, b"changed"),
    "remove": lambda storage, key: storage.remove(key),
    "clear": lambda storage, key: storage.clear(key),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("key", ["../elsewhere", "runs/../../elsewhere", "/elsewhere", "runs/./a"])
def test_a_key_that_leads_out_is_refused(tmp_path: Path, key: str, use: str) -> None:
    """Whatever is asked for: the file outside is not read, and stays."""
    (tmp_path / "elsewhere").write_text("theirs")
    storage = open_storage(f"file://{tmp_path}/store")
    with pytest.raises(CheckpointError, match="would lead out"):
        USES[use](storage, key)
    assert (tmp_path / "elsewhere").read_text() == "theirs"


def test_an_object_whose_name_leads_out_is_not_listed() -> None:
    """An object store may have one."""
    storage = open_storage("memory://keys")
    storage.write("runs/a", b"1")
    fsspec.filesystem("memory").pipe_file("/keys/runs/../b", b"2")
    assert [*storage.sizes("runs")] == ["runs/a"]
