"""Any key is read without an exception, and what it says makes the same key again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.support.strategies import TEXTS, fuzz
from trial_core.checkpoint import layout

PARTS = [
    *(text for text in TEXTS if len(text) < 400), "gpt-1", "a.b", "u", "0000000007-u", "000007",
    "0000007", "00000000007-u", "9" * 18, "9" * 19, "1" * 5000, "000001-u", "versions", "0000001-u",
    "pin",
]  # fmt: skip
FAMILIES: list[tuple[Callable[[str], Any], Callable[[Any], str]]] = [
    (layout.parse_manifest_key, lambda name: name.key),
    (layout.parse_intent_key, lambda name: layout.intent_key(*name)),
    (layout.parse_claim_key, lambda name: layout.claim_key(*name)),
    (layout.parse_protection_key, lambda name: name.key),
]
FOLDERS = ["manifests", "uploads", "claims", "pins", "deletions", "attempts", "models"]
keys = st.builds(
    lambda folder, parts, ending: "/".join([folder, *parts]) + ending,
    st.sampled_from(FOLDERS),
    st.lists(st.sampled_from(PARTS) | st.text(max_size=4), min_size=1, max_size=3),
    st.sampled_from([".json", ".json", ".json", ""]),
)


def check_key(key: str) -> None:
    for parse, make in FAMILIES:
        name = parse(key)
        assert name is None or make(name) == key
    folder, _, _ = key.rpartition("/")
    number = layout.parse_numbered_key(folder, key)
    assert number is None or layout.numbered_key(folder, number) == key
    uuid = layout.parse_deletion_key(key)
    assert uuid is None or key.startswith(f"{layout.deletions_folder(uuid)}/")


@fuzz(60, key=keys)
def test_a_key_says_what_it_is_made_of(key: str) -> None:
    """No two keys have one name: one of them would hide the other."""
    check_key(key)


@pytest.mark.parametrize(
    "key",
    [
        "manifests/gpt/00000000007-u.json",
        "attempts/gpt/0000007.json",
        f"attempts/gpt/{'9' * 5000}.json",
        "pins/u/gpt/0000001-x.json",
        "pins/a_b/gpt/000001-x.json",
        "pins/u/../000001-x.json",
    ],
    ids=lambda key: key[:40],
)
def test_a_key_that_trialflow_does_not_make_says_nothing(key: str) -> None:
    """An extra zero, too many digits, or a name that no uuid and no model has."""
    check_key(key)
