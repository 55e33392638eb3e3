"""Leftovers of trials that never run again: found, shown, then swept.

A run that dies in an upload leaves an intent, files and parts of files. Its trial's next run sweeps
them (see `intents`); but who starts a new trial instead leaves them for good. So whoever prunes
looks for them as well. No upload under way may be taken for one: a trial that runs, or may, says so
by a claim, or by an attempt, a commit or an intent that is young.

Whoever sweeps takes the trial over first, from the very attempt that it has seen: one that comes
meanwhile wins, and one that was taken for dead, and wakes, can commit nothing any more.
"""

from __future__ import annotations

import uuid as uuids
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

from trial_core.checkpoint import layout
from trial_core.checkpoint.fencing import last_attempts, take_over
from trial_core.checkpoint.intents import Intent, SweptUpload, intents
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CommitConflict, ConfigError
from trial_core.retention.claims import ABANDONED, Claim, claims

LEFTOVER_AGE_DAYS = 7.0
"""After so long without a sign of life a trial is taken for dead: longer than any upload takes, and
than most machines are away."""

MIN_LEFTOVER_AGE_DAYS = 1.0

# How the attempts of those who sweep are called: they are no sign of life.
_SWEEPER = "sweep-"


@dataclass(frozen=True)
class Leftover:
    """What is stored of a checkpoint that was never committed.

    Attributes:
        begun_at: when its upload began; empty where that cannot be read.
        files: how many are stored whole; there may be parts of others.
        keep: whether it stays, because its trial may be at work.
        why: for people to read.
    """

    trial: str
    uuid: str
    begun_at: str
    files: int
    size_bytes: int
    keep: bool
    why: str

    def row(self) -> dict[str, Any]:
        """As a row of a plan's table: see `Plan.rows`."""
        return {
            "action": "keep" if self.keep else "delete",
            "uuid": self.uuid,
            "trial": self.trial,
            "batches_trained": None,
            "created_at": self.begun_at,
            "total_bytes": self.size_bytes,
            "why": self.why,
        }


@dataclass(frozen=True)
class SweptLeftovers:
    """What came of a sweep.

    Attributes:
        swept: what is gone.
        spared: trials that have shown a sign of life since they were looked at, and which.
    """

    swept: tuple[SweptUpload, ...]
    spared: Mapping[str, str]

    @property
    def freed_bytes(self) -> int:
        """Size of what is gone, of files that were stored whole."""
        return sum(each.size_bytes for each in self.swept)


def find_leftovers(
    store: CheckpointStore,
    *,
    after_days: float = LEFTOVER_AGE_DAYS,
    trial: str | None = None,
    experiment: str | None = None,
) -> list[Leftover]:
    """What was begun to upload and is not committed, and whether it may go. Changes nothing.

    Args:
        after_days: how long a trial must have been without a sign of life.
        trial: of this trial alone.
        experiment: not of trials whose checkpoints are of another experiment. (Of a trial that has
            committed none, nothing says of which it is.)

    Raises:
        ConfigError: `after_days` is so short that an upload may take as long.
        StorageError: the storage cannot be read.
    """
    if not after_days >= MIN_LEFTOVER_AGE_DAYS:
        raise ConfigError(
            f"leftovers are given up after at least {MIN_LEFTOVER_AGE_DAYS:g} day, got {after_days:g}: what "
            "is being uploaded right now must not be taken for one"
        )
    seen = [_look(store, name) for name in _trials(store, trial)]
    return [
        leftover
        for each in _with_claims(store, seen)
        if experiment is None or each.experiment in (None, experiment)
        for leftover in _leftovers(store, each, timedelta(days=after_days))
    ]


def sweep_leftovers(
    store: CheckpointStore,
    leftovers: Iterable[Leftover],
    *,
    after_days: float = LEFTOVER_AGE_DAYS,
    on_swept: Callable[[SweptUpload], None] = lambda swept: None,
) -> SweptLeftovers:
    """Delete those that need not be kept, looking again before each trial. May be called again.

    Raises:
        StorageError: the storage failed; what is still there, the next sweep finds.
    """
    swept: list[SweptUpload] = []
    spared: dict[str, str] = {}
    for trial in dict.fromkeys(each.trial for each in leftovers if not each.keep):
        (seen,) = _with_claims(store, [_look(store, trial)])
        if not seen.begun:
            continue  # somebody else was quicker
        if reason := seen.why_alive(timedelta(days=after_days)):
            spared[trial] = reason
            continue
        try:
            attempt = f"{_SWEEPER}{uuids.uuid4()}"
            fence = take_over(store.storage, trial, attempt, after=seen.last_attempt)
            for each in store.sweep(trial, fence):
                on_swept(each)
                swept.append(each)
        except CommitConflict as error:
            spared[trial] = str(error)
    return SweptLeftovers(tuple(swept), spared)


