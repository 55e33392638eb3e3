"""Where an export may write."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from trial_core.errors import ConfigError
from trial_core.export.export_checkpoint import MARK, check_target


@pytest.mark.parametrize("to", [".", "..", "{here}"])
def test_the_working_folder_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """Nor one above it: the shell would be left in a deleted folder."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with pytest.raises(ConfigError, match="is the working folder, or above it"):
        check_target(Path(to.format(here=here)), "hf", force=False)
    check_target(Path("new"), "hf", force=False)


def test_a_link_is_not_replaced(tmp_path: Path) -> None:
    """Before the checkpoint is fetched, not after it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "model")
    with pytest.raises(ConfigError, match="is a symbolic link"):
        check_target(tmp_path / "link", "hf", force=True)


@pytest.mark.parametrize("name", [".git/HEAD", "notes.md"])
def test_what_was_added_to_an_export_is_an_obstacle(tmp_path: Path, name: str) -> None:
    """A repository, as one that is pushed to a hub has, is not deleted with the export."""
    mark = {"checkpoint": "u", "trial": "t", "batches": 7, "format": "hf", "files": ["a"]}
    (tmp_path / "a").write_text("exported")
    (tmp_path / MARK).write_bytes(msgspec.json.encode(mark))
    check_target(tmp_path, "hf", force=True)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("own")
    with pytest.raises(ConfigError, match=f"holds more than the export .*: {name};"):
        check_target(tmp_path, "hf", force=True)
