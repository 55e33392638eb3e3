"""A trial: take-over, sweep, announce, commit, delete, and what readers see of it.

What is promised (`checkpoint.fencing`, `checkpoint.commit`), and so the model:

- Each take-over gets the next number; numbers are never reused.
- An attempt announces an upload, and begins to commit it, only while its number is the newest. A
  commit that has begun may still succeed after a later attempt's take-over, but not after that
  attempt's sweep. So take-over alone is no fence for a commit in progress: a commit has two
  moments, one for the fence and one for the manifest.
- A commit that returned is listed by every later list until it is deleted. A list is one moment.
- Weaker than one moment: a commit that a sweep has beaten may show its manifest, without files,
  until it removes it again; if its process is killed before that, for ever. Here it is a ghost: a
  list may have it, but what a run resumes from is verified, and never is a ghost.
"""

from __future__ import annotations

import random
import uuid as uuids
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

from tests.linearizability.checker import Steps
from tests.linearizability.history import Event, Recorder
from tests.support.manifests import put_files
from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointDamaged, CheckpointNotFound

EXPERIMENT = "linear"


class Trial(NamedTuple):
    """The state of a trial. Checkpoints are pairs of their batches and their uuid.

    Attributes:
        newest: number of the newest attempt.
        swept: number of the last attempt that has swept.
        begun: commits that have passed the fence.
    """

    newest: int = 0
    swept: int = 0
    begun: frozenset[str] = frozenset()
    committed: frozenset[tuple[int, str]] = frozenset()
    ghosts: frozenset[tuple[int, str]] = frozenset()


def initial(key: str) -> Trial:
    """The first state."""
    return Trial()


def parts(event: Event) -> Iterable[tuple[str, Steps]]:
    """The moments of an operation."""
    number = event.arguments.get("number", 0)
    if event.name == "upload":
        return []
    if event.name == "take_over":
        return [("", partial(_take_over, event))]
    if event.name == "delete":
        return [("", partial(_delete, event))]
    if event.name == "commit":
        if event.outcome == "done":
            return [("(fence)", partial(_begin, event)), ("", partial(_commit, event))]
        undo = [("(removed)", partial(_remove, event))] if not event.is_known else []
        return [
            ("(fence)", lambda trial: {*_begin(event, trial), trial}),
            ("(manifest)", partial(_maybe_commit, event)),
            *undo,
            *([("", partial(_refused, event))] if event.is_known else []),
        ]
    if not event.is_known and event.name != "sweep":
        return []  # it changes nothing
    if event.name == "sweep":
        return [("", partial(_sweep, event))]
    if event.name == "announce":
        return [("", lambda trial: _announce(event, number, trial))]
    return [("", partial(_read, event))]


def _take_over(event: Event, trial: Trial) -> Iterator[Trial]:
    after = event.arguments["after"]
    is_allowed = after in (None, trial.newest)
    if event.outcome == "CommitConflict":
        if not is_allowed:
            yield trial
    elif is_allowed and event.outcome in (None, trial.newest + 1):
        yield trial._replace(newest=trial.newest + 1)


def _announce(event: Event, number: int, trial: Trial) -> Iterator[Trial]:
    if event.outcome == ("done" if trial.newest == number else "Superseded"):
        yield trial


def _sweep(event: Event, trial: Trial) -> Iterator[Trial]:
    number = event.arguments["number"]
    if event.outcome == "Superseded":
        if trial.newest > number:
            yield trial
    elif not {uuid for _, uuid in trial.committed} & set(event.outcome or []):
        yield trial._replace(swept=max(trial.swept, number))


def _begin(event: Event, trial: Trial) -> Iterator[Trial]:
    if trial.newest == event.arguments["number"]:
        yield trial._replace(begun=trial.begun | {event.id})


def _checkpoint(event: Event) -> tuple[int, str]:
    return event.arguments["batches"], event.arguments["uuid"]


def _commit(event: Event, trial: Trial) -> Iterator[Trial]:
    checkpoint = _checkpoint(event)
    # An attempt sweeps before it uploads, so its own sweep stops no commit of its own.
    is_swept = trial.swept > event.arguments["number"]
    if event.id in trial.begun and (checkpoint in trial.committed or not is_swept):
        yield trial._replace(committed=trial.committed | {checkpoint})


def _maybe_commit(event: Event, trial: Trial) -> Iterator[Trial]:
    """A commit that was refused after it wrote the manifest, or whose outcome is not known."""
    if event.is_known or event.id not in trial.begun:
        yield trial
    if event.id in trial.begun:
        if not event.is_known:
            yield from _commit(event, trial)
        if trial.newest > event.arguments["number"]:
            yield trial._replace(ghosts=trial.ghosts | {_checkpoint(event)})


def _remove(event: Event, trial: Trial) -> Iterator[Trial]:
    yield trial._replace(ghosts=trial.ghosts - {_checkpoint(event)})


def _refused(event: Event, trial: Trial) -> Iterator[Trial]:
    if event.outcome == "Superseded" and trial.newest > event.arguments["number"]:
        yield from _remove(event, trial)


