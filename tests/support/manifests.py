"""Checkpoints for tests."""

from __future__ import annotations

import hashlib
import uuid as uuids
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trial_core.checkpoint import layout
from trial_core.checkpoint.intents import Intent
from trial_core.checkpoint.json_objects import encode_json
from trial_core.checkpoint.manifest import FileEntry, Manifest, Topology
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.trial_code import upload_code
from trial_core.checkpoint.transfer.upload import upload_files
from trial_core.schedule.sequencer import Progress

LONG_AGO = "2001-05-09T17:04:00.000000Z"
FILES = {
    "mp_rank_00/model states.pt": b"model" * 1000,
    "zero/rank_1[a]*.pt": b"optimizer" * 777,
    "größe/empty": b"",
}


def new_manifest(batches: int = 7, **fields: Any) -> Manifest:
    """The manifest of a new checkpoint, without files."""
    return Manifest(
        **{
            "uuid": str(uuids.uuid4()),
            "trial": "gpt-0123abcd",
            "experiment": "gpt",
            "writer": "attempt-1",
            "created_at": f"2031-05-09T17:04:{batches % 60:02d}.000000Z",
            "progress": Progress(batches_trained=batches),
            "metrics": {"validation": {"loss": 0.25}},
            "topology": Topology(world_size=2, data_parallel_size=2),
            "versions": {"trialflow": "1"},
            "config_digest": "sha256:" + "0" * 64,
            "files": [],
            "entrypoint": "toy_trial:ToyTrial",
            "hyperparameters": {"lr": 0.1},
            **fields,
        }
    )


def stage(folder: Path, files: dict[str, bytes]) -> Path:
    """Write files into a new folder."""
    folder.mkdir(parents=True)
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def upload(
    store: CheckpointStore,
    staging: Path,
    files: dict[str, bytes] = FILES,
    batches: int = 7,
    rank: int = 3,
    **fields: Any,
) -> Manifest:
    """Stage and upload files; the manifest to commit."""
    manifest = new_manifest(batches, **fields)
    entries = upload_files(store, manifest.uuid, stage(staging, files), rank)
    return new_manifest(batches, **fields, uuid=manifest.uuid, files=entries)


def entry(path: str, data: bytes = b"x", rank: int = 0) -> FileEntry:
    """A file's entry in a manifest."""
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    return FileEntry(path=path, size_bytes=len(data), digest=digest, rank=rank)


def put_files(
    store: CheckpointStore, batches: int = 7, files: dict[str, bytes] = FILES, **fields: Any
) -> Manifest:
    """Store a checkpoint's files one by one; the manifest to commit."""
    entries = [entry(path, data) for path, data in files.items()]
    manifest = new_manifest(batches, **{"files": entries, **fields})
    for path, data in files.items():
        store.storage.write(layout.file_key(manifest.uuid, path), data)
    return manifest


def commit_files(store: CheckpointStore, batches: int = 7, **fields: Any) -> Manifest:
    """Store and commit a checkpoint of several files."""
    manifest = put_files(store, batches, **fields)
    store.commit(manifest)
    return manifest


def commit_with_code(
    store: CheckpointStore, batches: int = 7, code: bytes = b"code", **fields: Any
) -> Manifest:
    """Store and commit a checkpoint of several files and its trial's code."""
    uuid = str(uuids.uuid4())
    entry = upload_code(store, uuid, code)
    return commit_files(store, batches, uuid=uuid, code=entry, **fields)


def leave_unfinished_upload(store: CheckpointStore, trial: str, begun_at: str = LONG_AGO) -> str:
    """Leave an intent and a file, as a run that was killed during an upload; return the uuid."""
    intent = Intent(trial=trial, uuid=str(uuids.uuid4()), writer="dead", created_at=begun_at)
    store.storage.write(intent.key, encode_json(intent))
    store.storage.write(layout.file_key(intent.uuid, "model"), b"lost")
    return intent.uuid


def stored_keys(store: CheckpointStore) -> set[str]:
    """All keys of manifests, files, intents and run files."""
    folders = (layout.MANIFESTS, layout.CHECKPOINTS, layout.UPLOADS, layout.RUNS)
    return {key for folder in folders for key in store.storage.sizes(folder)}


def keys_of(manifests: Iterable[Manifest]) -> set[str]:
    """All keys of committed checkpoints."""
    return {
        key
        for each in manifests
        for key in (
            each.name.key,
            *(file.key(each.uuid) for file in each.all_files),
        )
    }


def stored_files(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
