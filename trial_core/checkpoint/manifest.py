"""The manifest: the object whose existence makes a checkpoint real.

A manifest is one JSON object: the fields of `Manifest`, and ``digest``, the SHA-256 of the object
without ``digest``: keys sorted, no white space, UTF-8. So an altered manifest is refused, and a
reformatted one is read. Floats that JSON lacks are written ``{"$float": "nan"}`` (or ``inf``,
``-inf``).

Within a schema version, fields with a default may be added. Readers ignore fields they do not know.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import PurePosixPath
from typing import Annotated, Any

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import encode_json
from trial_core.checkpoint.layout import StoredPath
from trial_core.checkpoint.storage.base import MAX_OBJECT_BYTES
from trial_core.common.decoding import convert
from trial_core.common.text_format import plural
from trial_core.errors import CheckpointDamaged, CheckpointError
from trial_core.schedule.sequencer import Progress
from trial_core.schedule.units import EpochLength

SCHEMA_VERSION = 2

MAX_MANIFEST_BYTES = MAX_OBJECT_BYTES // 2
"""A deletion marker holds a manifest as a JSON string, which has at most twice the bytes."""

_DIGEST = "digest"
_FLOAT = "$float"
_TOMBSTONE = b'{"given_up": '

Digest = Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}$")]
NonNegative = Annotated[int, msgspec.Meta(ge=0, le=layout.MAX_NUMBER)]
Timestamp = Annotated[
    str, msgspec.Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|\+00:00)$")
]


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of a checkpoint's files.

    Attributes:
        path: relative POSIX path below the checkpoint's folder.
        stored_at: ``{uuid}/{path}`` of the earlier checkpoint that has stored the same bytes, which
            may be deleted since; empty if this checkpoint has stored them.
        copy_at: likewise for a second copy of the same bytes; empty if there is none. The next
            checkpoint refers to that copy first.
    """

    path: StoredPath
    size_bytes: NonNegative
    digest: Digest
    rank: NonNegative
    stored_at: StoredPath = StoredPath("")
    copy_at: StoredPath = StoredPath("")

    @property
    def checked_path(self) -> str:
        """The `path` to join to a folder. Raises CheckpointDamaged if it would leave the folder."""
        return layout.checked_path(self.path)

    def place(self, uuid: str) -> tuple[str, str]:
        """The checkpoint that has stored this file of checkpoint `uuid`, and its path there. Raises
        CheckpointDamaged if they are not plain."""
        return layout.checked_place(self.stored_at) if self.stored_at else (uuid, self.checked_path)

    def key(self, uuid: str) -> str:
        return layout.file_key(*self.place(uuid))

    @property
    def copies(self) -> list[FileEntry]:
        """This entry, and one for the second copy, if there is one."""
        second = msgspec.structs.replace(self, stored_at=self.copy_at, copy_at=StoredPath(""))
        return [self, second] if self.copy_at else [self]


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks divided the state when it was saved.

    Attributes:
        sequence_parallel_size: ranks that divide each sequence, and hold the same model.
        batch_samples: samples in one batch on all ranks; 0 if not known.
        micro_batch_samples: samples in one micro-batch of a rank, with DeepSpeed; 0 if not known.
        sharding: how a PyTorchTrial's models are divided: "none", "fsdp2", or "fsdp2 2x4" over a
            device mesh of the trial's own.
    """

    world_size: int
    data_parallel_size: int
    pipeline_parallel_size: int = 1
    model_parallel_size: int = 1
    sequence_parallel_size: int = 1
    zero_stage: int = 0
    batch_samples: int = 0
    micro_batch_samples: int = 0
    sharding: Annotated[str, msgspec.Meta(pattern="^[a-z0-9 ]{1,40}$")] = "none"

    @property
    def is_state_divided(self) -> bool:
        """True if the ranks divide the state of models or optimizers."""
        return self.zero_stage > 0 or self.sharding != "none"

    @property
    def state_division(self) -> str:
        """How the ranks divide the state of models and optimizers, for people."""
        if self.sharding != "none":
            return self.sharding.replace("fsdp", "FSDP")
        return f"ZeRO stage {self.zero_stage}" if self.zero_stage else "not sharded"

    @property
    def description(self) -> str:
        """``4 ranks (2 data-parallel, 2 pipeline stages, ZeRO stage 1), 16 samples a batch``,
        without what the trial does not use or does not tell."""
        parts = [
            f"{self.data_parallel_size} data-parallel",
            f"{self.pipeline_parallel_size} pipeline stages",
            f"{self.model_parallel_size} model-parallel",
            f"{self.sequence_parallel_size} sequence-parallel",
        ]
        shown = [part for part in parts if not part.startswith("1 ")]
        if self.is_state_divided:
            shown.append(self.state_division)
        ranks = plural(self.world_size, "rank") + (f" ({', '.join(shown)})" if shown else "")
        if not self.batch_samples:
            return ranks
        return f"{ranks}, {plural(self.batch_samples, 'sample')} a batch"

    def spreads_like(self, other: Topology) -> bool:
        """Return whether each rank holds the same part of the state, so no file is converted."""
        sizes = {name: getattr(other, name) for name in ("batch_samples", "micro_batch_samples")}
        return msgspec.structs.replace(self, **sizes) == other


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a checkpoint, with its files.

    Attributes:
        writer: a random id of the launch of ranks that saved it; ``attempt`` in the file.
        created_at: time of the snapshot: ISO 8601, UTC (see `utc_now`).
        progress: the trial's progress at the snapshot.
        metrics: metrics of this very state: ``{"training": {…}, "validation": {…}}``. Without
            ``validation`` if the checkpoint's own batch was not validated.
        versions: versions of the software that saved it: ``{"torch": "2.13.0", …}``.
        config_digest: digest of the experiment's configuration, without storage and environment.
        entrypoint: the trial's class: ``module:Class``; or a script's command, without the values
            of its options if the script started the run.
        epoch: length of an epoch; None if the training loader had none, or it was not recorded.
        earlier_validation: metrics of the last validation, at batch `validated_at`, if that is an
            earlier batch than the checkpoint's. Never compare them as the checkpoint's own.
        code: the archive of the trial's code, one more file; None without a code folder.
        config: the experiment's configuration that `config_digest` covers; empty if not recorded.
        environment_digest: digest of the ranks' environment variables; empty if not recorded.
        changes: what people have changed at resumes of the trial, and which values counted: a text
            for each, the newest last.
    """

    uuid: str
    trial: str
    experiment: str
    writer: str = msgspec.field(name="attempt")
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
    earlier_validation: dict[str, Any] = {}
    code: FileEntry | None = None
    config: dict[str, Any] = {}
    environment_digest: str = ""
    changes: list[str] = []
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        """Move the last validation out of `metrics` if it was of an earlier batch: a run passes its
        latest metrics."""
        if self.is_validated or "validation" not in self.metrics:
            return
        own = {kind: values for kind, values in self.metrics.items() if kind != "validation"}
        earlier = self.metrics["validation"] if self.validated_at is not None else {}
        msgspec.structs.force_setattr(self, "metrics", own)
        msgspec.structs.force_setattr(self, "earlier_validation", earlier)

    @property
    def validated_at(self) -> int | None:
        return self.progress.validated_at

    @property
    def is_validated(self) -> bool:
        """True if the checkpoint's own batch was validated."""
        return self.validated_at == self.progress.batches_trained

    @property
    def last_validation(self) -> dict[str, Any]:
        """Metrics of the last validation, at batch `validated_at`, whichever batch that is."""
        return self.metrics.get("validation", {}) if self.is_validated else self.earlier_validation

    @property
    def all_files(self) -> list[FileEntry]:
        """The files of all ranks, and the code."""
        return [*self.files, self.code] if self.code is not None else self.files

    @property
    def copies(self) -> list[FileEntry]:
        """`all_files`, and an entry for each second copy."""
        return [copy for file in self.all_files for copy in file.copies]

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.all_files)

    @property
    def own_bytes(self) -> int:
        """Total size of the files that this checkpoint has stored itself."""
        return sum(file.size_bytes for file in self.all_files if not file.stored_at)

    def file(self, path: str) -> FileEntry | None:
        return next((file for file in self.all_files if file.path == path), None)

    @property
    def name(self) -> layout.ManifestName:
        return layout.ManifestName(self.trial, self.progress.batches_trained, self.uuid)

    @property
    def resume_order(self) -> tuple[int, str, str]:
        """Sort key: a run resumes from the greatest. Most batches first, then the newest."""
        return self.progress.batches_trained, self.created_at, self.uuid

    @property
    def digest(self) -> str:
        """The digest in the stored object. Raises as `to_json`."""
        sealed: str = msgspec.json.decode(self.to_json())[_DIGEST]
        return sealed

    def to_json(self) -> bytes:
        """The bytes to store: indented JSON with its digest. Equal manifests give equal bytes.
        Raises CheckpointError if a value, for example a tensor, cannot be written as JSON."""
        try:
            fields = msgspec.json.decode(msgspec.json.encode(tagged(msgspec.to_builtins(self))))
        except (
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
            msgspec.MsgspecError,
        ) as error:
            raise CheckpointError(
                f"the manifest of checkpoint {self.uuid} cannot be written as JSON: {error}; "
                "metrics and hyperparameters may hold numbers, strings, booleans, lists and "
                "mappings with string keys"
            ) from error
        return encode_json({**fields, _DIGEST: _digest_of(fields)})

    @classmethod
    def from_json(cls, data: bytes, where: str = "the manifest") -> Manifest:
        """Read a stored manifest, which errors call `where`. Raises CheckpointDamaged if it is not
        one, too large, altered, or lists files outside its folder; CheckpointError if a newer
        trialflow wrote it."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise CheckpointDamaged(
                f"{where} has {len(data):,} bytes, expected at most {MAX_MANIFEST_BYTES:,}: a "
                "checkpoint may have fewer files, and smaller metrics and hyperparameters"
            )
        with _damaged_if_unreadable(where):
            fields = msgspec.json.decode(data)
        if not isinstance(fields, dict):
            raise CheckpointDamaged(f"{where} is not a manifest: it is not a JSON object")
        version = fields.get("schema_version")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise CheckpointError(
                f"{where} has schema version {version}, and this trialflow reads up to version "
                f"{SCHEMA_VERSION}: use the trialflow that wrote it, or a newer one"
            )
        expected = fields.pop(_DIGEST, None)
        with _damaged_if_unreadable(where):
            seen = _digest_of(fields)
        if expected != seen:
            raise CheckpointDamaged(
                f"{where} was altered after it was written: its digest is {seen}, expected "
                f"{expected}; restore it from a backup, or use another checkpoint"
            )
        with _damaged_if_unreadable(where):
            manifest = convert(untagged(fields), cls)
        _check_names(manifest, where)
        return manifest


def tombstone(uuid: str) -> bytes:
    """What a sweep creates under a manifest's key, so that the checkpoint cannot be committed."""
    return _TOMBSTONE + msgspec.json.encode(uuid) + b"}\n"