def _delete(event: Event, trial: Trial) -> Iterator[Trial]:
    if event.outcome in (None, "done"):
        yield trial._replace(committed=trial.committed - {_checkpoint(event)})


def _read(event: Event, trial: Trial) -> Iterator[Trial]:
    listed = trial.committed | trial.ghosts
    seen = {
        "list": [uuid for _, uuid in sorted(listed)],
        "newest": max(listed)[1] if listed else None,
        "resume": max(trial.committed)[1] if trial.committed else None,
    }
    if event.outcome == seen[event.name]:
        yield trial


class Actor:
    """A process that runs a trial, now and then: what it does at random."""

    def __init__(
        self, store: CheckpointStore, recorder: Recorder, choose: random.Random, process: int
    ) -> None:
        self._store, self._recorder, self._choose = store, recorder, choose
        self._process = process
        self._fence: Fence | None = None
        self._saves = 0
        self._uncertain: list[tuple[Manifest, Fence]] = []
        self._saved: list[Manifest] = []

    def act(self, keys: list[str]) -> None:
        """Do one operation, or a few that belong together."""
        (key,) = keys
        if self._fence is None:
            self._take_over(key)
            return
        kinds = [self._take_over, self._save, self._save, self._save, self._look, self._retry]
        self._choose.choice(kinds)(key)

    def _take_over(self, key: str) -> None:
        after = None
        if self._fence is not None and self._choose.random() < 0.3:
            after = self._fence.number  # a person who believes this attempt to be the newest

        def take_over() -> int:
            self._fence = self._store.take_over(key, str(uuids.uuid4()), after)
            return self._fence.number

        if not isinstance(self._recorder.call("take_over", key, take_over, after=after), int):
            return
        fence = self._fence
        assert fence is not None
        self._recorder.call(
            "sweep",
            key,
            lambda: [each.uuid for each in self._store.sweep(key, fence) if each.uuid],
            number=fence.number,
        )
        self._resume(key)

    def _save(self, key: str) -> None:
        fence = self._fence
        assert fence is not None
        self._saves += 1
        batches = 10 * self._saves + self._process  # different for all checkpoints of a trial
        uuid = str(uuids.uuid4())

        def announce() -> str:
            self._store.announce_upload(key, uuid, fence.attempt, fence)
            return "done"

        if self._recorder.call("announce", key, announce, number=fence.number) != "done":
            return
        uploaded: list[Manifest] = []

        def put() -> None:
            files = {"model": uuid.encode()}
            uploaded.append(put_files(self._store, batches, files, uuid=uuid, trial=key))

        self._recorder.call("upload", key, put)
        if uploaded:
            self._commit(key, uploaded[0], fence)

    def _commit(
        self, key: str, manifest: Manifest, fence: Fence, *, is_retry: bool = False
    ) -> None:
        batches = manifest.progress.batches_trained
        named = {"uuid": manifest.uuid, "batches": batches}

        def commit() -> str:
            self._store.commit(manifest, fence)
            return "done"

        outcome = self._recorder.call("commit", key, commit, number=fence.number, **named)
        if outcome is None:
            self._uncertain.append((manifest, fence))
        elif outcome == "done" and not is_retry:  # the first request may still be on its way
            self._saved.append(manifest)
            if self._choose.random() < 0.5:
                self._delete_oldest(key)

    def _delete_oldest(self, key: str) -> None:
        """As the rule to keep the latest checkpoint."""
        if len(self._saved) < 2:
            return
        manifest = self._saved.pop(0)
        named = {"uuid": manifest.uuid, "batches": manifest.progress.batches_trained}

        def delete() -> str:
            self._store.delete(manifest)
            return "done"

        self._recorder.call("delete", key, delete, **named)

    def _retry(self, key: str) -> None:
        if self._uncertain:
            manifest, fence = self._uncertain.pop()
            self._commit(key, manifest, fence, is_retry=True)
        else:
            self._look(key)

    def _look(self, key: str) -> None:
        kind = self._choose.choice(["list", "newest", "resume"])
        if kind == "resume":
            self._resume(key)
        elif kind == "list":
            self._recorder.call("list", key, lambda: self._listed(key))
        else:
            self._recorder.call("newest", key, lambda: self._newest(key))

    def _listed(self, key: str) -> list[str]:
        found = self._store.list(key)
        return [each.uuid for each in sorted(found, key=lambda each: each.progress.batches_trained)]

    def _newest(self, key: str) -> str | None:
        newest = self._store.newest(key)
        return newest.uuid if newest is not None else None

    def _resume(self, key: str) -> None:
        self._recorder.call("resume", key, lambda: self._intact(key))

    def _intact(self, key: str) -> str | None:
        """The first intact checkpoint to resume from, as a run looks for it."""
        while True:
            is_stale = False
            for manifest in self._store.resume_candidates(key):
                try:
                    return self._store.verify(manifest.uuid).uuid
                except CheckpointNotFound:
                    is_stale = True  # deleted since: look again
                    break
                except CheckpointDamaged:
                    continue
            if not is_stale:
                return None
