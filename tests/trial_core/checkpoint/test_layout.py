"""Keys are stable, and can be parsed; names cannot lead out of their folders."""

from __future__ import annotations

import posixpath
from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from trial_core.checkpoint import layout
from trial_core.errors import CheckpointError, RegistryError


def test_keys_never_change() -> None:
    """Stored checkpoints outlive releases."""
    assert layout.manifest_key("t-1", 42, "u-2") == "manifests/t-1/0000000042-u-2.json"
    assert layout.file_key("u-2", "zero/0.pt") == "checkpoints/u-2/zero/0.pt"
    assert layout.intent_key("t-1", "u-2") == "uploads/t-1/u-2.json"
    assert layout.attempt_key("t-1", 7) == "attempts/t-1/000007.json"
    assert layout.claim_key("t-1", "0a") == "claims/t-1/0a.json"
    assert layout.claim_key("t-1") == "claims/t-1.json"
    for name in (layout.ClaimName("t-1", "0a"), layout.ClaimName("t-1")):
        assert layout.parse_claim_key(layout.claim_key(*name)) == name
    assert layout.damage_key("u-2", "zero/0.pt") == "damages/u-2/zero/0.pt.json"
    protections = {
        "pins/u-2/pin.json": layout.ProtectionName("u-2"),
        "pins/u-2/pin-0a.json": layout.ProtectionName("u-2", unique="0a"),
        "pins/u-2/gpt/000007-0a.json": layout.ProtectionName("u-2", "hold", "gpt", 7, "0a"),
    }
    for key, protection in protections.items():
        assert (protection.key, layout.parse_protection_key(key)) == (key, protection)
    assert layout.deletion_key("u-2", "0a") == "deletions/u-2/0a.json"
    assert layout.parse_deletion_key("deletions/u-2/0a.json") == "u-2"
    assert layout.run_file_key("t-1", "tensorboard/rank-0/e") == "runs/t-1/tensorboard/rank-0/e"


@settings(max_examples=25)
@given(st.from_regex(r"[a-z][a-z0-9-]{0,20}", fullmatch=True), st.integers(0, 10**12), st.uuids())
def test_a_manifest_key_can_be_parsed(trial: str, n: int, uuid: object) -> None:
    """A listing of keys is enough to know trial, batches and uuid."""
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
def test_other_keys_are_not_manifests(key: str) -> None:
    """A file beside manifests does not become a checkpoint."""
    assert layout.parse_manifest_key(key) is None


def test_a_number_is_of_its_folder_alone() -> None:
    """Another trial's attempt, or an object in a folder within, is no attempt at this one."""
    folder = layout.attempts_folder("t-1")
    assert layout.parse_numbered_key(folder, layout.attempt_key("t-1", 7)) == 7
    for key in (layout.attempt_key("t-2", 7), f"{folder}/deeper/000007.json", f"{folder}/7.txt"):
        assert layout.parse_numbered_key(folder, key) is None


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "..", "a/../../b", "a//b", "a/", "./a", "C:/a", "..\\a", "a\nb", "\udc80"],
)
def test_paths_that_may_leave_the_folder_are_refused(path: str) -> None:
    """On POSIX and on Windows."""
    assert not layout.is_file_path(path)


OUTSIDE = ["", ".", "..", "../project", "/etc", "a/b", "a\\b", "a\n", "ä", "a" * 201]
KEYS_OF_A_MODEL: list[Callable[[str], str]] = [
    layout.model_folder, lambda model: layout.ProtectionName("u", "hold", model, 1, "a").key,
    lambda run: layout.retraining_key("m", run, "path"),
]  # fmt: skip
KEYS_OF_A_TRIAL: list[Callable[[str], str]] = [
    layout.trial_folder, layout.intents_folder, layout.attempts_folder, layout.claim_key,
    layout.run_folder,
]  # fmt: skip
KEYS_OF_A_CHECKPOINT: list[Callable[[str], str]] = [
    layout.files_folder, layout.protections_folder, layout.deletions_folder, layout.damages_folder,
    lambda uuid: layout.manifest_key("t", 1, uuid), lambda uuid: layout.intent_key("t", uuid),
]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_key_is_made_of_a_name_that_leads_out_of_its_folder(name: str) -> None:
    """The names of trials, checkpoints and models come from users and from stored objects."""
    for key_of in (*KEYS_OF_A_TRIAL, *KEYS_OF_A_CHECKPOINT):
        with pytest.raises(CheckpointError, match="expected up to"):
            key_of(name)
    for key_of in KEYS_OF_A_MODEL:
        with pytest.raises(RegistryError, match="expected up to 200 letters and digits"):
            key_of(name)


@settings(max_examples=25)
@given(st.text())
def test_an_accepted_path_stays_in_its_folder(path: str) -> None:
    """For any text."""
    if layout.is_file_path(path):
        assert posixpath.normpath(f"/folder/{path}") == f"/folder/{path}"
