"""`CheckpointContext`: stores, restores and describes checkpoints in a script's own loop."""

from __future__ import annotations

import enum
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from trial_core.checkpoint.json_objects import decode_mapping
from trial_core.checkpoint.manifest import FileEntry, Manifest
from trial_core.checkpoint.retention.pruning import delete_checkpoint
from trial_core.checkpoint.storage.base import MAX_OBJECT_BYTES
from trial_core.checkpoint.storage.local_files import READ_BYTES, atomic_file
from trial_core.checkpoint.transfer.fetch import fetch_files
from trial_core.errors import CheckpointRefused, StorageError, TrialError, TrialValueError
from trial_core.rank.collective_errors import run_on_all_ranks
from trial_core.rank.core_api.script_host import ScriptHost

Selector = Callable[[str], bool]
"""Says if the file at a path below a checkpoint's folder is wanted."""

METADATA = "metadata.json"
"""The file of a checkpoint that holds its metadata, as in Determined's."""


class DownloadMode(enum.Enum):
    """Who fetches a checkpoint.

    Attributes:
        LocalWorkersShareDownload: the ranks of a machine fetch its files once. Every rank calls.
        NoSharedDownload: the calling rank fetches all files for itself.
    """

    LocalWorkersShareDownload = "LOCAL_WORKERS_SHARE_DOWNLOAD"
    NoSharedDownload = "NO_SHARED_DOWNLOAD"


