"""The manifest: the object whose existence makes a checkpoint real.

It is one JSON object, readable by anything: the fields of `Manifest`, and ``digest``, which seals
them. A float that JSON has no number for is written ``{"$float": "nan"}`` (or ``inf``, ``-inf``).
The seal is the SHA-256 of the object without ``digest``, keys sorted, without white space, in
UTF-8; so a manifest that was altered is found, and one that was merely reformatted still reads.

Within a schema version fields may be added, with a default; readers ignore what they do not know.
"""

from __future__ import annotations

import hashlib
import math
from datetime import datetime, timezone
from typing import Annotated, Any

import msgspec

from trial_core.checkpoint import layout
from trial_core.errors import CheckpointDamaged, CheckpointError
from trial_core.run.sequencer import Progress
from trial_core.units import EpochLength

SCHEMA_VERSION = 1

_SEAL = "digest"
_FLOAT = "$float"
_VOID = b'{"given_up": '

Digest = Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}$")]
Count = Annotated[int, msgspec.Meta(ge=0)]
Timestamp = Annotated[
    str, msgspec.Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|\+00:00)$")
]


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One of a checkpoint's files.

    Attributes:
        path: relative POSIX path below the checkpoint's folder.
        size_bytes: its size.
        digest: ``sha256:`` and 64 hexadecimal digits.
        rank: the rank that wrote it.
    """

    path: str
    size_bytes: Count
    digest: Digest
    rank: Count


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """Over how many ranks, and how, the state was spread when it was saved.

    Attributes:
        batch_samples: samples in one batch, all ranks together; 0: not known.
    """

    world_size: int
    data_parallel_size: int
    pipeline_parallel_size: int = 1
    model_parallel_size: int = 1
    zero_stage: int = 0
    batch_samples: int = 0

    def spreads_like(self, other: Topology) -> bool:
        """Whether each rank has the same part of the state there: files can be used as they are."""
        return msgspec.structs.replace(self, batch_samples=other.batch_samples) == other


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint is, and what its files must be.

    Attributes:
        uuid: the checkpoint's id.
        trial: id of the trial that saved it.
        experiment: name of its experiment.
        attempt: id of the writer: one attempt at running the trial.
        created_at: when its state was saved: ISO 8601, UTC (see `utc_now`).
        progress: how far the run had come.
        metrics: the last ones as of this checkpoint: ``{"training": {…}, "validation": {…}}``.
        topology: over which ranks the state is spread.
        versions: of what wrote it: ``{"torch": "2.13.0", …}``.
        config_digest: of the experiment's configuration, without storage and environment.
        files: every rank's files.
        entrypoint: the trial's class: ``module:Class``.
        hyperparameters: the trial's.
        epoch: how long one was; None: the training loader had no length, or that was not noted.
        schema_version: of this very structure.
    """

    uuid: str
    trial: str
    experiment: str
    attempt: str
    created_at: Timestamp
    progress: Progress
    metrics: dict[str, dict[str, Any]]
    topology: Topology
    versions: dict[str, str]
    config_digest: str
    files: list[FileEntry]
    entrypoint: str
    hyperparameters: dict[str, Any]
    epoch: EpochLength | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def total_bytes(self) -> int:
        """Size of all files together."""
        return sum(file.size_bytes for file in self.files)

    @property
    def name(self) -> layout.ManifestName:
        """What the manifest's key must say."""
        return layout.ManifestName(self.trial, self.progress.batches_trained, self.uuid)

    def to_json(self) -> bytes:
        """The manifest as it is stored: indented JSON, sealed. Equal manifests give equal bytes.

        Raises:
            CheckpointError: it holds something that JSON cannot, a tensor among the metrics say.
        """
        try:
            fields = msgspec.json.decode(msgspec.json.encode(tagged(msgspec.to_builtins(self))))
        except (TypeError, msgspec.MsgspecError) as error:
            raise CheckpointError(
                f"the manifest of checkpoint {self.uuid} cannot be written as JSON: {error}; "
                "metrics and hyperparameters may hold numbers, strings, booleans, lists and "
                "mappings with string keys"
            ) from error
        sealed = msgspec.json.encode({**fields, _SEAL: _seal(fields)})
        return msgspec.json.format(sealed, indent=2) + b"\n"

    @classmethod
    def from_json(cls, data: bytes, where: str = "the manifest") -> Manifest:
        """Read a stored manifest.

        Args:
            where: what to call it in an error.

        Raises:
            CheckpointDamaged: it is no manifest, was altered, or names files outside its folder.
            CheckpointError: a newer trialflow wrote it.
        """
        try:
            fields = msgspec.json.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointDamaged(f"{where} is no manifest: {error}") from error
        if not isinstance(fields, dict):
            raise CheckpointDamaged(f"{where} is no manifest: not a JSON object")
        version = fields.get("schema_version")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise CheckpointError(
                f"{where} has schema version {version}, and this trialflow reads up to "
                f"{SCHEMA_VERSION}: use the trialflow that wrote it, or a newer one"
            )
        expected = fields.pop(_SEAL, None)
        seen = _seal(fields)
        if expected != seen:
            raise CheckpointDamaged(
                f"{where} was altered after it was written: it says its digest is {expected}, "
                f"but it is {seen}"
            )
        try:
            manifest = msgspec.convert(untagged(fields), cls)
        except msgspec.ValidationError as error:
            raise CheckpointDamaged(f"{where} is no manifest: {error}") from error
        _check_names(manifest, where)
        return manifest


