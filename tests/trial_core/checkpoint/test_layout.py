from __future__ import annotations

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trial_core.checkpoint import layout


def test_the_layout_is_the_one_to_keep() -> None:
    """Stored checkpoints outlive releases: these names never change."""
    assert layout.manifest_key("t-1", 42, "u-2") == "manifests/t-1/0000000042-u-2.json"
    assert layout.file_key("u-2", "zero/0.pt") == "checkpoints/u-2/zero/0.pt"
    assert layout.run_file_key("t-1", "tensorboard/rank-0/e") == "runs/t-1/tensorboard/rank-0/e"


@given(st.from_regex(r"[a-z][a-z0-9-]{0,20}", fullmatch=True), st.integers(0, 10**12), st.uuids())
def test_a_manifests_key_gives_back_what_it_was_made_of(trial: str, n: int, uuid: object) -> None:
    """Listing keys is enough to know trial, batches and uuid."""
    name = layout.ManifestName(trial, n, str(uuid))
    assert layout.parse_manifest_key(name.key) == name


@pytest.mark.parametrize(
    "key",
    [
        "manifests/t/0000000042-u.json.part",
        "manifests/t/42-u.json",
        "manifests/0000000042-u.json",
        "manifests/../0000000042-u.json",
        "manifests/t/deeper/0000000042-u.json",
        "checkpoints/t/0000000042-u.json",
    ],
)
def test_other_keys_are_no_manifests(key: str) -> None:
    """What merely lies beside manifests does not become a checkpoint."""
    assert layout.parse_manifest_key(key) is None


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "..", "a/../../b", "a//b", "a/", "./a", "C:/a", "..\\a", "a\nb", "\udc80"],
)
def test_paths_that_may_lead_out_are_refused(path: str) -> None:
    """A manifest may not name a file outside its folder, on any system."""
    assert not layout.is_file_path(path)


@given(st.text())
def test_an_accepted_path_stays_in_its_folder(path: str) -> None:
    """Whatever text is accepted, joining it does not leave the folder."""
    if layout.is_file_path(path):
        assert posixpath.normpath(f"/folder/{path}") == f"/folder/{path}"
