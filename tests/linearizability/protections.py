"""A committed checkpoint: pins, claims, prunes and deletions that meet.

What is promised (`checkpoint.retention.deletion_markers`), and so the model:

- A pin or a claim that returned: the checkpoint is there, and no prune deletes it until the pin is
  removed or the run has ended. A deletion by a person looks at pins only.
- A prune spares a checkpoint only for a pin or a claim that is there or is being made; a pin or a
  claim is refused only if the checkpoint is gone, or is being deleted. Both may give way.
- Weaker than one moment: a refused pin may stay, which is the safe side. What a prune that was
  killed had marked counts as being deleted, for an hour.
"""

from __future__ import annotations

import contextlib
import random
import uuid as uuids
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

from tests.linearizability.checker import Steps
from tests.linearizability.history import Event, Recorder
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.retention.claims import RunClaim
from trial_core.checkpoint.retention.protections import pin, unpin
from trial_core.checkpoint.retention.pruning import delete_checkpoint, plan_pruning, prune
from trial_core.checkpoint.retention_policy import RetentionPolicy
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointError, StorageError

KEEP_NONE = RetentionPolicy(save_trial_best=0, save_trial_latest=0)


class Kept(NamedTuple):
    """The state of a checkpoint.

    Attributes:
        may_be_left: whether a pin that was refused may still be stored.
        unpinning: removals of a pin that have seen it: of two at the same time, both succeed.
        pinning, claiming: pins and claims that are being made; a claim until its run has ended.
        claimed: claims that hold.
        deleting: deletions in progress, or of which the process was killed.
        giving_way: those of them that have seen a protection.
    """

    exists: bool = True
    is_pinned: bool = False
    may_be_left: bool = False
    pinning: frozenset[str] = frozenset()
    unpinning: frozenset[str] = frozenset()
    claiming: frozenset[str] = frozenset()
    claimed: frozenset[str] = frozenset()
    deleting: frozenset[str] = frozenset()
    giving_way: frozenset[str] = frozenset()


def initial(key: str) -> Kept:
    """The first state."""
    return Kept()


def parts(event: Event) -> Iterable[tuple[str, Steps]]:
    """The moments of an operation."""
    if event.name in ("prune", "delete"):
        parts: list[tuple[str, Steps]] = [("(mark)", partial(_mark, event))]
        if event.outcome != "spared":
            parts.append(("(delete)", partial(_delete, event)))
        else:
            parts.append(("(see)", partial(_see, event)))
        return parts + ([("", partial(_unmark, event))] if event.is_known else [])
    if event.name in ("pin", "claim"):
        return [("(write)", partial(_write, event)), ("", partial(_protect, event))]
    if event.name == "unpin":
        return [("(look)", partial(_look, event)), ("", partial(_unpin, event))]
    if event.name == "release":
        return [("", partial(_release, event))]
    return [("", partial(_verify, event))] if event.is_known else []


def _mark(event: Event, kept: Kept) -> Iterator[Kept]:
    yield kept._replace(deleting=kept.deleting | {event.id})


def _delete(event: Event, kept: Kept) -> Iterator[Kept]:
    is_needed = kept.is_pinned or (event.name == "prune" and kept.claimed)
    if event.id in kept.deleting and not (kept.exists and is_needed):
        yield kept._replace(exists=False)


def _see(event: Event, kept: Kept) -> Iterator[Kept]:
    is_pinned = kept.is_pinned or kept.may_be_left or kept.pinning
    is_needed = is_pinned or (event.name == "prune" and kept.claiming)
    if event.id in kept.deleting and is_needed:
        yield kept._replace(giving_way=kept.giving_way | {event.id})


def _unmark(event: Event, kept: Kept) -> Iterator[Kept]:
    has_ended = event.id in kept.giving_way if event.outcome == "spared" else not kept.exists
    if event.outcome in ("spared", "deleted") and event.id in kept.deleting and has_ended:
        own = {event.id}
        yield kept._replace(deleting=kept.deleting - own, giving_way=kept.giving_way - own)


def _write(event: Event, kept: Kept) -> Iterator[Kept]:
    if event.name == "pin":
        yield kept._replace(pinning=kept.pinning | {event.id})
    else:
        yield kept._replace(claiming=kept.claiming | {event.arguments["trial"]})


