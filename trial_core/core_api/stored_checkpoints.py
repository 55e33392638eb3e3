"""A script's access to the checkpoints in its storage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import FileEntry, Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.controller.checkpoint_files import CheckpointFiles
from trial_core.controller.collective_errors import run_on_all_ranks
from trial_core.distributed import DistributedContext
from trial_core.errors import StorageError
from trial_core.retention.pruning import delete_checkpoint
from trial_core.transfer.fetch import fetch_files

Selector = Callable[[str], bool]
"""Whether the file at a path below a checkpoint's folder is wanted."""

METADATA = "metadata.json"
"""The file of a checkpoint that holds its metadata, as in Determined's."""


class StoredCheckpoints:
    """Fetches and describes checkpoints.

    Args:
        files: this rank's staged and fetched files.
        sees_storage: whether this process sees the stored objects.
        fetched: uuid of a checkpoint that was fetched before the script began.
    """

    def __init__(
        self,
        files: CheckpointFiles,
        store: CheckpointStore,
        distributed: DistributedContext,
        sees_storage: bool = True,
        fetched: str | None = None,
    ) -> None:
        self._files = files
        self._store = store
        self._distributed = distributed
        self._sees_storage = sees_storage
        self._fetched = {fetched} - {None}

    def fetch(self, uuid: str, alone: bool = False, selector: Selector | None = None) -> Path:
        """Fetch a checkpoint, unless it was fetched; its folder.

        Args:
            uuid: the checkpoint's, or the beginning of it.
            alone: whether this rank alone calls this. If not, it is collective: every rank does.
            selector: the files that this rank wants; None: all. The ranks of a machine share what
                any of them wants.

        Raises:
            CheckpointNotFound: there is none with that uuid.
            CheckpointDamaged: a file is missing or differs.
            StorageError: the storage failed.
        """
        if uuid not in self._fetched:
            self._refuse_unseen(uuid)
            if alone:
                return self._fetch_alone(uuid, selector)
            uuid = self._fetch(uuid, selector)
        return self._files.restored(uuid)

    @property
    def store(self) -> CheckpointStore:
        """The storage."""
        return self._store

    def metadata(self, uuid: str) -> dict[str, Any]:
        """The metadata that was stored with a checkpoint. Not collective.

        Raises:
            CheckpointNotFound: there is none with that uuid.
            CheckpointDamaged: they are too large to be read without a fetch, or its manifest is
                damaged.
            StorageError: the storage failed.
        """
        if uuid in self._fetched:
            path = self._files.restored(uuid) / METADATA
            data = path.read_bytes() if path.is_file() else None
        else:
            self._refuse_unseen(uuid)
            data = self._store.storage.read(layout.file_key(self._store.open(uuid).uuid, METADATA))
        found: dict[str, Any] = json.loads(data or "{}")
        return found

    def delete(self, uuid: str) -> None:
        """Delete a checkpoint from the storage. One rank calls this.

        Raises:
            CheckpointNotFound: there is none with that uuid.
            CheckpointError: it is pinned, or a model's version.
        """
        self._refuse_unseen(uuid)
        delete_checkpoint(self._store, self._store.open(uuid))

    def _fetch(self, uuid: str, selector: Selector | None) -> str:
        opened: list[Manifest] = []

        def choose() -> list[str] | None:
            opened.append(self._store.open(uuid))
            return selector and [each.path for each in _wanted(opened[0], selector)]

        chosen = run_on_all_ranks(self._distributed, choose)
        manifest, here = opened[0], [chosen[rank] for rank in self._distributed.local_ranks]
        paths = {path for each in here for path in each or ()}
        files = [each for each in manifest.files if None in here or each.path in paths]
        # On all ranks: each fetches its share, and raises the error of any.
        run_on_all_ranks(self._distributed, lambda: self._files.fetch(manifest.uuid, files))
        self._files.restored(manifest.uuid).mkdir(parents=True, exist_ok=True)
        if all(each is None for each in chosen):
            self._fetched.add(manifest.uuid)
        return manifest.uuid

    def _fetch_alone(self, uuid: str, selector: Selector | None) -> Path:
        manifest, rank = self._store.open(uuid), self._distributed.get_rank()
        folder = self._files.restored(manifest.uuid).with_name(f"{manifest.uuid}-rank-{rank}")
        folder.mkdir(parents=True, exist_ok=True)
        fetch_files(self._store, manifest.uuid, _wanted(manifest, selector), folder)
        return folder

    def _refuse_unseen(self, uuid: str) -> None:
        if not self._sees_storage:
            raise StorageError(
                f"checkpoint {uuid} is in the memory of another process ({self._store.url}); only "
                "the checkpoint that the run resumes from can be read there"
            )


def _wanted(manifest: Manifest, selector: Selector | None) -> list[FileEntry]:
    return [each for each in manifest.files if selector is None or selector(each.path)]
