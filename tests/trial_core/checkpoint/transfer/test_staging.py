from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.support.manifests import stage
from trial_core.checkpoint import layout
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.staging import staged_files
from trial_core.checkpoint.transfer.upload import upload_files
from trial_core.errors import CheckpointError


def test_links_are_followed_inside_the_folder_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A broken link, a link out of the folder and a circle are skipped with a warning."""
    staging = stage(tmp_path / "staging", {"a/file": b"1", "b/other": b"2"})
    (tmp_path / "secret").write_bytes(b"3")
    (staging / "latest").symlink_to("a")
    (staging / "a" / "to-b").symlink_to("../b")
    (staging / "b" / "to-a").symlink_to("../a")
    (staging / "dangling").symlink_to("nowhere")
    (staging / "itself").symlink_to("itself")
    (staging / "out").symlink_to("../secret")
    (staging / "up").symlink_to(".")
    with caplog.at_level(logging.WARNING):
        paths = {file.path for file in staged_files(staging, 0)}
    assert paths == {
        "a/file",
        "a/to-b/other",
        "b/other",
        "b/to-a/file",
        "latest/file",
        "latest/to-b/other",
    }
    for skipped in ("dangling", "itself", "out", "up"):
        assert f"staging/{skipped} is a link" in caplog.text


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("manifest.json", "own manifest or code"),
        ("trial-code.tar", "own manifest or code"),
        ("a\\b", "backslash"),
    ],
)
def test_a_name_that_is_not_allowed_is_refused_before_the_upload(
    local_store: CheckpointStore, tmp_path: Path, name: str, why: str
) -> None:
    """Nothing is uploaded if a restore would refuse the name."""
    staging = stage(tmp_path / "staging", {name: b"1", "a": b"2"})
    with pytest.raises(CheckpointError, match=why):
        upload_files(local_store, "u", staging, 0)
    assert local_store.storage.sizes(layout.CHECKPOINTS) == {}
