"""A manifest reads back as it was written; anything altered, half or hostile is refused."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math

import msgspec
import pytest

from tests.support.manifests import entry, new_manifest
from trial_core.checkpoint.manifest import Manifest, utc_now
from trial_core.errors import CheckpointDamaged, CheckpointError
from trial_core.schedule.sequencer import Progress


def test_a_manifest_reads_back_as_it_was() -> None:
    """Also as the same bytes, by which a repeated commit is recognised."""
    manifest = new_manifest(
        progress=Progress(11, 7, None, 0.1, True, False),
        files=[entry("b", b"22", 1), entry("a", b"1", 0)],
        hyperparameters={"layers": [1, 2], "deep": {"big": 2**63, "none": None, "s": "ü"}},
    )
    assert manifest.total_bytes == 3
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert Manifest.from_json(manifest.to_json()).to_json() == manifest.to_json()


def test_nan_and_infinities_survive() -> None:
    """The stored text is valid JSON nevertheless."""
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


def test_a_manifest_shows_no_metrics_of_another_batch() -> None:
    """Metrics of an earlier validation stand apart: a comparison cannot take them for its own."""
    latest = {"training": {"loss": 0.9}, "validation": {"loss": 0.1}}
    manifest = new_manifest(60, progress=Progress(60, validated_at=40), metrics=latest)
    assert manifest.metrics == {"training": {"loss": 0.9}}
    assert (manifest.validated_at, manifest.earlier_validation) == (40, {"loss": 0.1})
    own = new_manifest(40, progress=Progress(40, validated_at=40), metrics=latest)
    assert (own.metrics, own.earlier_validation) == (latest, {})
    never = new_manifest(60, progress=Progress(60), metrics=latest)
    assert (never.metrics, never.earlier_validation) == ({"training": {"loss": 0.9}}, {})


def test_a_manifest_of_an_earlier_version_can_be_read() -> None:
    """It stored the latest validation as the checkpoint's own, whatever batch it was of."""
    fields = msgspec.to_builtins(new_manifest(60, progress=Progress(60, validated_at=40)))
    del fields["earlier_validation"]
    fields["metrics"] = {"training": {"loss": 0.9}, "validation": {"loss": 0.1}}
    canonical = msgspec.json.encode(fields, order="sorted")
    fields["digest"] = f"sha256:{hashlib.sha256(canonical).hexdigest()}"
    read = Manifest.from_json(msgspec.json.encode(fields))
    assert read.metrics == {"training": {"loss": 0.9}}
    assert (read.validated_at, read.earlier_validation) == (40, {"loss": 0.1})
    assert Manifest.from_json(read.to_json()) == read


def test_any_flipped_bit_is_found() -> None:
    """No flipped bit of a stored manifest changes what it says."""
    manifest = new_manifest(files=[entry("a")])
    data = manifest.to_json()
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(CheckpointError):
            assert Manifest.from_json(bytes(flipped)) == manifest  # white space has changed


@pytest.mark.parametrize("end", [0, 1, 100, -3])
def test_a_truncated_manifest_is_damaged(end: int) -> None:
    """Wherever it ends."""
    with pytest.raises(CheckpointDamaged, match="the manifest is not a manifest"):
        Manifest.from_json(new_manifest().to_json()[:end])


@pytest.mark.parametrize("data", [b"[]", b"null", b"{}", b"\xff", b"[" * 100_000])
def test_other_files_are_not_manifests(data: bytes) -> None:
    """Any other content raises CheckpointDamaged, and nothing else."""
    with pytest.raises(CheckpointDamaged):
        Manifest.from_json(data)


def test_a_reformatted_manifest_can_be_read() -> None:
    """The digest covers what the manifest says, not its white space or the order of its keys."""
    manifest = new_manifest()
    again = json.dumps(json.loads(manifest.to_json()), sort_keys=True, indent=None)
    assert Manifest.from_json(again.encode()) == manifest


def test_a_newer_schema_is_refused() -> None:
    """The error names both versions."""
    data = new_manifest(schema_version=3).to_json()
    with pytest.raises(CheckpointError, match=r"schema version 3, and this .* up to version 2"):
        Manifest.from_json(data)


@pytest.mark.parametrize("path", ["../../etc/cron.d/x", "/etc/passwd", "manifest.json"])
def test_a_path_outside_the_folder_is_refused(path: str) -> None:
    """A hostile manifest cannot name a file outside the checkpoint's folder."""
    for hostile in (new_manifest(files=[entry(path)]), new_manifest(code=entry(path))):
        with pytest.raises(CheckpointDamaged, match="not a plain relative path"):
            Manifest.from_json(hostile.to_json())


@pytest.mark.parametrize(
    ("paths", "why"), [(["a", "a", "b"], "twice: a$"), (["a/b", "a"], "below another")]
)
def test_conflicting_files_are_refused(paths: list[str], why: str) -> None:
    """A manifest whose files cannot all exist at once is damaged."""
    data = new_manifest(files=[entry(path) for path in paths]).to_json()
    with pytest.raises(CheckpointDamaged, match=why):
        Manifest.from_json(data)


def test_a_value_that_is_not_json_is_refused() -> None:
    """The error names the type of a metric that cannot be stored."""
    with pytest.raises(CheckpointError, match="type object is unsupported"):
        new_manifest(metrics={"training": {"loss": object()}}).to_json()


def test_times_sort_as_text() -> None:
    """All times have the same length."""
    first, second = utc_now(), utc_now()
    assert len(first) == len(second) == 27
    assert first <= second
    Manifest.from_json(new_manifest(created_at=first).to_json())
