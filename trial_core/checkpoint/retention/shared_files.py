"""Equal files of a trial's checkpoints: those that an upload refers to, and copies for a repair.

An upload refers to files of its base: the newest checkpoint of its trial, which no rule deletes
while the trial runs. `checkpoint.references` describes why they stay.
"""

from __future__ import annotations

import logging
import tempfile
import uuid as uuids
from collections.abc import Iterable
from pathlib import Path

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.json_objects import encode_json, user_at_host
from trial_core.checkpoint.manifest import FileEntry, Manifest, utc_now
from trial_core.checkpoint.retention.deletion_markers import check_stays, protect
from trial_core.checkpoint.retention.protections import Protection
from trial_core.checkpoint.storage.parallel import CancelSignal
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.verified_read import (
    Damage,
    StoredFile,
    noted_damage,
    read_files,
    wrong_sizes,
)
from trial_core.common.any_logger import AnyLogger
from trial_core.errors import CheckpointNotFound, CommitConflict

_logger = logging.getLogger(__name__)

_REASON = "`checkpoints verify --repair` stores its files; if it was killed, unpin the checkpoint"


def announce_shared_upload(
    store: CheckpointStore,
    trial: str,
    uuid: str,
    writer: str,
    fence: Fence | None,
    logger: AnyLogger,
) -> tuple[str, list[FileEntry]]:
    """As `CheckpointStore.announce_upload`; return the base's uuid for `CheckpointStore.commit`,
    and its files that are there, for the `shared` of `upload_staged`.

    Warns of files of the base that are missing or damaged. Each entry says where its copies are;
    without `stored_at`, the checkpoint stores the second copy.
    """
    base = store.newest(trial)
    is_retry = base is not None and base.uuid == uuid  # the commit had succeeded unnoticed
    store.announce_upload(trial, uuid, writer, fence, "" if base is None or is_retry else base.uuid)
    if base is None:
        return "", []
    if is_retry:
        return "", [entry for entry in base.all_files if entry.stored_at or entry.copy_at]
    try:
        check_stays(store, base.name)
    except (CheckpointNotFound, CommitConflict):
        return base.uuid, []
    return base.uuid, _intact(store, base, logger)


def _intact(store: CheckpointStore, base: Manifest, logger: AnyLogger) -> list[FileEntry]:
    problems = {
        damage.entry.key(base.uuid): str(damage)
        for damage in wrong_sizes(store.storage, base.uuid, base.copies)
    }
    for entry in noted_damage(store.storage, base.uuid, base.copies):
        key = entry.key(base.uuid)
        problems.setdefault(key, f"{entry.path}, at {key}, was found damaged")
    own = [entry.key(base.uuid) for entry in base.all_files if not entry.stored_at]
    if all(key in problems for key in own):
        # Its upload was swept, and its manifest is about to be removed.
        return []
    for problem in problems.values():
        logger.warning(
            "%s, of checkpoint %s in %s: its content is stored again. Earlier checkpoints that use "
            "this copy are not whole; repair: `trialflow checkpoints verify --trial %s --repair`",
            problem, base.uuid, store.url, base.trial,
        )  # fmt: skip
    found = []
    for entry in base.all_files:
        intact = [copy for copy in entry.copies if copy.key(base.uuid) not in problems]
        if intact:
            # The base's own copy comes last: two checkpoints in a row use different copies.
            first, *second = ["/".join(copy.place(base.uuid)) for copy in reversed(intact)]
            places = (first, second[0]) if second else ("", first)
            found.append(msgspec.structs.replace(entry, stored_at=places[0], copy_at=places[1]))
    return found


def repair(store: CheckpointStore, manifest: Manifest, damage: Iterable[Damage]) -> list[Damage]:
    """Store a checkpoint's damaged files again; return the ones that stay damaged. Raises as
    `protect`. The checkpoint is pinned meanwhile: a prune that meets the repair deletes neither the
    checkpoint nor a file that it lists."""
    pin = Protection(
        uuid=manifest.uuid, by=user_at_host(), at=utc_now(), reason=_REASON,
        unique=uuids.uuid4().hex,
    )  # fmt: skip
    protect(store, manifest.name, pin.key, encode_json(pin))
    try:
        listed = store.list()
        return [
            each for each in damage if not _is_repaired(store, manifest.uuid, each.entry, listed)
        ]
    finally:
        store.storage.remove(pin.key)


def _is_repaired(
    store: CheckpointStore, uuid: str, entry: FileEntry, listed: Iterable[Manifest]
) -> bool:
    key, storage = entry.key(uuid), store.storage
    sources: dict[str, None] = {}
    trial = next((each.trial for each in listed if each.uuid == uuid), None)
    for each in listed:
        for copy in each.copies:
            is_equal = (copy.size_bytes, copy.digest) == (entry.size_bytes, entry.digest)
            if copy.key(each.uuid) != key:
                if is_equal and each.trial == trial:
                    sources[copy.key(each.uuid)] = None
            elif not is_equal or each.trial != trial:  # a hostile manifest may name any file
                _logger.warning("%s is not repaired: checkpoint %s lists it too", key, each.uuid)
                return False
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "file"
        for source in sources:
            if storage.is_linked(source):  # maybe to a file of this user's, which nothing may store
                continue
            differs: list[Damage] = []
            read_files(storage, [StoredFile(entry, source, target)], differs.append)
            if differs:
                continue
            storage.upload(target, key, CancelSignal())
            if store.find_damage(uuid, [entry]):
                return False
            storage.remove(layout.damage_key(*entry.place(uuid)))
            return True
    return False
