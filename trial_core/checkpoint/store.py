"""The checkpoints in a storage: commit them, list them, find them.

A checkpoint exists when its manifest does. The manifest is written last, once and create-only,
after every file it lists is known to be there; whatever else lies in the storage counts for
nothing. A manifest that cannot be read is never listed.
"""

from __future__ import annotations

import itertools
import logging
import uuid as uuids
from collections.abc import Iterable, Mapping
from typing import Any

from trial_core.checkpoint import layout
from trial_core.checkpoint.commit import announce_upload, commit
from trial_core.checkpoint.fencing import Fence, take_over
from trial_core.checkpoint.intents import SweptUpload, sweep
from trial_core.checkpoint.manifest import Manifest, is_void
from trial_core.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    StorageError,
)
from trial_core.storage.base import StorageSpec
from trial_core.storage.chunks import DELETED_IN_VAIN
from trial_core.storage.open_storage import open_storage
from trial_core.storage.parallel import StopSignal, in_parallel

__all__ = ["CheckpointStore", "StorageSpec"]

_logger = logging.getLogger(__name__)
_READ_THREADS = 8
_SHOWN = 5

# Inside a class that has a method `list`, the type of that name is out of sight.
_Manifests = list[Manifest]
_Names = list[layout.ManifestName]
_AllSwept = list[SweptUpload]


