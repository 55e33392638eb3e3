"""Where an export may write."""

from __future__ import annotations

from pathlib import Path

import pytest

from trial_core.errors import ConfigError
from trial_core.export.export_checkpoint import check_target


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