@dataclass(frozen=True)
class _Seen:
    """What a trial shows of itself.

    Attributes:
        begun: uploads that are not committed.
        last_attempt: the number of the last one; 0: there is none.
        signs: when it did something; empty where that cannot be read.
        experiment: as its last checkpoint says.
    """

    trial: str
    begun: list[Intent]
    last_attempt: int
    signs: list[str]
    last_saved: str | None
    experiment: str | None
    claim: Claim | None = None

    def why_alive(self, age: timedelta) -> str | None:
        """Why it must be taken for alive, if it must."""
        if self.claim is not None:
            return (
                f"its trial runs, by {self.claim.by} since {self.claim.at}; or its driver was "
                f"killed: then run it again, or wait {ABANDONED.days} days"
            )
        ages = [_age(sign) for sign in self.signs]
        if None in ages:
            return "when its trial was last at work cannot be read: run it again"
        if any(each is not None and each <= age for each in ages):
            return (
                f"its trial was at work at {self.last_sign}, and is given up after {age.days} days"
            )
        return None

    @property
    def last_sign(self) -> str:
        """When it did something for the last time."""
        return max(self.signs, default="")


def _trials(store: CheckpointStore, trial: str | None) -> list[str]:
    """The trials that have intents."""
    if trial is not None and not layout.is_name(trial):
        return []
    folder = layout.UPLOADS if trial is None else layout.intents_folder(trial)
    keys = (key for key in store.storage.sizes(folder) if layout.parse_intent_key(key) is not None)
    return sorted({name for key in keys if layout.is_name(name := key.split("/")[1])})


def _look(store: CheckpointStore, trial: str) -> _Seen:
    begun = intents(store.storage, trial)  # first: what is committed meanwhile is then seen so
    manifests: list[Manifest] = store.list(trial)
    committed = {manifest.uuid for manifest in manifests}
    signs = [intent.created_at for intent in begun]
    signs += [manifest.created_at for manifest in manifests]
    numbers = []
    for number, token in last_attempts(store.storage, trial):
        numbers.append(number)
        if token is None or not token.attempt.startswith(_SWEEPER):
            signs.append(token.at if token is not None else "")
            break
    return _Seen(
        trial=trial,
        begun=[intent for intent in begun if intent.uuid not in committed],
        last_attempt=max(numbers, default=0),
        signs=signs,
        last_saved=manifests[-1].created_at if manifests else None,
        experiment=manifests[-1].experiment if manifests else None,
    )


def _with_claims(store: CheckpointStore, seen: list[_Seen]) -> list[_Seen]:
    """The same, and who claims to run them."""
    if not seen:
        return []
    last_saved = {each.trial: each.last_saved for each in seen if each.last_saved is not None}
    claimed = {claim.trial: claim for claim in claims(store, last_saved)}
    return [replace(each, claim=claimed.get(each.trial)) for each in seen]


def _leftovers(store: CheckpointStore, seen: _Seen, age: timedelta) -> list[Leftover]:
    reason = seen.why_alive(age)
    why = reason or f"never committed; its trial was last at work at {seen.last_sign}"
    found = []
    for intent in seen.begun:
        sizes = store.storage.sizes(layout.files_folder(intent.uuid))
        found.append(
            Leftover(
                trial=seen.trial,
                uuid=intent.uuid,
                begun_at=intent.created_at if _age(intent.created_at) is not None else "",
                files=len(sizes),
                size_bytes=sum(sizes.values()),
                keep=reason is not None,
                why=why,
            )
        )
    return found


def _age(at: str) -> timedelta | None:
    """How long ago that was; None where it is no time."""
    try:
        moment = datetime.fromisoformat(at.replace("Z", "+00:00"))  # Python 3.10 reads no Z
    except ValueError:
        return None
    return None if moment.tzinfo is None else datetime.now(timezone.utc) - moment