def _protect(event: Event, kept: Kept) -> Iterator[Kept]:
    trial = event.arguments.get("trial", "")
    if not (event.id in kept.pinning or trial in kept.claiming):
        return
    own = kept._replace(pinning=kept.pinning - {event.id})
    protecting = own._replace(is_pinned=True)
    if event.name == "claim":
        protecting = own._replace(claimed=own.claimed | {trial})
    if event.outcome == "done" and kept.exists:
        yield protecting
    is_refused = (event.outcome == "CheckpointNotFound" and not kept.exists) or (
        event.outcome == "CommitConflict" and kept.deleting
    )
    if is_refused:
        yield own._replace(may_be_left=own.may_be_left or event.name == "pin")
    if not event.is_known:
        yield from (own, protecting)


def _look(event: Event, kept: Kept) -> Iterator[Kept]:
    is_pinned = kept.is_pinned or kept.may_be_left or bool(kept.pinning)
    if event.outcome == "CheckpointNotFound":
        if not kept.is_pinned:
            yield kept
    elif is_pinned or not event.is_known:
        yield kept._replace(unpinning=kept.unpinning | {event.id})


def _unpin(event: Event, kept: Kept) -> Iterator[Kept]:
    if event.outcome == "CheckpointNotFound":
        yield kept
    elif event.id in kept.unpinning:
        others = kept.unpinning - {event.id}
        yield kept._replace(is_pinned=False, may_be_left=False, unpinning=others)


def _release(event: Event, kept: Kept) -> Iterator[Kept]:
    trial = {event.arguments["trial"]}
    yield kept._replace(claimed=kept.claimed - trial, claiming=kept.claiming - trial)
    if event.is_known:
        yield kept  # its deletion failed: it counts for 30 days


def _verify(event: Event, kept: Kept) -> Iterator[Kept]:
    if event.outcome == ("intact" if kept.exists else "CheckpointNotFound"):
        yield kept


class _Claim(RunClaim):
    """A claim that raises what a run only warns of, and does not wait for a deletion."""

    def _warning(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


class Actor:
    """A process that protects, deletes and reads checkpoints at random."""

    def __init__(
        self, store: CheckpointStore, recorder: Recorder, choose: random.Random, process: int
    ) -> None:
        self._store, self._recorder, self._choose = store, recorder, choose
        self._claims: list[tuple[str, _Claim]] = []
        self._manifests: dict[str, Manifest] = {}

    def act(self, keys: list[str]) -> None:
        """Do one operation."""
        key = self._choose.choice(keys)
        kinds = [self._pin, self._pin, self._unpin, self._claim, self._prune, self._delete]
        self._choose.choice([*kinds, self._verify])(key)

    def _pin(self, key: str) -> None:
        def make() -> str:
            pin(self._store, key, by=str(uuids.uuid4()))
            return "done"

        self._recorder.call("pin", key, make)

    def _unpin(self, key: str) -> None:
        def remove() -> str:
            unpin(self._store, key)
            return "done"

        self._recorder.call("unpin", key, remove)

    def _claim(self, key: str) -> None:
        if self._claims:
            claimed, claim = self._claims.pop()
            self._recorder.call("release", claimed, lambda: claim.__exit__(), trial=claim._trial)
            return
        manifest = self._manifest(key)
        if manifest is None:
            return
        trial = f"run-{uuids.uuid4().hex[:12]}"
        claim = _Claim(self._store, trial)
        self._claims.append((key, claim))

        def make() -> str:
            claim.__enter__()
            claim.renew(manifest.name)
            return "done"

        self._recorder.call("claim", key, make, trial=trial)

    def _prune(self, key: str) -> None:
        manifest = self._manifest(key)
        if manifest is None:
            return
        try:
            plan = plan_pruning(self._store, KEEP_NONE, manifest.experiment, trial=manifest.trial)
        except CheckpointError:
            return  # the storage failed; nothing is changed
        keys = [each.manifest.uuid for each in plan.deletions]

        def carry_out() -> dict[str, str]:
            result = prune(self._store, plan)
            return {
                **{each.uuid: "deleted" for each in result.deleted},
                **{each.manifest.uuid: "spared" for each in result.spared},
            }

        self._recorder.call_all("prune", keys, carry_out)

    def _delete(self, key: str) -> None:
        manifest = self._manifest(key)
        if manifest is None or self._choose.random() < 0.7:
            return

        def delete() -> str:
            try:
                delete_checkpoint(self._store, manifest)
            except StorageError:
                raise
            except CheckpointError:
                return "spared"
            return "deleted"

        self._recorder.call("delete", key, delete)

    def _verify(self, key: str) -> None:
        def verify() -> str:
            self._manifests[key] = self._store.verify(key)
            return "intact"

        self._recorder.call("verify", key, verify)

    def _manifest(self, key: str) -> Manifest | None:
        if key not in self._manifests:
            self._verify(key)
        return self._manifests.get(key)