class CheckpointStore:
    """The checkpoints below a storage URL. Safe to use from several threads.

    Every method may raise `StorageError`. Listings are never cached: each shows what is there now.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        """Open a storage; sends no request yet.

        Args:
            url: fsspec URL, or a local path.
            options: for fsspec's file system: endpoint, credentials, …

        Raises:
            StorageError: the URL is none, or a package for it is not installed.
        """
        self.storage = open_storage(url, dict(options or {}))

    @classmethod
    def from_spec(cls, spec: StorageSpec) -> CheckpointStore:
        """The store that another process calls `spec`."""
        return cls(spec.url, spec.options)

    @property
    def spec(self) -> StorageSpec:
        """What another process needs to open the same store. May hold credentials."""
        return self.storage.spec

    @property
    def url(self) -> str:
        """Where the store is, for people to read: absolute, without credentials."""
        return self.storage.url

    @property
    def is_process_local(self) -> bool:
        """Whether only this process can see what is stored (``memory://``)."""
        return self.storage.is_process_local

    def files_url(self, uuid: str) -> str:
        """Where a checkpoint's files are, for people to read."""
        return f"{self.url}/{layout.files_folder(uuid)}"

    def check_writable(self) -> None:
        """Write, read back and delete a small object.

        Raises:
            StorageError: that fails; says why and what to do.
        """
        self.storage.try_out(f"{layout.PROBES}/{uuids.uuid4()}")

    def take_over(self, trial: str, attempt: str) -> Fence:
        """Begin an attempt at a trial: from now on no earlier one can commit. The driver calls it
        once, before it sweeps, and before it looks what to go on from. When its ranks are launched
        anew the attempt remains the same: to take over again would be to win against whoever has
        come since.

        Args:
            attempt: the new attempt's id.

        Returns:
            What to give to `sweep`, `announce_upload` and `commit`.

        Raises:
            CommitConflict: others take the trial over all the time.
        """
        if not layout.is_name(trial):
            raise CheckpointError(f"no trial can be called {trial!r}")
        return take_over(self.storage, trial, attempt)

    def announce_upload(
        self, trial: str, uuid: str, attempt: str, fence: Fence | None = None
    ) -> None:
        """Say that a checkpoint is about to be uploaded, so that a later run of the trial finds
        what is left of it, should this one die. The driver calls it, before any rank uploads, and
        before each further try.

        Raises:
            Superseded: another attempt has taken the trial over.
        """
        if not layout.is_name(trial) or not layout.is_uuid(uuid):
            raise CheckpointError(f"not a trial and a checkpoint's uuid: {trial!r}, {uuid!r}")
        announce_upload(self.storage, trial, uuid, attempt, fence)

    def sweep(self, trial: str, fence: Fence | None = None) -> _AllSwept:
        """Delete what earlier runs of a trial have begun to upload and never committed.

        For the start of a run, before it uploads anything. Neither committed checkpoints nor
        other trials' uploads are touched. An attempt at this very trial that is still alive
        somewhere can then no longer commit what it was uploading.

        Args:
            fence: of the attempt that sweeps. Without it nobody else may be at the trial.

        Raises:
            StorageError: something could not be deleted. The next sweep tries again.
            Superseded: another attempt has taken the trial over; nothing is deleted.
        """
        if fence is None:
            return sweep(self.storage, trial)
        fence.check(f"what earlier attempts at trial {trial} have left is not deleted")
        return sweep(self.storage, trial, fence.number)

    def delete(self, manifest: Manifest) -> None:
        """Delete a checkpoint: its manifest first, so that it is never listed without its files.

        May be called again after an error, and when the manifest is gone already.

        Raises:
            StorageError: the storage failed, or something is still there: what.
        """
        self.storage.remove(manifest.name.key)
        if self.storage.read(manifest.name.key) is not None:
            raise StorageError(
                f"{self.url}/{manifest.name.key} is still there after it was deleted: "
                f"{DELETED_IN_VAIN}"
            )
        self.storage.clear(layout.files_folder(manifest.uuid))

    def commit(self, manifest: Manifest, fence: Fence | None = None) -> None:
        """Make a checkpoint real. Its files must have been uploaded.

        After an error the commit may yet have happened: commit the same manifest again to find
        out. The same bytes being there already counts as success.

        Args:
            fence: of the attempt that commits. Without it nobody else may be at the trial.

        Raises:
            CheckpointDamaged: a file that the manifest lists is missing, or has another size.
            CommitConflict: another writer has committed this checkpoint.
            Superseded: another attempt has taken the trial over.
        """
        commit(self.storage, manifest, fence)

    def list(self, trial: str | None = None) -> _Manifests:
        """All checkpoints, or those of a trial, oldest first."""
        found = self._read_all(self._names(trial))
        return sorted(found, key=lambda manifest: (manifest.created_at, manifest.name))

    def resume_candidates(self, trial: str) -> _Manifests:
        """The checkpoints that a trial may go on from, best first: most batches, then newest.

        Raises:
            CheckpointDamaged: the trial has some, and no manifest of them can be read.
        """
        found = sorted(self._read_all(self._names(trial)), key=_how_far, reverse=True)
        if not found:
            for name in reversed(self._names(trial)):
                self._read(name)  # raises what is wrong, unless it has just been deleted
        return found

    def newest(self, trial: str) -> Manifest | None:
        """The first of `resume_candidates`, None where there is none; reads no more than it must."""
        names = sorted(self._names(trial), key=lambda name: name.batches, reverse=True)
        for _, group in itertools.groupby(names, key=lambda name: name.batches):
            readable = self._read_all(group)
            if readable:
                return max(readable, key=_how_far)
        return None

    def newest_trial(self, experiment: str) -> str | None:
        """The trial of an experiment that saved last, None where none has."""
        trials = sorted({name.trial for name in self._names()})
        newest = [manifest for trial in trials if (manifest := self.newest(trial)) is not None]
        saved = [(each.created_at, each.trial) for each in newest if each.experiment == experiment]
        return max(saved)[1] if saved else None

    def open(self, uuid: str) -> Manifest:
        """The checkpoint of that uuid, or the only one whose uuid begins so.

        Raises:
            CheckpointNotFound: none, or several; says which there are.
            CheckpointDamaged: its manifest cannot be read.
        """
        names = sorted(self._names(), key=lambda name: name.batches)
        exact = [name for name in names if name.uuid == uuid]
        found = exact or [name for name in names if uuid and name.uuid.startswith(uuid)]
        if len(found) > 1:
            raise CheckpointNotFound(
                f"{len(found)} checkpoints in {self.url} begin with {uuid!r}: {_shown(found)}; "
                "give more of the uuid"
            )
        if not found:
            there = f"there are {len(names)}: {_shown(names)}" if names else "there is none at all"
            raise CheckpointNotFound(f"no checkpoint in {self.url} begins with {uuid!r}; {there}")
        manifest = self._read(found[0])
        if manifest is None:
            raise CheckpointNotFound(f"checkpoint {found[0].uuid} has just been deleted")
        return manifest

    def verify(self, uuid: str) -> Manifest:
        """Read every byte of a checkpoint again, and compare; its manifest.

        Args:
            uuid: of the checkpoint, or an unambiguous beginning.

        Raises:
            CheckpointNotFound: none, or several, are called so; or it has just been deleted.
            CheckpointDamaged: files are missing or differ: which, whose, expected and seen.
        """
        # Late: it needs this module.
        from trial_core.transfer.files import refuse_if_deleted, verify_files

        manifest = self.open(uuid)
        try:
            verify_files(self, manifest.uuid, manifest.files)
        except CheckpointDamaged:
            refuse_if_deleted(self, manifest.uuid)
            raise
        return manifest

    def _names(self, trial: str | None = None) -> _Names:
        """What is committed, by the names of the manifests."""
        if trial is not None and not layout.is_name(trial):
            return []
        folder = layout.MANIFESTS if trial is None else layout.trial_folder(trial)
        keys = sorted(self.storage.sizes(folder))
        return [name for key in keys if (name := layout.parse_manifest_key(key)) is not None]

    def _read_all(self, names: Iterable[layout.ManifestName]) -> _Manifests:
        """Those manifests that can be read; a warning for each other one."""

        def read(name: layout.ManifestName, stop: StopSignal) -> Manifest | None:
            stop.check()
            try:
                return self._read(name)
            except StorageError:
                raise
            except CheckpointError as error:
                _logger.warning("not listed: %s", error)
                return None

        read_all = in_parallel(read, names, _READ_THREADS)
        return [manifest for manifest in read_all if manifest is not None]

    def _read(self, name: layout.ManifestName) -> Manifest | None:
        """The manifest of that name; None where it has been deleted since it was listed, or what
        was uploaded is being deleted."""
        data = self.storage.read(name.key)
        if data is None or is_void(data):
            return None
        where = f"{self.url}/{name.key}"
        manifest = Manifest.from_json(data, where)
        if manifest.name != name:
            raise CheckpointDamaged(
                f"{where} is the manifest of another checkpoint: of {manifest.name.key}"
            )
        return manifest


def _how_far(manifest: Manifest) -> tuple[int, str, str]:
    return manifest.progress.batches_trained, manifest.created_at, manifest.uuid


def _shown(names: _Names) -> str:
    """The last few, for an error message."""
    shown = [f"{name.uuid} ({name.trial}, {name.batches} batches)" for name in names[-_SHOWN:]]
    return ("… " if len(names) > _SHOWN else "") + ", ".join(shown)
