"""Leftovers of trials that never run again: find them, show them, sweep them.

A run that dies during an upload leaves an intent, files and partial uploads. The trial's next run
sweeps them (see `checkpoint.intents`). If the trial never runs again, a prune does.

An upload in progress must not be swept. A trial that runs, or may run, shows it by a claim, or by
an attempt, a checkpoint or an intent younger than a number of days. If the newest attempt's claim
names a driver that is known to have ended, on this machine, no age is waited for.

The sweep first takes over the trial, from the newest attempt that it has seen. So a run that starts
at the same time wins, and a presumed-dead run that wakes up can no longer commit.

Orphaned files are a checkpoint's files that have neither an intent nor a manifest. A sweep deletes
the intent of a superseded attempt. That attempt may upload until its ranks are ended, and no later
sweep of a trial finds these files: nothing says which trial they belong to.

Files of an upload in progress are never orphaned. Its intent is written before its first byte, and
is deleted only when the manifest is there. So the files are listed first, then the intents, then
the manifests. A file whose checkpoint was deleted is not orphaned while another one refers to it.
Orphaned files are also old by the storage's own clock, no protection or claim names their
checkpoint, and no key of an intent or a manifest contains its uuid, readable or not.
"""

from __future__ import annotations

import logging
import uuid as uuids
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from trial_core.checkpoint import layout
from trial_core.checkpoint.fencing import newest_attempts
from trial_core.checkpoint.intents import Intent, SweptUpload, intent_names, intents
from trial_core.checkpoint.json_objects import age_of, warn_of_foreign_object
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.references import why_unknown
from trial_core.checkpoint.retention.claims import CLAIM_LIFETIME, Claim, claims
from trial_core.checkpoint.retention.protections import protected
from trial_core.checkpoint.storage.base import StoredObject
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CommitConflict, ConfigError

LEFTOVER_AGE_DAYS = 7.0
"""After this time without activity a trial is presumed dead: longer than any upload takes, and than
most machines are away."""

MIN_LEFTOVER_AGE_DAYS = 1.0
MAX_LEFTOVER_AGE_DAYS = 3650.0

SWEEPER = "sweep-"
"""Prefix of the ids of sweeping attempts, which do not count as activity of the trial."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Leftover:
    """The stored part of a checkpoint that was never committed.

    Attributes:
        trial: None for orphaned files.
        begun_at: start of its upload, or the end if the trial is not known; empty if unreadable.
        files: number of complete files. There may be partial uploads of others.
        keep: True if it stays, because its trial may be running.
    """

    trial: str | None
    uuid: str
    begun_at: str
    files: int
    size_bytes: int
    keep: bool
    why: str

    def row(self) -> dict[str, Any]:
        """The leftover as a row of a plan's table: see `PruningPlan.rows`."""
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
    """The result of a sweep. `spared`: trials that have become active since they were listed, and
    the activity seen."""

    swept: tuple[SweptUpload, ...]
    spared: Mapping[str, str]

    @property
    def freed_bytes(self) -> int:
        """Total size of the complete files that were deleted."""
        return sum(each.size_bytes for each in self.swept)


def find_leftovers(
    store: CheckpointStore,
    *,
    after_days: float = LEFTOVER_AGE_DAYS,
    trial: str | None = None,
    experiment: str | None = None,
) -> list[Leftover]:
    """All uploads that are not committed, and whether each may be deleted: its trial must have been
    inactive for `after_days`. Changes nothing. Raises ConfigError if that is so short that an
    upload may take as long, or longer than ten years.

    With an `experiment`, skips trials whose checkpoints belong to another one; but not a trial
    without checkpoints, nor orphaned files: nothing says which experiment they belong to.
    """
    if not after_days >= MIN_LEFTOVER_AGE_DAYS:
        raise ConfigError(
            f"the age of leftovers must be at least {MIN_LEFTOVER_AGE_DAYS:g} day, got "
            f"{after_days:g}: an upload in progress would be deleted"
        )
    if after_days > MAX_LEFTOVER_AGE_DAYS:
        raise ConfigError(
            f"the age of leftovers must be at most {MAX_LEFTOVER_AGE_DAYS:g} days, got "
            f"{after_days:g}"
        )
    age = timedelta(days=after_days)
    announced = sorted({name.trial for name in intent_names(store.storage, trial)})
    activities = [_read_activity(store, name) for name in announced]
    found = [
        leftover
        for each in activities
        if experiment is None or each.experiment in (None, experiment)
        for leftover in _leftovers(store, each, age)
    ]
    return found + (find_orphaned_files(store, age) if trial is None else [])


