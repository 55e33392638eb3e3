from __future__ import annotations

import contextlib
import json
import math

import pytest

from tests.support.manifests import entry, new_manifest
from trial_core.checkpoint.manifest import Manifest, utc_now
from trial_core.errors import CheckpointDamaged, CheckpointError
from trial_core.run.sequencer import Progress


def test_a_manifest_reads_back_as_it_was() -> None:
    """Nothing of a manifest is lost in its JSON."""
    manifest = new_manifest(
        progress=Progress(11, 7, None, 0.1, True, False),
        files=[entry("b", b"22", 1), entry("a", b"1", 0)],
        hyperparameters={"layers": [1, 2], "deep": {"big": 2**63, "none": None, "s": "ü"}},
    )
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_floats_that_json_lacks_survive() -> None:
    """A NaN loss comes back as NaN, infinities as themselves, and the JSON is valid."""
    manifest = new_manifest(
        progress=Progress(best_metric=math.inf),
        metrics={"training": {"loss": math.nan, "each": [-math.inf, "nan"]}},
    )
    data = manifest.to_json()
    json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    read = Manifest.from_json(data)
    assert math.isnan(read.metrics["training"]["loss"])
    assert read.metrics["training"]["each"] == [-math.inf, "nan"]
    assert read.progress.best_metric == math.inf


def test_equal_manifests_give_equal_bytes() -> None:
    """A commit that is tried again is recognised by its bytes."""
    manifest = new_manifest()
    assert Manifest.from_json(manifest.to_json()).to_json() == manifest.to_json()


def test_any_flipped_bit_is_found() -> None:
    """No single bit of a stored manifest can change what it says."""
    manifest = new_manifest(files=[entry("a")])
    data = manifest.to_json()
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(CheckpointError):
            assert Manifest.from_json(bytes(flipped)) == manifest  # a blank for another blank


@pytest.mark.parametrize("end", [0, 1, 100, -3])
def test_a_truncated_manifest_is_damaged(end: int) -> None:
    """A manifest of which a part was written is none."""
    with pytest.raises(CheckpointDamaged, match="the manifest is not a manifest"):
        Manifest.from_json(new_manifest().to_json()[:end])


@pytest.mark.parametrize("data", [b"[]", b"null", b"{}", b"\xff", b"[" * 100_000])
def test_other_files_are_no_manifests(data: bytes) -> None:
    """Whatever lies there, the error is ours."""
    with pytest.raises(CheckpointDamaged):
        Manifest.from_json(data)


def test_reformatting_does_no_harm() -> None:
    """The seal is of what the manifest says, not of its white space or its order."""
    manifest = new_manifest()
    again = json.dumps(json.loads(manifest.to_json()), sort_keys=True, indent=None)
    assert Manifest.from_json(again.encode()) == manifest


def test_a_newer_schema_is_refused() -> None:
    """An old trialflow does not guess what a newer one meant."""
    data = new_manifest(schema_version=2).to_json()
    with pytest.raises(CheckpointError, match="schema version 2, and this trialflow reads up to version 1"):
        Manifest.from_json(data)


@pytest.mark.parametrize("path", ["../../etc/cron.d/x", "/etc/passwd", "manifest.json"])
def test_a_manifest_that_reaches_out_is_refused(path: str) -> None:
    """A hostile manifest cannot name a file outside the checkpoint's folder."""
    data = new_manifest(files=[entry(path)]).to_json()
    with pytest.raises(CheckpointDamaged, match="not a plain relative path"):
        Manifest.from_json(data)


@pytest.mark.parametrize(("paths", "why"), [(["a", "a"], "twice"), (["a/b", "a"], "below another")])
def test_files_that_exclude_each_other_are_refused(paths: list[str], why: str) -> None:
    """A manifest whose files cannot all exist at once is none."""
    data = new_manifest(files=[entry(path) for path in paths]).to_json()
    with pytest.raises(CheckpointDamaged, match=why):
        Manifest.from_json(data)


def test_what_json_cannot_hold_is_named() -> None:
    """A trial that reports an object as a metric learns which kind."""
    with pytest.raises(CheckpointError, match="type object is unsupported"):
        new_manifest(metrics={"training": {"loss": object()}}).to_json()


def test_times_sort_as_text() -> None:
    """The form of a time is fixed, so the later one is the greater text."""
    first, second = utc_now(), utc_now()
    assert len(first) == len(second) == 27
    assert first <= second
    Manifest.from_json(new_manifest(created_at=first).to_json())


def test_total_bytes_counts_every_file() -> None:
    """The size of a checkpoint is that of all ranks' files."""
    assert new_manifest(files=[entry("a", b"123"), entry("b", b"4567", 1)]).total_bytes == 7
