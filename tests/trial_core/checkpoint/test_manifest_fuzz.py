"""Any bytes are a manifest, or are refused as damaged; a manifest survives its storage."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st

from tests.support.manifests import entry, new_manifest
from tests.support.strategies import changed, fuzz, json_bytes, plain_data, spoilt
from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import Manifest
from trial_core.errors import CheckpointError
from trial_core.schedule.units import EpochLength

MANIFEST = new_manifest(
    uuid="u",
    files=[entry("a/b"), entry("c", rank=1)],
    epoch=EpochLength(micro_batches=10, micro_batches_per_batch=4),
    metrics={"validation": {"loss": float("nan")}},
)
FIELDS = msgspec.json.decode(MANIFEST.to_json())


def sealed(data: bytes) -> bytes:
    """The object with a correct digest, if it is one: a stranger can compute it as well."""
    try:
        fields = msgspec.json.decode(data)
        del fields["digest"]
        canonical = msgspec.json.encode(fields, order="sorted")
        digest = f"sha256:{hashlib.sha256(canonical).hexdigest()}"
        return msgspec.json.encode({**fields, "digest": digest})
    except (KeyError, TypeError, ValueError, RecursionError, OverflowError, msgspec.MsgspecError):
        return data


def check(data: bytes) -> None:
    try:
        manifest = Manifest.from_json(data)
    except CheckpointError:
        return
    again = Manifest.from_json(manifest.to_json())
    assert again.to_json() == manifest.to_json()
    assert layout.parse_manifest_key(manifest.name.key) == manifest.name


@fuzz(60, data=changed(FIELDS).map(json_bytes).map(sealed))
def test_a_manifest_of_a_stranger_is_read_or_refused(data: bytes) -> None:
    """Its digest is correct, its fields are anything."""
    check(data)


@fuzz(30, data=changed(FIELDS, most=1).map(json_bytes).flatmap(spoilt) | st.binary(max_size=40))
def test_a_damaged_manifest_is_refused(data: bytes) -> None:
    """Of whatever bytes it is."""
    check(data)


@pytest.mark.parametrize(
    "field",
    [
        {"hyperparameters": {"a": 2**70}},
        {"hyperparameters": {"a": "<deep 600>"}},
        {"schema_version": 10**30},
        {"progress": {"batches_trained": -5}},
        {"progress": {"batches_trained": 10**18}},
        {"epoch": {"micro_batches": 0, "micro_batches_per_batch": 0}},
    ],
    ids=str,
)
def test_a_value_that_no_run_writes_stops_no_reader(field: dict[str, Any]) -> None:
    """Too long, too deep or out of range."""
    check(sealed(json_bytes({**FIELDS, **field})))


@fuzz(30, hyperparameters=st.dictionaries(st.text(max_size=3), plain_data, max_size=3))
def test_a_manifest_survives(hyperparameters: dict[str, Any]) -> None:
    """Equal fields, equal bytes."""
    manifest = new_manifest(uuid="u", hyperparameters=hyperparameters)
    assert Manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize(
    "value", [{None: 1j}, "\ud800", [10**5000]], ids=["complex", "no UTF-8", "long"]
)
def test_a_value_that_json_lacks_is_refused(value: Any) -> None:
    """The run gets an error that names the checkpoint."""
    with pytest.raises(CheckpointError, match="checkpoint u cannot be written as JSON"):
        new_manifest(uuid="u", hyperparameters={"a": value}).to_json()