def sweep_leftovers(
    store: CheckpointStore,
    leftovers: Iterable[Leftover],
    *,
    after_days: float = LEFTOVER_AGE_DAYS,
    on_swept: Callable[[SweptUpload], None] = lambda swept: None,
) -> SweptLeftovers:
    """Delete the leftovers that need not be kept. Looks at each trial's activity again before it
    deletes anything of it.

    May be repeated after an error: StorageError if the storage failed, or its clock and this
    machine's differ. The next sweep deletes the rest.
    """
    swept: list[SweptUpload] = []
    spared: dict[str, str] = {}
    unwanted = [each for each in leftovers if not each.keep]
    if unwanted:
        store.storage.check_usable()  # clocks decide which trials are dead
    for uuid in [each.uuid for each in unwanted if each.trial is None]:
        orphaned = sweep_orphaned_files(store, uuid, timedelta(days=after_days))
        if orphaned is not None:
            on_swept(orphaned)
            swept.append(orphaned)
    for trial in dict.fromkeys(each.trial for each in unwanted if each.trial is not None):
        activity = _read_activity(store, trial)
        if not activity.begun:
            continue  # another sweep has deleted them
        if reason := activity.why_alive(timedelta(days=after_days)):
            spared[trial] = reason
            continue
        try:
            attempt = f"{SWEEPER}{uuids.uuid4()}"
            fence = store.take_over(trial, attempt, activity.newest_attempt)
            for each in store.sweep(trial, fence):
                on_swept(each)
                swept.append(each)
        except CommitConflict as error:
            spared[trial] = str(error)
    return SweptLeftovers(tuple(swept), spared)


def sweep_orphaned_files(store: CheckpointStore, uuid: str, age: timedelta) -> SweptUpload | None:
    """Delete a checkpoint's files if they are still orphaned; None if they are not, or are gone."""
    folder = layout.files_folder(uuid)
    if not find_orphaned_files(store, age, folder):
        return None
    return SweptUpload(uuid, None, *store.storage.clear(folder, store.references().keys))


def find_orphaned_files(
    store: CheckpointStore, age: timedelta, folder: str = layout.CHECKPOINTS
) -> list[Leftover]:
    """The orphaned files below a folder that are older than `age`, by checkpoint, with unfinished
    uploads. Changes nothing."""
    by_uuid: dict[str, list[tuple[str, StoredObject]]] = {}
    stored = [*store.storage.unfinished_uploads(folder), *store.storage.objects(folder).items()]
    for key, file in stored:
        by_uuid.setdefault(key.split("/")[1], []).append((key, file))
    announced = "\n".join(store.storage.sizes(layout.UPLOADS))
    committed = "\n".join(store.storage.sizes(layout.MANIFESTS))
    unnamed = [uuid for uuid in by_uuid if uuid not in announced and uuid not in committed]
    for name in sorted(each for each in unnamed if not _is_uuid(each)):
        warn_of_foreign_object(store.storage, f"{layout.CHECKPOINTS}/{name}")
    if not any(map(_is_uuid, unnamed)):
        return []
    references = store.references()
    if (why := why_unknown(store.storage, references)) is not None:
        _logger.warning("orphaned files stay: %s", why)
        return []
    now = store.storage.now()
    needed = [prefix for claim in claims(store) for prefix in claim.needs if prefix]
    found = []
    for uuid in filter(_is_uuid, unnamed):
        files = [file for key, file in by_uuid[uuid] if key not in references.keys]
        times = [file.modified_at for file in files if file.modified_at is not None]
        if not files:
            continue
        if now is None or len(times) < len(files):
            _logger.warning(
                "%s has neither a manifest nor an intent, and stays: the storage does not tell how "
                "old it is; delete it if no run uploads it",
                store.files_url(uuid),
            )
        elif (
            now - max(times) > age
            and not any(uuid.startswith(prefix) for prefix in needed)
            and not protected(store, uuid)
        ):
            at = max(times).isoformat(timespec="seconds")
            why = f"neither committed nor announced; last written at {at}"
            size_bytes = sum(file.size_bytes for file in files)
            found.append(Leftover(None, uuid, at, len(files), size_bytes, keep=False, why=why))
    return found