def is_tombstone(data: bytes) -> bool:
    return data.startswith(_TOMBSTONE)


def utc_now() -> str:
    """The current time as in manifests: ``2031-05-09T17:04:00.123456Z``. Sorts as text."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@contextmanager
def _damaged_if_unreadable(where: str) -> Iterator[None]:
    try:
        yield
    # Too long integers overflow when they are digested; too deep values exceed Python's stack.
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise CheckpointDamaged(f"{where} is not a manifest: {error}") from error


def _digest_of(fields: dict[str, Any]) -> str:
    canonical = msgspec.json.encode(fields, order="sorted")
    return "sha256:" + hashlib.sha256(canonical).hexdigest()


def _check_names(manifest: Manifest, where: str) -> None:
    """Refuse names that would lead out of the folder that they are joined to."""
    if not layout.is_name(manifest.trial) or not layout.is_uuid(manifest.uuid):
        raise CheckpointDamaged(
            f"{where} names trial {manifest.trial!r} and checkpoint {manifest.uuid!r}; expected "
            "letters, digits and dashes: do not use it"
        )
    if layout.parse_manifest_key(manifest.name.key) != manifest.name:
        raise CheckpointDamaged(
            f"{where} has {manifest.progress.batches_trained} batches trained; expected 0 to "
            f"{layout.MAX_NUMBER}"
        )
    try:
        for copy in manifest.copies:
            copy.place(manifest.uuid)
        paths = Counter(file.checked_path for file in manifest.all_files)
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"{where}: {error}") from None
    if twice := sorted(path for path, count in paths.items() if count > 1):
        raise CheckpointDamaged(f"{where} lists these files twice: {', '.join(twice)}")
    for path in sorted(paths):
        if not paths.keys().isdisjoint(map(str, PurePosixPath(path).parents)):
            raise CheckpointDamaged(f"{where} lists {path!r} below another file of its list")


def tagged(value: Any) -> Any:
    """The same plain data, with NaN and infinities as tagged text."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    if isinstance(value, dict):
        return {key: tagged(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [tagged(item) for item in value]
    return value


def untagged(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {_FLOAT} and value[_FLOAT] in ("nan", "inf", "-inf"):
            return float(value[_FLOAT])
        return {key: untagged(item) for key, item in value.items()}
    if isinstance(value, list):
        return [untagged(item) for item in value]
    return value
