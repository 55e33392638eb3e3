"""Claims: a run announces in the storage which checkpoints it needs, so that no prune deletes them.

A pruner on another machine learns of a run only from the storage. A run claims a checkpoint before
it reads it, and then checks that it stays: see `deletion_markers.protect`.

The driver deletes its claim when the run ends. The claim of a killed driver is ignored after
`CLAIM_LIFETIME`. Until then it protects one or two checkpoints that no run needs. An intent also
shows that a trial runs.

Claims are separate from the records of attempts (see `checkpoint.fencing`). Those records stay when
the run ends. A prune reads all claims of a storage, so there must be only one for each run.
"""

from __future__ import annotations

import logging
import time
import uuid as uuids
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.intents import intents
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
from trial_core.processes.machine.process_identity import this_process

CLAIM_LIFETIME = timedelta(days=30)
"""How long a claim, or an intent, shows that its trial runs."""

DELETION_WAIT_SECONDS = 30
"""How long a run waits for the end of a deletion of the checkpoint that it needs."""

_logger = logging.getLogger(__name__)


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The announcement that a trial runs, by a driver (``user@host``).

    Attributes:
        at: when the claim was last written: ISO 8601, UTC.
        needs: uuids, or prefixes of uuids, of the checkpoints that the run has started from.
        owner: id of the run. Another run may have claimed the same trial since.
        process: the driver's `this_process`.
    """

    trial: str
    by: str
    at: Timestamp
    needs: list[str]
    owner: str
    process: str

    def __str__(self) -> str:
        return f"trial {self.trial} runs, by {self.by}, and has started from it"


class RunClaim:
    """The claim of a run in progress, which lasts while the block runs. One process writes it.

    Args:
        source: uuid, or its prefix, of another trial's checkpoint that the run starts from. It is
            needed until the end: until the trial has saved, a restart starts from it again.

    Attributes:
        is_written: True if the claim is certainly in the storage.
    """

    def __init__(self, store: CheckpointStore, trial: str, source: str | None = None) -> None:
        self._store = store
        self._trial = trial
        self._needs = [] if source is None else [source]
        self._owner = uuids.uuid4().hex
        self.is_written = False

    def __enter__(self) -> RunClaim:
        """Write the claim. Only warns if the storage fails: training continues without a claim."""
        with self._warning():
            self._store.storage.write(layout.claim_key(self._trial), self._claim())
            self.is_written = True
        return self

    def __exit__(self, *_: object) -> None:
        """Delete the claim at the end of the run. Another run's claim stays."""
        key = layout.claim_key(self._trial)
        try:
            claim = read_json(self._store.storage, key, Claim, is_silent=True)
            if claim is not None and claim.owner == self._owner:
                self._store.storage.remove(key)
        except StorageError as error:
            _logger.warning(
                "the claim %s is not deleted, and counts for %d days: %s",
                key, CLAIM_LIFETIME.days, error,
            )  # fmt: skip

    def renew(self, name: layout.ManifestName) -> None:
        """Claim a checkpoint besides the source. Afterwards it is there, and no prune deletes it.

        Waits for a deletion to end: the pruner may see the claim and spare the checkpoint. Only
        warns if the storage fails.

        Raises:
            CheckpointNotFound: the checkpoint has just been deleted.
            CommitConflict: it is being deleted, and the deletion does not end.
        """
        key = layout.claim_key(self._trial)
        with self._warning():
            for seconds_left in range(DELETION_WAIT_SECONDS, -1, -1):
                try:
                    protect(self._store, name, key, self._claim(name.uuid))
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


def claims(store: CheckpointStore, last_saved: Mapping[str, str] | None = None) -> list[Claim]:
    """All claims that count. An unreadable claim counts, and needs no checkpoint.

    Args:
        last_saved: the time of each trial's last checkpoint, if known: the trial ran then.
    """
    trials = named_keys(store.storage, layout.CLAIMS, layout.parse_claim_key)
    found = (claim_of(store, trial, (last_saved or {}).get(trial, "")) for _, trial in trials)
    return [claim for claim in found if claim is not None]


def claim_of(store: CheckpointStore, trial: str, last_saved: str = "") -> Claim | None:
    """The claim of one trial, if it counts; `last_saved` as of `claims`. One request."""
    key = layout.claim_key(trial)
    unknown = Claim(trial=trial, by="unknown", at=utc_now(), needs=[], owner="", process="")
    claim = read_json(store.storage, key, Claim, unknown)
    if claim is None or is_older(max(claim.at, last_saved), CLAIM_LIFETIME):
        return None
    return msgspec.structs.replace(claim, trial=trial)


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
    found = intents(store.storage, trial)
    return {each.trial for each in found if not is_older(each.created_at, CLAIM_LIFETIME)}