def _is_uuid(text: str) -> bool:
    """Return whether a folder's name is a uuid, as a checkpoint's is."""
    try:
        return str(uuids.UUID(text)) == text
    except ValueError:
        return False


@dataclass(frozen=True)
class _TrialActivity:
    """A trial's activity, as the storage shows it.

    Attributes:
        begun: uploads that are not committed.
        times: when the trial was active; empty text if unreadable.
        claim: of a run that may be alive.
        ended: the claim of its newest attempt, if that attempt's driver is known to have ended.
    """

    trial: str
    begun: list[Intent]
    newest_attempt: int
    times: list[str]
    experiment: str | None
    claim: Claim | None
    ended: Claim | None

    def why_alive(self, age: timedelta) -> str | None:
        """Why the trial must be presumed alive; None if it is presumed dead."""
        if self.claim is not None:
            return (
                f"its trial runs, by {self.claim.by} since {self.claim.at}; if its driver was "
                "killed, prune there, run the trial again or wait "
                f"{CLAIM_LIFETIME.days} days"
            )
        if self.ended is not None:
            return None
        ages = [age_of(at) for at in self.times]
        if None in ages:
            return "its trial's last activity is unreadable: run the trial again"
        if any(each is not None and each <= age for each in ages):
            return (
                f"its trial was active at {self.last_active}, and is presumed dead after "
                f"{age / timedelta(days=1):g} days"
            )
        return None

    @property
    def last_active(self) -> str:
        return max(self.times, default="")


def _read_activity(store: CheckpointStore, trial: str) -> _TrialActivity:
    begun = intents(store.storage, trial)  # before the manifests: one may be committed meanwhile
    manifests: list[Manifest] = store.list(trial)
    committed = {manifest.uuid for manifest in manifests}
    times = [intent.created_at for intent in begun]
    times += [manifest.created_at for manifest in manifests]
    numbers, last = [], None
    for number, record in newest_attempts(store.storage, trial):
        numbers.append(number)
        if record is None or not record.attempt.startswith(SWEEPER):
            times.append(record.at if record is not None else "")
            last = record
            break
    found = claims(store, trial, {each.trial: each.created_at for each in manifests})
    alive = [claim for claim in found if not claim.has_ended]
    newest = max(found, key=lambda claim: claim.at, default=None)
    if alive or last is None or newest is None or newest.by != last.by or newest.at < last.at:
        newest = None
    return _TrialActivity(
        trial=trial,
        begun=[intent for intent in begun if intent.uuid not in committed],
        newest_attempt=max(numbers, default=0),
        times=times,
        experiment=manifests[-1].experiment if manifests else None,
        claim=alive[0] if alive else None,
        ended=newest,
    )


def _leftovers(store: CheckpointStore, activity: _TrialActivity, age: timedelta) -> list[Leftover]:
    reason = activity.why_alive(age)
    ended = f"its driver, {activity.ended.by}, has ended; " if activity.ended else ""
    why = reason or f"never committed; {ended}its trial was last active at {activity.last_active}"
    found = []
    for intent in activity.begun:
        sizes = store.storage.sizes(layout.files_folder(intent.uuid))
        at = intent.created_at if age_of(intent.created_at) is not None else ""
        size_bytes, keep = sum(sizes.values()), reason is not None
        found.append(
            Leftover(activity.trial, intent.uuid, at, len(sizes), size_bytes, keep=keep, why=why)
        )
    return found