class CheckpointContext:
    """Stores and restores checkpoints. Follows Determined's class."""

    def __init__(self, host: ScriptHost) -> None:
        self._host = host
        self._store = host.files.store
        self._fetched = {host.info.latest_checkpoint} - {None}  # before the script began

    @contextmanager
    def store_path(
        self, metadata: Mapping[str, Any] | None = None, *, shard: bool = False, wait: bool = True
    ) -> Iterator[tuple[Path, str]]:
        """A folder to write a checkpoint into, and the checkpoint's uuid.

        The end of the block uploads the files and commits the checkpoint, and waits for that. A
        block that raises stores nothing. Report a validation before its checkpoint is stored: a
        checkpoint holds the metrics that were reported before.

        Args:
            metadata: plain data; ``steps_completed`` is required. It is stored with the files as
                ``metadata.json``. With `shard`, the metadata of all ranks is merged, even within
                mappings, and a rank may give none.
            shard: True if every rank calls this and writes its own part. If not, rank 0 alone may
                call it.
            wait: True if the end of the block waits. If not, the files are uploaded while the
                script runs, and must not change; the next checkpoint and the script's end wait.

        Raises:
            TrialError: `metadata` has no ``steps_completed``, is not plain data, or is too large,
                or ranks give different values under one name; or a rank other than 0 calls this
                without `shard`.
            CheckpointRefused: ranks have written different files under one name, or what is no
                file. On every rank that stores; the script may go on without this checkpoint. If
                not `wait`, the next call raises it, and stores nothing.
            CheckpointError: the checkpoint could not be stored, and the run ends.
        """
        host, rank = self._host, self._host.distributed.get_rank()
        source = "checkpoint.store_path"
        if not shard and rank != 0:
            raise TrialError(
                f"{source} was called on rank {rank} without shard=True: call it on rank 0 alone "
                "(if context.distributed.rank == 0), or on every rank with shard=True"
            )
        uuid = str(uuid4())
        if shard:
            parts = run_on_all_ranks(host.distributed, lambda: _plain(metadata, source))
            uuid = host.distributed.broadcast(uuid)
        else:
            parts = [_plain(metadata, source)]
        steps_completed, text = _checked(_merged(parts, source), source)
        folder = host.files.staging(uuid)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            yield folder, uuid
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if rank == 0:
            (folder / METADATA).write_text(text)
        try:
            host.commit(uuid, steps_completed, shard, wait)
        except CheckpointRefused:
            shutil.rmtree(folder, ignore_errors=True)  # if the refused one is that before this
            raise

    @contextmanager
    def restore_path(
        self,
        storage_id: str,
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Selector | None = None,
    ) -> Iterator[Path]:
        """The folder of a checkpoint's files, each of them verified.

        Collective, unless `download_mode` says otherwise: every rank calls this.
        `info.latest_checkpoint` is fetched already, so for this one any rank may call it. Ranks
        share the files: do not change them.

        Args:
            storage_id: the checkpoint's uuid, or the beginning of it.
            download_mode: which ranks call this.
            selector: which paths are needed; all by default. Files that a rank of this machine
                needs are fetched. Others may be there too, as for `info.latest_checkpoint`.

        Raises:
            CheckpointNotFound: no such checkpoint exists.
            CheckpointDamaged: a file is missing or differs.
            StorageError: the storage failed.
        """
        alone = DownloadMode(download_mode) is DownloadMode.NoSharedDownload
        if storage_id in self._fetched:
            yield self._host.files.restored(storage_id)
        else:
            self._refuse_unseen(storage_id)
            yield (self._fetch_alone if alone else self._fetch)(storage_id, selector)

    def upload(
        self,
        ckpt_dir: str | os.PathLike[str] | None,
        metadata: Mapping[str, Any] | None = None,
        *,
        shard: bool = False,
        selector: Selector | None = None,
    ) -> str:
        """Store a folder as a checkpoint, as `store_path` does; return its uuid.

        Args:
            ckpt_dir: the folder, which is not changed; None if this rank has nothing to store.
            selector: which of the folder's files to store, by their paths below it; all by default.
                ``metadata.json`` is stored in any case.

        Raises:
            TrialError: as `store_path`; or no rank has a folder, or one has a selector alone.
        """

        def left_out(parent: str, names: list[str]) -> list[str]:
            files = [Path(parent, name) for name in names if not Path(parent, name).is_dir()]
            return [
                file.name for file in files
                if selector and not selector(file.relative_to(str(ckpt_dir)).as_posix())
            ]  # fmt: skip

        def has_folder() -> bool:
            if ckpt_dir is None and (selector is not None or not shard):
                raise TrialError(
                    "checkpoint.upload: ckpt_dir is None; a rank without a folder calls "
                    "upload(None, shard=True), without a selector, beside a rank that has one"
                )
            return ckpt_dir is not None

        ranks = self._host.distributed
        if not (any(run_on_all_ranks(ranks, has_folder)) if shard else has_folder()):
            raise TrialError("checkpoint.upload: ckpt_dir is None on every rank; give a folder")
        with self.store_path(metadata, shard=shard) as (folder, uuid):
            if ckpt_dir is not None:
                shutil.copytree(ckpt_dir, folder, ignore=left_out, dirs_exist_ok=True)
        return uuid

    def download(
        self,
        storage_id: str,
        ckpt_dir: str | os.PathLike[str],
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Selector | None = None,
    ) -> None:
        """Copy a checkpoint's files into a folder, which is created. Call it like `restore_path`.

        Args:
            ckpt_dir: the folder. Several ranks of a machine may name the same one: each replaces
                whole files by equal ones.
            selector: which paths to copy; all by default.
        """
        with self.restore_path(storage_id, download_mode, selector=selector) as folder:
            for path in sorted(each for each in folder.rglob("*") if each.is_file()):
                name = path.relative_to(folder).as_posix()
                if selector is None or selector(name):
                    # Atomic: another rank may already read its copy there.
                    with (
                        path.open("rb") as source,
                        atomic_file(Path(ckpt_dir) / name, is_durable=False) as copy,
                    ):
                        shutil.copyfileobj(source, copy, READ_BYTES)

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        """The metadata that a checkpoint was stored with. Not collective.

        Raises:
            CheckpointNotFound: no such checkpoint exists.
            CheckpointDamaged: the metadata differs from the manifest, is no JSON object, or is too
                large to be read without a fetch, or the manifest is damaged.
            StorageError: the storage failed.
        """
        if storage_id in self._fetched:
            path = self._host.files.restored(storage_id) / METADATA
            data = path.read_bytes() if path.is_file() else None
        else:
            self._refuse_unseen(storage_id)
            data = self._store.read_file(self._store.open(storage_id), METADATA)
        return decode_mapping(data or b"{}", f"{METADATA} of checkpoint {storage_id}")

    def delete(self, storage_id: str) -> None:
        """Delete a checkpoint from the storage. Call it on one rank.

        Raises:
            CheckpointNotFound: no such checkpoint exists.
            CheckpointError: it is pinned, or a model's version.
        """
        self._refuse_unseen(storage_id)
        delete_checkpoint(self._store, self._store.open(storage_id))

    def _fetch(self, uuid: str, selector: Selector | None) -> Path:
        """Fetch the files that any rank of this machine wants; the folder. Collective."""
        opened: list[Manifest] = []

        def choose() -> list[str] | None:
            opened.append(self._store.open(uuid))
            return selector and [each.checked_path for each in _wanted(opened[0], selector)]

        chosen = run_on_all_ranks(self._host.distributed, choose)
        manifest, here = opened[0], [chosen[rank] for rank in self._host.distributed.local_ranks]
        paths = {path for each in here for path in each or ()}
        files = [each for each in manifest.files if None in here or each.path in paths]
        # On all ranks: each fetches its share, and raises the error of any.
        run_on_all_ranks(
            self._host.distributed, lambda: self._host.files.fetch(manifest.uuid, files)
        )
        folder = self._host.files.restored(manifest.uuid)
        folder.mkdir(parents=True, exist_ok=True)
        if all(each is None for each in chosen):
            self._fetched.add(manifest.uuid)
        return folder

    def _fetch_alone(self, uuid: str, selector: Selector | None) -> Path:
        manifest, rank = self._store.open(uuid), self._host.distributed.get_rank()
        folder = self._host.files.restored(manifest.uuid).with_name(f"{manifest.uuid}-rank-{rank}")
        folder.mkdir(parents=True, exist_ok=True)
        fetch_files(self._store, manifest.uuid, _wanted(manifest, selector), folder)
        return folder

    def _refuse_unseen(self, uuid: str) -> None:
        if self._store.is_process_local:
            raise StorageError(
                f"checkpoint {uuid} is in the memory of another process ({self._store.url}); only "
                "the checkpoint that the run resumes from can be read there"
            )


