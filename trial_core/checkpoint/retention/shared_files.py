"""The stored files that a checkpoint may refer to when it is uploaded.

They are the files of its base: the newest checkpoint of its trial, which no rule deletes while the
trial runs. `checkpoint.references` describes why they stay.
"""

from __future__ import annotations

import msgspec

from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.manifest import FileEntry, Manifest
from trial_core.checkpoint.retention.deletion_markers import check_stays
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.verified_read import noted_damage, wrong_sizes
from trial_core.common.any_logger import AnyLogger
from trial_core.errors import CheckpointNotFound, CommitConflict


def announce_shared_upload(
    store: CheckpointStore,
    trial: str,
    uuid: str,
    writer: str,
    fence: Fence | None,
    logger: AnyLogger,
) -> tuple[str, list[FileEntry]]:
    """As `CheckpointStore.announce_upload`; return the base's uuid, and its files that are there.

    Warns of files of the base that are missing or damaged. Each entry says where its copies are;
    without `stored_at`, the checkpoint stores the second copy.

    Returns:
        `base` for `CheckpointStore.commit`, and `shared` for `upload_staged`.
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