def is_json(data: bytes) -> bool:
    """Whether that is a whole JSON value, as every manifest is."""
    try:
        msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def void(uuid: str) -> bytes:
    """What is stored in a manifest's place while what was uploaded of its checkpoint is deleted: it
    makes no checkpoint, and nobody can commit one there."""
    return _VOID + msgspec.json.encode(uuid) + b"}\n"


def is_void(data: bytes) -> bool:
    """Whether that was stored in a manifest's place."""
    return data.startswith(_VOID)


def utc_now() -> str:
    """The time as a manifest writes it: ``2031-05-09T17:04:00.123456Z``, so that text sorts."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _seal(fields: dict[str, Any]) -> str:
    canonical = msgspec.json.encode(fields, order="sorted")
    return "sha256:" + hashlib.sha256(canonical).hexdigest()


def _check_names(manifest: Manifest, where: str) -> None:
    """Refuse names that would be joined to a path and lead out of it."""
    if not layout.is_name(manifest.trial) or not layout.is_uuid(manifest.uuid):
        raise CheckpointDamaged(
            f"{where} names trial {manifest.trial!r} and checkpoint {manifest.uuid!r}: ids are "
            "made of letters, digits and dashes"
        )
    paths = {file.path for file in manifest.files}
    if len(paths) != len(manifest.files):
        raise CheckpointDamaged(f"{where} lists a file twice")
    for path in sorted(paths):
        if not layout.is_file_path(path) or path == layout.MANIFEST_NAME:
            raise CheckpointDamaged(
                f"{where} lists {path!r}, which is not a plain relative path below the "
                "checkpoint's folder: it may be hostile, do not use it"
            )
        if not paths.isdisjoint(_folders_of(path)):
            raise CheckpointDamaged(f"{where} lists {path!r} below another file")


def _folders_of(path: str) -> list[str]:
    """``a/b/c`` lies in ``a`` and ``a/b``."""
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def tagged(value: Any) -> Any:
    """The same plain data, with floats that JSON lacks written as text under a tag."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    if isinstance(value, dict):
        return {key: tagged(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [tagged(item) for item in value]
    return value


def untagged(value: Any) -> Any:
    """Undo `tagged`."""
    if isinstance(value, dict):
        if set(value) == {_FLOAT} and value[_FLOAT] in ("nan", "inf", "-inf"):
            return float(value[_FLOAT])
        return {key: untagged(item) for key, item in value.items()}
    if isinstance(value, list):
        return [untagged(item) for item in value]
    return value
