"""The checkpoints in a storage: commit them, list them, find them.

A checkpoint exists if its manifest does: see `commit`. One that cannot be read is never listed.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from functools import partial
from typing import Any

from trial_core.checkpoint import layout
from trial_core.checkpoint.commit import announce_upload, commit
from trial_core.checkpoint.fencing import Fence, take_over
from trial_core.checkpoint.intents import SweptUpload, sweep
from trial_core.checkpoint.json_objects import named_keys
from trial_core.checkpoint.manifest import FileEntry, Manifest, is_tombstone
from trial_core.checkpoint.references import ReferenceReader, References, delete_files
from trial_core.checkpoint.storage.base import NOT_DELETED_ADVICE, DeletedFiles, StorageSpec
from trial_core.checkpoint.storage.open_storage import open_storage
from trial_core.checkpoint.storage.parallel import read_all
from trial_core.checkpoint.verified_read import (
    Damage,
    OnRead,
    damage_error,
    find_damage,
    read_verified,
    refuse_damaged,
    unheard,
)
from trial_core.common.text_format import first_few, slug
from trial_core.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, StorageError

__all__ = ["CheckpointStore", "StorageSpec"]

_logger = logging.getLogger(__name__)
_SHOWN = 5

# Inside a class with a method `list`, annotations cannot use the type `list`.
_Manifests = list[Manifest]
_Damaged = list[Damage]
_Names = list[layout.ManifestName]
_Trials = list[str]
_AllSwept = list[SweptUpload]
_Seen = dict[layout.ManifestName, Manifest | None]
"""Manifests that were read; None for one that cannot be read or is deleted."""


class CheckpointStore:
    """The checkpoints below a storage URL. Safe to use from several threads. Every method may raise
    `StorageError`. Listings are never cached."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        options: Mapping[str, Any] | None = None,
        experiment: str = "",
    ) -> None:
        """Open a storage; sends no request yet. Raises StorageError if the URL is invalid, or a
        package for it is not installed.

        Args:
            url: fsspec URL, or a local path.
            options: of fsspec's file system: endpoint, credentials, …
            experiment: the name of the experiment that a reference such as ``best`` means, and
                whose checkpoints an error lists first; may be empty.
        """
        self.storage = open_storage(os.fspath(url), dict(options or {}))
        self.experiment = experiment
        self._references = ReferenceReader(self._names, self._read)

    @classmethod
    def from_spec(cls, spec: StorageSpec) -> CheckpointStore:
        """Open the store that another process describes by `spec`."""
        return cls(spec.url, spec.options)

    @property
    def spec(self) -> StorageSpec:
        """The data to open the same store in another process. May hold credentials."""
        return self.storage.spec

    @property
    def url(self) -> str:
        """The store's absolute URL without credentials, for messages."""
        return self.storage.url

    @property
    def is_process_local(self) -> bool:
        """True if only this process can see the stored objects (``memory://``)."""
        return self.storage.is_process_local

    def files_url(self, uuid: str) -> str:
        """The URL of the folder of a checkpoint's files, for messages."""
        return f"{self.url}/{layout.files_folder(uuid)}"

    def check_writable(self) -> None:
        """Write, read back and delete a small object. Raises StorageError; says what to do."""
        self.storage.check_usable()

    def forget_trial(self, trial: str) -> None:
        """Delete everything of a trial. It must be new, and no run of it may be alive."""
        for manifest in self.list(trial):
            self.delete(manifest)
        self.sweep(trial)
        for folder in layout.trial_folders(trial):
            self.storage.clear(folder)

    def check_clock(self) -> None:
        """Compare this machine's clock with the storage's. For commands that may only read. Raises
        StorageError if they differ by more than a minute; it names both.

        Only warns if the storage cannot be written: then it does not tell the time.
        """
        began = datetime.now(timezone.utc)
        try:
            now = self.storage.now()
        except StorageError as error:
            _logger.warning("this machine's clock is not compared with the storage's: %s", error)
            return
        self.storage.check_clock(began, now)

    def take_over(
        self, trial: str, attempt: str, after: int | None = None, mark: str | None = None
    ) -> Fence:
        """Become a trial's newest attempt: from now on no earlier attempt can commit. Returns the
        fence to pass to `sweep`, `announce_upload` and `commit`.

        The driver calls this once, before it sweeps and looks for checkpoints to resume from. It
        does not call it again when it relaunches its ranks: that would supersede a newer attempt.

        Args:
            attempt: the new attempt's id.
            after: the newest attempt's number as the caller knows it, 0 for none; a trial that a
                later attempt has taken over meanwhile is left to that attempt. None: take it over
                from any attempt.
            mark: the storage's mark, if the caller knows it; None accepts any storage.

        Raises:
            CommitConflict: other attempts keep taking over the trial; or one has, after `after`.
            StorageError: it is another storage than `mark` says.
        """
        return take_over(self.storage, trial, attempt, after, mark)

    def announce_upload(
        self, trial: str, uuid: str, writer: str, fence: Fence | None = None, base: str = ""
    ) -> None:
        """Write the intent to upload a checkpoint, so that a later run finds its leftovers. `base`:
        uuid of the checkpoint whose files it may refer to; empty for none.

        The driver calls this before any byte is uploaded, and again before each retry. Raises
        Superseded if another attempt has taken over the trial.
        """
        announce_upload(self.storage, trial, uuid, writer, fence, base)

    def sweep(self, trial: str, fence: Fence | None = None) -> _AllSwept:
        """Delete the leftovers of a trial's earlier runs. Call this before the run uploads.

        Committed checkpoints, other trials' uploads and this attempt's files outside checkpoints
        stay. An earlier attempt at this trial that is still alive can no longer commit its upload.
        Without a fence, no other run of the trial may be alive.

        Raises:
            StorageError: something could not be deleted. The next sweep tries again.
            Superseded: another attempt has taken over the trial; nothing is deleted.
        """
        references = partial(self.references, trial)
        if fence is None:
            return sweep(self.storage, trial, references)
        fence.check(f"leftovers of trial {trial} are not deleted")
        return sweep(self.storage, trial, references, fence.number)

    def references(self, trial: str | None = None) -> References:
        """The files of others that a trial's checkpoints, or all, refer to: see `references`."""
        return self._references.read(trial)

    def delete(self, manifest: Manifest) -> DeletedFiles:
        """Delete a checkpoint: its manifest first, so that it is never listed without its files.

        Files that other checkpoints refer to stay. May be repeated after an error, also if the
        manifest is already deleted.

        Raises:
            CheckpointDamaged: its files stay, as a manifest of the trial cannot be read.
            StorageError: the storage failed, or some objects are still there: says which.
        """
        self.storage.remove(manifest.name.key)
        if self.storage.exists(manifest.name.key):
            raise StorageError(
                f"{self.url}/{manifest.name.key} is still there after it was deleted: "
                f"{NOT_DELETED_ADVICE}"
            )
        others = self.references(manifest.trial)
        committed = [name.uuid for name in self._names()]
        return delete_files(self.storage, manifest, others, committed)

    def commit(self, manifest: Manifest, fence: Fence | None = None, base: str = "") -> None:
        """Write a checkpoint's manifest. Its files must have been uploaded.

        After an error the commit may have succeeded: commit the same manifest again to find out.
        It succeeds if the same bytes are already stored.

        Args:
            fence: the committing attempt's. Without it, no other run of the trial may be alive.
            base: as announced, if the manifest refers to its files.

        Raises:
            CheckpointDamaged: a file that the manifest lists is missing or has another size.
            StorageError: likewise a file of an earlier checkpoint. A new upload stores it anew.
            CommitConflict: another writer has committed this checkpoint.
            Superseded: another attempt has taken over the trial.
        """
        commit(self.storage, manifest, fence, base)

    def list(self, trial: str | None = None) -> _Manifests:
        """All checkpoints, or all of a trial, oldest first, as they are at one moment."""
        return sorted(
            self._read_all(trial), key=lambda manifest: (manifest.created_at, manifest.name)
        )

    def resume_candidates(self, trial: str) -> _Manifests:
        """A trial's checkpoints in the order to resume from them: most batches, then newest. Raises
        CheckpointDamaged if the trial has checkpoints, and none of their manifests can be read."""
        found = self._read_all(trial)
        found.sort(key=lambda manifest: manifest.resume_order, reverse=True)
        if not found:
            for name in reversed(self._names(trial)):
                self._read(name)  # raises, unless the manifest has just been deleted
        return found

    def newest(self, trial: str) -> Manifest | None:
        """The first of `resume_candidates`, or None. Reads few manifests."""
        return next(self.newest_first(trial), None)

    def newest_first(self, trial: str) -> Iterator[Manifest]:
        """Yield `resume_candidates`, without their error. Reads a manifest when it is due, so that
        the first one comes as fast from a thousand checkpoints as from one."""
        seen: _Seen = {}
        yielded: set[layout.ManifestName] = set()
        while True:
            names = [name for name in self._names(trial) if name not in yielded]
            names.sort(key=lambda name: name.batches, reverse=True)
            for _, group in itertools.groupby(names, key=lambda name: name.batches):
                alike = list(group)
                if not self._read_into(seen, alike):
                    break
                found = _readable(seen, alike)
                found.sort(key=lambda manifest: manifest.resume_order, reverse=True)
                for manifest in found:
                    yielded.add(manifest.name)
                    yield manifest
            else:
                return

    def trials(self) -> _Trials:
        """The ids of all trials that have saved, sorted."""
        return sorted({name.trial for name in self._names()})

    def trial(self, named: str) -> str:
        """The trial with this id, or the only one that has saved whose id begins with it; `named`
        itself if none does. Raises CheckpointError if no trial's id can begin so,
        CheckpointNotFound if several do."""
        layout.checked_trial(named)
        found = [trial for trial in self.trials() if trial.startswith(named)]
        if len(found) > 1 and named not in found:
            raise CheckpointNotFound(
                f"{named!r} is not one trial in {self.url}, but {len(found)}: {first_few(found)}"
            )
        return found[0] if len(found) == 1 else named

    def newest_trial(self, experiment: str) -> str | None:
        """The trial of an experiment that saved last, None if none has saved."""
        newest = [
            manifest for trial in self.trials() if (manifest := self.newest(trial)) is not None
        ]
        saved = [(each.created_at, each.trial) for each in newest if each.experiment == experiment]
        return max(saved)[1] if saved else None

    def open(self, uuid: str) -> Manifest:
        """The checkpoint with this uuid, or the only one whose uuid begins with it. Raises
        CheckpointNotFound if none matches, or several do, and says which there are;
        CheckpointDamaged if its manifest cannot be read."""
        names = sorted(self._names(), key=lambda name: name.batches)
        exact = [name for name in names if name.uuid == uuid]
        found = exact or [name for name in names if uuid and name.uuid.startswith(uuid)]
        if len(found) > 1:
            raise CheckpointNotFound(
                f"{len(found)} checkpoints in {self.url} begin with {uuid!r}; give more of the "
                f"uuid: {self._shown(found)}"
            )
        if not found:
            there = (
                f"there are {len(names)}: {self._shown(names)}"
                if names
                else "the storage has no checkpoints"
            )
            raise CheckpointNotFound(f"no checkpoint in {self.url} begins with {uuid!r}; {there}")
        manifest = self._read(found[0])
        if manifest is None:
            raise CheckpointNotFound(f"checkpoint {found[0].uuid} has just been deleted")
        return manifest

    def verify(self, uuid: str) -> Manifest:
        """Read every byte of a checkpoint and compare sizes and digests; return its manifest.

        Raises as `open`, and CheckpointDamaged, which names every file that is missing or differs.
        """
        manifest = self.open(uuid)
        if damage := self.find_damage(manifest.uuid, manifest.all_files):
            self.raise_if_deleted(manifest.uuid)
            raise damage_error(self.storage, manifest.uuid, damage)
        return manifest

    def find_damage(
        self, uuid: str, entries: Iterable[FileEntry], on_read: OnRead = unheard
    ) -> _Damaged:
        """Read every byte of a checkpoint's `entries`; return the files that differ. After finding
        damage in an unclaimed checkpoint, call `raise_if_deleted`."""
        return find_damage(self.storage, uuid, entries, on_read)

    def read_file(self, manifest: Manifest, path: str) -> bytes | None:
        """The content of a small file of a checkpoint, verified; None if it has none of that name.
        Raises CheckpointNotFound if the checkpoint has just been deleted; CheckpointDamaged if the
        file is missing, large, or differs from the manifest."""
        if (entry := manifest.file(path)) is None:
            return None
        content = read_verified(self.storage, manifest.uuid, entry)
        if not isinstance(content, bytes):
            self.raise_if_deleted(manifest.uuid)
            refuse_damaged(self.storage, manifest.uuid, content)
        return content

    def raise_if_deleted(self, uuid: str) -> None:
        """Call after finding damage in an unclaimed checkpoint: a concurrent prune deletes the
        manifest first. Raises CheckpointNotFound if it was deleted after its manifest was read."""
        try:
            self.open(uuid)
        except CheckpointNotFound:
            raise CheckpointNotFound(
                f"checkpoint {uuid} has been deleted meanwhile, from {self.url}: use another one; "
                "a pin protects a checkpoint from deletion"
            ) from None
        except CheckpointDamaged:
            return  # its manifest exists but cannot be read

    def _names(self, trial: str | None = None) -> _Names:
        """The names of all manifests, or of a trial's."""
        folder = layout.MANIFESTS if trial is None else layout.trial_folder(trial)
        return [name for _, name in named_keys(self.storage, folder, layout.parse_manifest_key)]

    def _read_all(self, trial: str | None) -> _Manifests:
        """The readable manifests, as they are at one moment. Warns of each other one."""
        seen: _Seen = {}
        names = self._names(trial)
        while not self._read_into(seen, names):
            names = self._names(trial)
        return _readable(seen, names)

    def _read_into(self, seen: _Seen, names: _Names) -> bool:
        """Read the manifests not in `seen`; return whether all listed ones still exist. If one does
        not, list again: a later checkpoint may have been committed before the deletion."""
        deleted = []

        def read(name: layout.ManifestName) -> None:
            seen[name] = None
            try:
                data = self.storage.read(name.key)
                if data is None:
                    deleted.append(name)
                else:
                    seen[name] = self._decode(name, data)
            except StorageError:
                raise
            except CheckpointError as error:
                _logger.warning("a checkpoint is not listed: %s", error)

        read_all(read, [name for name in names if name not in seen])
        return not deleted

    def _read(self, name: layout.ManifestName) -> Manifest | None:
        """The manifest; None if it was deleted since it was listed, or is being swept."""
        data = self.storage.read(name.key)
        return None if data is None else self._decode(name, data)

    def _decode(self, name: layout.ManifestName, data: bytes) -> Manifest | None:
        """The manifest; None if it is a tombstone."""
        if is_tombstone(data):
            return None
        where = f"{self.url}/{name.key}"
        manifest = Manifest.from_json(data, where)
        if manifest.name != name:
            raise CheckpointDamaged(
                f"{where} is the manifest of another checkpoint, {manifest.name.key}: it was "
                "copied or renamed; delete the copy"
            )
        return manifest

    def _shown(self, names: _Names) -> str:
        """A few names, for an error message: the experiment's first, then others; newest first."""
        written = self.storage.objects(layout.MANIFESTS)
        own = slug(self.experiment) if self.experiment else ""

        def order(name: layout.ManifestName) -> tuple[bool, datetime, int]:
            found = written.get(name.key)
            at = (found and found.modified_at) or datetime.min.replace(tzinfo=timezone.utc)
            return name.trial.rpartition("-")[0] == own, at, name.batches

        first = sorted(names, key=order, reverse=True)[:_SHOWN]
        shown = [f"{name.uuid} ({name.trial}, {name.batches} batches)" for name in first]
        if rest := len(names) - len(first):
            shown.append(f"and {rest} more (`trialflow checkpoints list`)")
        return ", ".join(shown)


def _readable(seen: _Seen, names: _Names) -> _Manifests:
    found = (seen[name] for name in names)
    return [manifest for manifest in found if manifest is not None]
