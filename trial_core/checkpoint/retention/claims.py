"""Claims: a run announces in the storage which checkpoints it needs, so that no prune deletes them.

A pruner on another machine learns of a run only from the storage. A run claims a checkpoint before
it reads it, and then checks that it stays: see `deletion_markers.protect`.

The driver deletes its claim when the run ends. The claim of a killed driver goes when the trial
runs again, and is ignored after `CLAIM_LIFETIME`. Until then it protects one or two checkpoints
that no run needs. An intent also shows that a trial runs.

Each run's claim has its own key, which only later runs of the trial delete. A run that was taken
over may write, renew or delete its claim late, and must not touch its successor's.

Claims are separate from the records of attempts (see `checkpoint.fencing`). Those records stay when
the run ends. A prune reads all claims of a storage, so there must be only one for each run.
"""

from __future__ import annotations

import logging
import socket
import time
import uuid as uuids
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.intents import uploads
from trial_core.checkpoint.json_objects import (
    encode_json,
    is_older,
    named_keys,
    read_json,
    user_at_host,
)
from trial_core.checkpoint.manifest import Manifest, Timestamp, utc_now
from trial_core.checkpoint.retention.deletion_markers import protect
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CommitConflict, StorageError
from trial_core.processes.machine.process_identity import is_alive, this_process

CLAIM_LIFETIME = timedelta(days=30)
"""How long a claim, or an intent, shows that its trial runs."""

_LISTS = 5
"""The maximum number of lists until all claims of one are still there."""

DELETION_WAIT_SECONDS = 30
"""How long a run waits for the end of a deletion of the checkpoint that it needs."""

_logger = logging.getLogger(__name__)


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The announcement that a trial runs, by a driver (``user@host``).

    Attributes:
        at: when the claim was last written: ISO 8601, UTC.
        needs: uuids, or prefixes of uuids, of the checkpoints that the run has started from.
        owner: id of the run.
        process: the driver's `this_process`.
    """

    trial: str
    by: str
    at: Timestamp
    needs: list[str]
    owner: str
    process: str

    @property
    def is_of_this_host(self) -> bool:
        """True if a machine or container with this one's name wrote it."""
        return self.by.rpartition("@")[2] == socket.gethostname()

    @property
    def has_ended(self) -> bool:
        """True if its driver is known to have ended: on its machine, until that is restarted."""
        return self.is_of_this_host and not is_alive(self.process)

    def __str__(self) -> str:
        return f"trial {self.trial} runs, by {self.by}, and has started from it"


class RunClaim:
    """The claim of a run in progress, which lasts while the block runs. One process writes it.

    Args:
        source: uuid, or its prefix, of another trial's checkpoint that the run starts from. It is
            needed until the end: until the trial has saved, a restart starts from it again.
        check: raises if another run has taken over the trial: the claims of others stay then.

    Attributes:
        is_written: True if the claim is certainly in the storage.
    """

    def __init__(
        self,
        store: CheckpointStore,
        trial: str,
        source: str | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._trial = trial
        self._needs = [] if source is None else [source]
        self._check = check
        self._owner = uuids.uuid4().hex
        self.key = layout.claim_key(trial, self._owner)
        self.is_written = False

    def __enter__(self) -> RunClaim:
        """Write the claim, and delete those of earlier runs, which were killed or taken over. Only
        warns if the storage fails: training continues without a claim."""
        earlier: list[str] = []
        with self._warning():
            self._store.storage.write(self.key, self._claim())
            self.is_written = True
            names = named_keys(self._store.storage, layout.CLAIMS, layout.parse_claim_key)
            earlier += [key for key, name in names if name.trial == self._trial and key != self.key]
        try:
            self._check()  # after the list, so that no later run's claim is in it
        except BaseException:
            self._remove(self.key)
            raise
        self._remove(*earlier)
        return self

    def __exit__(self, *_: object) -> None:
        self._remove(self.key)

    def _remove(self, *keys: str) -> None:
        for key in keys:
            try:
                self._store.storage.remove(key)
            except StorageError as error:
                _logger.warning(
                    "the claim %s is not deleted, and counts for %d days: %s",
                    key, CLAIM_LIFETIME.days, error,
                )  # fmt: skip

    def renew(self, name: layout.ManifestName) -> None:
        """Claim a checkpoint besides the source. Afterwards it is there, and no prune deletes it.
        Only warns if the storage fails. Raises CheckpointNotFound if it has just been deleted.

        Waits for a deletion to end: the pruner may see the claim and spare the checkpoint. If it
        does not end, raises CommitConflict.
        """
        with self._warning():
            for seconds_left in range(DELETION_WAIT_SECONDS, -1, -1):
                try:
                    protect(self._store, name, self.key, self._claim(name.uuid))
                except CommitConflict as conflict:
                    if not seconds_left:
                        raise
                    _logger.info("waiting for a deletion: %s", conflict)
                    time.sleep(1)
                else:
                    return

    def _claim(self, *uuids: str) -> bytes:
        claim = Claim(
            trial=self._trial, by=user_at_host(), at=utc_now(), needs=[*self._needs, *uuids],
            owner=self._owner, process=this_process(),
        )  # fmt: skip
        return encode_json(claim)

    @contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            _logger.warning(
                "trial %s may have no claim, so a prune may delete checkpoints that it needs: %s",
                self._trial, error,
            )  # fmt: skip


def claims(
    store: CheckpointStore, trial: str | None = None, last_saved: Mapping[str, str] | None = None
) -> list[Claim]:
    """All claims that count, or those of a trial. An unreadable one needs no checkpoint, nor does
    one that is listed time and again without being there. `last_saved`: the time of each trial's
    last checkpoint, if known: the trial ran then."""
    found: list[Claim] = []
    for _ in range(_LISTS):
        names = named_keys(store.storage, layout.CLAIMS, layout.parse_claim_key)
        found, is_complete = [], True
        for key, name in names:
            if trial not in (None, name.trial):
                continue
            unknown = Claim(
                trial=name.trial, by="unknown", at=utc_now(), needs=[], owner=name.owner, process=""
            )
            claim = read_json(store.storage, key, Claim, unknown)
            is_complete = is_complete and claim is not None
            found.append(msgspec.structs.replace(claim or unknown, trial=name.trial))
        if is_complete:
            break
        # One has just been deleted, maybe for another that the list lacks.
    saved = last_saved or {}
    return [
        each
        for each in found
        if not is_older(max(each.at, saved.get(each.trial, "")), CLAIM_LIFETIME)
    ]


def claimed_checkpoints(claims: Iterable[Claim], manifests: Collection[Manifest]) -> dict[str, str]:
    """The uuids of the checkpoints that runs have started from, and why each is needed."""
    return {
        manifest.uuid: str(claim)
        for claim in claims
        for prefix in claim.needs
        for manifest in manifests
        if prefix and manifest.uuid.startswith(prefix)
    }


def uploading_trials(store: CheckpointStore, trial: str | None = None) -> set[str]:
    """The trials, or only this one, with an upload in progress: an intent not too old."""
    found = uploads(store.storage, trial)
    return {each.trial for each in found if not is_older(each.created_at, CLAIM_LIFETIME)}
