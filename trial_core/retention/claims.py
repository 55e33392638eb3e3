"""Claims: a run's word of what it needs, so that nobody's rules take it away meanwhile.

A run on another machine can be seen by nothing but what it leaves in the storage::

    claims/{trial}.json     the trial runs, since when, where, and what it has started from

The claim goes when the run ends, however it ends, unless its driver is killed. One that is left
over counts for `ABANDONED`; what it keeps in the storage until then is a checkpoint or two. An
upload under way (see `intents`) also tells of a run.

Which attempt at a trial may commit is told elsewhere (see `fencing`): that stays when the run ends,
while every prune reads all claims, of which there are thus no more than runs.
"""

from __future__ import annotations

import logging
import uuid as uuids
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.intents import read_intent
from trial_core.checkpoint.json_objects import encode_json, is_older, user_at_host
from trial_core.checkpoint.manifest import Timestamp, utc_now
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError

CLAIMS = "claims"
ABANDONED = timedelta(days=30)

_logger = logging.getLogger(__name__)


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """That a trial runs.

    Attributes:
        trial: which.
        by: who drives it: ``user@host``.
        at: when it began, or last said so: ISO 8601, UTC.
        needs: uuids of the checkpoints that it has started from, or how they begin.
        owner: id of the run: another one may have claimed the same trial since.
    """

    trial: str
    by: str
    at: Timestamp
    needs: list[str]
    owner: str = ""

    def why(self) -> str:
        """For people to read."""
        return f"trial {self.trial} runs, by {self.by}, and has started from it"


class RunClaim:
    """The claim of a run under way.

    Args:
        source: what it has begun with, if that is another trial's checkpoint: its uuid, or how it
            begins. Needed to the end: until the trial has saved, a restart begins with it again.
    """

    def __init__(self, store: CheckpointStore, trial: str, source: str | None = None) -> None:
        self._store = store
        self._trial = trial
        self._source = source
        self._owner = uuids.uuid4().hex

    def renew(self, uuid: str | None) -> None:
        """Say that the run goes on, and from which checkpoint, besides its source.

        A storage that fails is no reason not to train: it is warned of.
        """
        needs = [each for each in (self._source, uuid) if each is not None]
        claim = Claim(
            trial=self._trial, by=user_at_host(), at=utc_now(), needs=needs, owner=self._owner
        )
        try:
            self._store.storage.write(claim_key(self._trial), encode_json(claim))
        except StorageError as error:
            _logger.warning(
                "whoever deletes checkpoints does not know that trial %s runs: %s",
                self._trial, error,
            )  # fmt: skip

    def release(self) -> None:
        """The run is over: nothing is needed any more. What another run has claimed since stays."""
        key = claim_key(self._trial)
        try:
            data = self._store.storage.read(key)
            if data is not None and msgspec.json.decode(data, type=Claim).owner == self._owner:
                self._store.storage.remove(key)
        except (StorageError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            _logger.warning("%s stays behind: %s", key, error)


@contextmanager
def claim_run(store: CheckpointStore, trial: str, source: str | None = None) -> Iterator[RunClaim]:
    """Claim what a trial needs for as long as the block runs. One process a trial.

    Args:
        source: see `RunClaim`.
    """
    claim = RunClaim(store, trial, source)
    claim.renew(None)
    try:
        yield claim
    finally:
        claim.release()


def claim_key(trial: str) -> str:
    """The key of a trial's claim."""
    return f"{CLAIMS}/{trial}.json"


def claims(store: CheckpointStore, last_saved: Mapping[str, str] | None = None) -> list[Claim]:
    """All claims but those that were abandoned. One that cannot be read needs nothing by name.

    Args:
        last_saved: when trials have last saved, as far as that is known: so they ran still.
    """
    found = []
    for key in sorted(store.storage.sizes(CLAIMS)):
        trial = key.removeprefix(f"{CLAIMS}/").removesuffix(".json")
        data = store.storage.read(key) if layout.is_name(trial) else None
        if data is None:
            continue  # it has just ended
        try:
            claim = msgspec.json.decode(data, type=Claim)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            claim = Claim(trial=trial, by="unknown", at=utc_now(), needs=[])
        last_seen = max(claim.at, (last_saved or {}).get(trial, ""))
        if not is_older(last_seen, ABANDONED):
            found.append(msgspec.structs.replace(claim, trial=trial))
    return found


def uploading(store: CheckpointStore) -> set[str]:
    """The trials of which a checkpoint is being uploaded, but for uploads that were abandoned."""
    found = set()
    for key in sorted(store.storage.sizes(layout.UPLOADS)):
        uuid, trial = layout.parse_intent_key(key), key.split("/")[1]
        intent = read_intent(store.storage, trial, uuid) if uuid is not None else None
        if intent is not None and not (
            intent.created_at and is_older(intent.created_at, ABANDONED)
        ):
            found.add(trial)
    return found
