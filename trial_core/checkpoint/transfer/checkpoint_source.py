"""A checkpoint outside a run's storage: downloaded into a folder, or in another storage."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.manifest import FileEntry, Manifest
from trial_core.checkpoint.storage.credentials import without_credentials
from trial_core.checkpoint.storage.storage_errors import ErrorTranslator
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.fetch import check_downloaded, fetch_files
from trial_core.checkpoint.transfer.upload import StagedFile, upload_staged
from trial_core.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, ConfigError

_FILE = "file://"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointSource:
    """The place of a checkpoint: downloaded into a folder, or in a storage."""

    manifest: Manifest
    place: Path | CheckpointStore

    @contextmanager
    def files(self, entries: list[FileEntry]) -> Iterator[Path]:
        """A folder with these files of the checkpoint, verified. Raises CheckpointNotFound if the
        checkpoint was deleted after its manifest was read; CheckpointDamaged if a file is missing
        or differs."""
        if isinstance(self.place, Path):
            check_downloaded(self.place, self.manifest.uuid, entries)
            yield self.place
            return
        with tempfile.TemporaryDirectory(prefix="trialflow-load-") as folder:
            try:
                fetch_files(self.place, self.manifest.uuid, entries, Path(folder))
            except CheckpointDamaged:
                self.place.raise_if_deleted(self.manifest.uuid)
                raise
            yield Path(folder)


def open_checkpoint(
    path: str | os.PathLike[str], beside: CheckpointStore | None = None
) -> CheckpointSource:
    """The checkpoint in a downloaded folder, or at the URL of its folder in a storage. Raises
    CheckpointNotFound if none is there; CheckpointError if `path` is neither such a folder nor such
    a URL.

    `beside`: a storage whose options (endpoint, credentials) a URL of the same protocol needs, too.
    """
    text = os.fspath(path)
    text = text.removeprefix(_FILE).rstrip("/") or "/"
    if "://" not in text:
        text = os.path.abspath(os.path.expanduser(text))
        if os.path.isfile(manifest_path := os.path.join(text, layout.MANIFEST_NAME)):
            with ErrorTranslator(manifest_path).translated("read"):
                data = Path(manifest_path).read_bytes()
            return CheckpointSource(Manifest.from_json(data, manifest_path), Path(text))
    root, _, uuid = text.rpartition("/")
    storage, _, family = root.rpartition("/")
    if family != layout.CHECKPOINTS or not layout.is_uuid(uuid):
        kind = CheckpointError if os.path.isdir(text) or "://" in text else CheckpointNotFound
        raise kind(
            f"{without_credentials(os.fspath(path))} is no checkpoint: expected a folder with a "
            f"{layout.MANIFEST_NAME} (trialflow checkpoints download UUID --to FOLDER), or a URL "
            f"such as s3://bucket/folder/{layout.CHECKPOINTS}/UUID"
        )
    options = None
    if beside is not None and beside.spec.url.partition("://")[0] == storage.partition("://")[0]:
        options = beside.spec.options
    store = CheckpointStore(storage or "/", options)
    return CheckpointSource(store.open(uuid), store)


def is_place(text: str) -> bool:
    """Return whether `text` is a folder or a URL, and not a checkpoint's uuid."""
    return "/" in text or os.path.isdir(text)


def resume_manifest(store: CheckpointStore, place: str) -> Manifest:
    """The manifest of the checkpoint at `place`, which `copy_into` brings to the run's `store`.
    Raises as `open_checkpoint`."""
    source = open_checkpoint(place, store)
    return _in_store(store, source.manifest) or source.manifest


def copy_into(store: CheckpointStore, place: str, fence: Fence | None) -> Manifest:
    """Copy the checkpoint at `place` to the storage of the run that continues its trial.

    Returns the manifest in `store`. Does nothing if it is there. May be repeated after an error.
    `fence`: of the run's attempt; None in test mode, which stores nothing.

    Raises:
        CheckpointDamaged: a file is missing or differs from the manifest.
        ConfigError: the checkpoint is not in `store`, and `fence` is None.
    """
    source = open_checkpoint(place, store)
    manifest = source.manifest
    if (stored := _in_store(store, manifest)) is not None:
        return stored
    if fence is None:
        raise ConfigError(
            "fit(test_mode=True) keeps no checkpoint, so it cannot continue from one in another "
            f"place, {without_credentials(place)}; leave out latest_checkpoint"
        )
    _logger.info("copying checkpoint %s to %s", manifest.uuid, store.url)
    store.announce_upload(manifest.trial, manifest.uuid, fence.attempt, fence)
    with source.files(manifest.all_files) as folder:
        files = [
            StagedFile(path, str(folder / path), entry.size_bytes)
            for entry in manifest.all_files
            for path in [entry.checked_path]
        ]
        uploaded = upload_staged(store, manifest.uuid, files, rank=0)
    # A downloaded file may have changed after it was verified.
    expected = {entry.path: entry.digest for entry in manifest.all_files}
    changed = [entry.checked_path for entry in uploaded if entry.digest != expected[entry.path]]
    if changed:
        raise CheckpointDamaged(
            f"checkpoint {manifest.uuid} is not copied: {', '.join(changed)} changed meanwhile; "
            "download the checkpoint again"
        )
    own = {
        entry.path: msgspec.structs.replace(entry, stored_at="", copy_at="")
        for entry in manifest.all_files
    }
    copied = msgspec.structs.replace(
        manifest,
        writer=fence.attempt,
        files=[own[entry.path] for entry in manifest.files],
        code=None if manifest.code is None else own[manifest.code.path],
    )
    store.commit(copied, fence)
    return copied


def _in_store(store: CheckpointStore, manifest: Manifest) -> Manifest | None:
    try:
        return store.open(manifest.uuid)
    except CheckpointNotFound:
        return None