def _wanted(manifest: Manifest, selector: Selector | None) -> list[FileEntry]:
    return [each for each in manifest.files if selector is None or selector(each.checked_path)]


def _plain(metadata: Mapping[str, Any] | None, source: str) -> dict[str, Any]:
    """One rank's metadata, as JSON preserves it."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(metadata or {})))
    except (TypeError, ValueError) as error:
        raise TrialError(f"{source}: metadata is no plain data: {error}") from error
    return plain


def _merged(parts: Sequence[dict[str, Any]], source: str) -> dict[str, Any]:
    """The metadata of all ranks as one."""
    merged: dict[str, Any] = {}
    conflicts: dict[str, list[int]] = {}
    for rank, part in enumerate(parts):
        _merge(merged, part, "", rank, conflicts)
    if conflicts:
        names = ", ".join(
            f'"{name}" of rank {", ".join(map(str, ranks))}' for name, ranks in conflicts.items()
        )
        raise TrialError(
            f"{source}: {names} in metadata differs from what an earlier rank gives; give each "
            "name on one rank, or the same value on all"
        )
    return merged


def _merge(merged: Any, part: Any, path: str, rank: int, conflicts: dict[str, list[int]]) -> None:
    for key, value in part.items():
        known = merged.setdefault(key, value)
        if isinstance(known, dict) and isinstance(value, dict):
            _merge(known, value, f"{path}{key}/", rank, conflicts)
        elif json.dumps(known) != json.dumps(value):  # as JSON: NaN is not equal to itself
            conflicts.setdefault(f"{path}{key}", []).append(rank)


def _checked(given: Mapping[str, Any], source: str) -> tuple[int, str]:
    """The steps that metadata names, and its text."""
    if "steps_completed" not in given:
        raise TrialValueError(
            f'{source}: metadata needs "steps_completed", the steps trained so far: '
            'store_path({"steps_completed": 100})'
        )
    steps_completed = checked_steps(given["steps_completed"], f"{source}: metadata")
    text = json.dumps(given, indent=2)
    if len(text) > MAX_OBJECT_BYTES:  # json.dumps writes ASCII
        raise TrialError(
            f"{source}: metadata has {len(text):,} bytes as JSON, expected at most "
            f"{MAX_OBJECT_BYTES:,}: store more in a file of the checkpoint"
        )
    return steps_completed, text


def checked_steps(value: Any, source: str) -> int:
    """The number of steps that `source` names. Raises TrialError unless it is at least 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TrialError(f"{source}: steps_completed is an integer of at least 0, got {value!r}")
    return value
