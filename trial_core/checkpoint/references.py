"""Files that checkpoints of one trial share, and when such a file may be deleted.

A checkpoint may refer to files that its base, an earlier one of its trial, has stored or refers to.
A file is stored twice, by two checkpoints, each in its folder. Checkpoints in a row use the two
copies in turn, and refer to both, so damage to one copy leaves the previous checkpoint intact.
A copy stays when the checkpoint that stored it is deleted, as long as another one refers to it. A
save and a deletion may meet::

    save of N, from base E                          deletion of X
    S1  writes the intent, which names E            D1  writes a deletion marker of X
    S2  looks for markers of E, and whether E is    D2  looks for intents that name X: spares X
        there; if it is not, refers to nothing      D3  deletes the manifest of X
    S3  uploads the rest, and commits N             D4  reads the other manifests of the trial
    S4  deletes the intent                          D5  deletes what X lists and none of them does

If X is E, one of S2 and D2 sees the other. So E is there until N is, and in all other cases D4
finds a manifest that lists the file: E's, or N's. Of two deletions at once, the later D4 sees no
manifest of the other, so the last one deletes the file. The marker holds the manifest of X, so the
next prune repeats D4 and D5 after a crash.

An intent may outlive its checkpoint. So a sweep (T4 of `commit`) keeps the files that the trial's
checkpoints refer to, as D5 does.

A listing is not a snapshot: D4 lists until it finds no new name, and counts all that it has seen.
A manifest that cannot be read may refer to any file of its trial.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from trial_core.checkpoint import layout
from trial_core.checkpoint.layout import ManifestName
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.storage.base import DeletedFiles, Storage
from trial_core.checkpoint.storage.parallel import read_all
from trial_core.errors import CheckpointDamaged, CheckpointError, StorageError


@dataclass(frozen=True)
class References:
    """The stored files that committed checkpoints refer to: the keys of files that another one has
    stored; and of manifests that cannot be read, and may refer to any file."""

    keys: frozenset[str]
    unreadable: tuple[str, ...]


@dataclass
class ReferenceReader:
    """Reads the references of a storage's checkpoints. Remembers them: manifests never change.
    `names` lists the manifests of a trial, or all (None); `manifest` reads one, or returns None if
    it is gone."""

    names: Callable[[str | None], Collection[ManifestName]]
    manifest: Callable[[ManifestName], Manifest | None]
    _known: dict[ManifestName, frozenset[str]] = field(default_factory=dict)

    def read(self, trial: str | None) -> References:
        """The references of a trial's checkpoints, or of all (None)."""
        seen: dict[ManifestName, frozenset[str] | None] = {}
        while new := [name for name in self.names(trial) if name not in seen]:
            seen.update(read_all(self._references, new))
        return References(
            keys=frozenset(key for keys in seen.values() for key in keys or ()),
            unreadable=tuple(sorted(name.key for name, keys in seen.items() if keys is None)),
        )

    def _references(self, name: ManifestName) -> tuple[ManifestName, frozenset[str] | None]:
        """A checkpoint's references; none if it has just been deleted; None if it is unreadable."""
        if name not in self._known:
            try:
                manifest = self.manifest(name)
            except StorageError:
                raise
            except CheckpointError:
                return name, None
            if manifest is None:
                return name, frozenset()
            self._known[name] = frozenset(
                copy.key(manifest.uuid) for copy in manifest.copies if copy.stored_at
            )
        return name, self._known[name]


def delete_files(
    storage: Storage, manifest: Manifest, others: References, committed: Collection[str]
) -> DeletedFiles:
    """Delete the files that a checkpoint, whose manifest is deleted, has stored or refers to. Files
    that `others` need stay (step D5), and own files of the checkpoints in `committed`, which has
    all uuids. Raises CheckpointDamaged, and deletes nothing, if a manifest of the trial cannot be
    read."""
    if (why := why_unknown(storage, others)) is not None:
        raise CheckpointDamaged(f"files of checkpoint {manifest.uuid} are not deleted: {why}")
    notes = {layout.damage_key(*key.split("/", 2)[1:]) for key in others.keys}
    owners = {copy.place(manifest.uuid)[0] for copy in manifest.copies} - {*committed}
    deleted = []
    for owner in dict.fromkeys([manifest.uuid, *sorted(owners)]):
        deleted.append(storage.clear(layout.files_folder(owner), others.keys))
        storage.clear(layout.damages_folder(owner), notes)
    return DeletedFiles(*map(sum, zip(*deleted, strict=True)))


def why_unknown(storage: Storage, references: References) -> str | None:
    """Why the needed files are not known; None if they are."""
    if not references.unreadable:
        return None
    return (
        f"{storage.url}/{references.unreadable[0]} cannot be read, and may refer to them; restore "
        "it from a backup, use the trialflow that wrote it, or delete it"
    )
