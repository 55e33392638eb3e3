"""The owner of a trial: who ran it last, whether that run is live, and how another takes it over.

In a shared storage, `--resume` may find a trial of another user. Taking over a live trial ends its
run, so it is refused unless a person asks for it. A flow run that continues its own trial is
never refused: the trial's newest attempt has the flow run's id.

A new trial with the id of another run's trial would continue that trial, so it is refused. So is
continuing a trial that the storage does not know: it would be trained from the beginning.

A trial counts as live while it has a claim, unless the claim's process has ended. Only the machine
and the container in which it was written can tell that, until they are restarted: elsewhere, a
process number says nothing. A run deletes its claim at its end. A machine that was lost leaves its
claim, and nothing tells this from a machine that cannot be reached.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from trial_core.checkpoint.fencing import AttemptRecord, Fence, newest_attempts
from trial_core.checkpoint.retention.claims import RunClaim, claims
from trial_core.checkpoint.retention.leftovers import SWEEPER
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointNotFound, TrialflowError
from trial_core.processes.machine.process_identity import is_local, this_process


@contextmanager
def own_trial(
    store: CheckpointStore,
    trial: str,
    attempt: str,
    *,
    is_new: bool | None = None,
    take_over: bool = False,
    source: str | None = None,
    mark: str | None = None,
) -> Iterator[tuple[RunClaim, Fence]]:
    """Become the trial's newest attempt, and claim the trial while the block runs.

    Args:
        attempt: the attempt's id. The attempt that ran the trial last may always continue it.
        is_new: True if the caller has made up the trial's id: no other attempt may have run it.
            False if the storage must know the trial. None if it need not, as with a checkpoint from
            another place.
        take_over: True to take the trial from another run that may be live.
        source: see `RunClaim`.
        mark: see `CheckpointStore.take_over`. With a new trial, it says that an earlier attempt of
            the caller has begun the trial, so other records of attempts at it may be later ones.

    Raises:
        TrialflowError: another run that may be live has the trial; or a new trial's id is taken.
        CheckpointNotFound: the storage does not know the trial.
        StorageError: it is another storage than `mark` says.
        CommitConflict: another attempt has taken over the trial at the same time.
        Superseded: likewise.
    """
    attempts = list(newest_attempts(store.storage, trial))
    number, last = _last_attempt(attempts)
    has_begun = bool(is_new) and mark is not None  # a flow run, whose server says so
    records = [each for _, each in attempts]
    continues = has_begun if last is None else last.attempt == attempt
    if is_new is not None and not any(each and each.attempt == attempt for each in records):
        is_known = bool(attempts) or store.newest(trial) is not None
        # A record of its own may be unreadable, or deleted since as an old one.
        has_all = bool(attempts) and attempts[-1][0] == 1 and None not in records
        if is_new and is_known and (has_all or not has_begun):
            raise TrialflowError(
                f"trial {trial} is not begun: {store.url} has another trial with this id, "
                f"{describe_last_run(store, trial)}. Start a new run, which gets another id; to "
                "continue that trial, name it (`trialflow train --resume --trial`, or `trial` of "
                "the flow)"
            )
        if not is_new and not is_known:
            raise CheckpointNotFound(
                f"trial {trial} is not continued: {store.url} has neither an attempt at it nor a "
                "checkpoint of it. Check the trial's id, and that this is the storage in which it "
                "was trained and is mounted on this machine; or start a new trial"
            )
    if not continues and not take_over:
        _check_not_live(store, trial)
    # Not later than the check: of two runs that found the trial free, one gets it.
    after = None if continues or take_over else number
    fence = store.take_over(trial, attempt, after, mark)
    # A run that looked before this claim was there has the trial: nothing is lost yet.
    check = partial(fence.check, f"trial {trial} is not trained")
    with RunClaim(store, trial, source, check) as claim:
        yield claim, fence


def describe_last_run(store: CheckpointStore, trial: str) -> str:
    """Who ran a trial last, and when it was last active, for people."""
    _, last = _last_attempt(list(newest_attempts(store.storage, trial)))
    newest = store.newest(trial)
    facts = []
    if last is not None:
        facts.append(f"last started by {last.by} at {last.at}")
    if newest is not None:
        facts.append(f"last saved at {newest.created_at}")
    return ", ".join(facts) or "never run"


def _last_attempt(
    attempts: list[tuple[int, AttemptRecord | None]],
) -> tuple[int, AttemptRecord | None]:
    """The number of the newest attempt, 0 if there is none, and the record of the newest run: a
    sweep of leftovers is an attempt, but not a run."""
    runs = [each for _, each in attempts if each is None or not each.attempt.startswith(SWEEPER)]
    return max((number for number, _ in attempts), default=0), runs[0] if runs else None


def _check_not_live(store: CheckpointStore, trial: str) -> None:
    newest = store.newest(trial)
    saved = f", its last checkpoint is of {newest.created_at}" if newest else ""
    for claim in claims(store, trial, {trial: newest.created_at} if newest else {}):
        place = ""
        if claim.has_ended or (claim.is_of_this_host and claim.process == this_process()):
            continue
        if claim.is_of_this_host and not is_local(claim.process):
            place = (
                ", on another machine or container of this name, or before this machine was "
                "restarted"
            )
        raise TrialflowError(
            f"trial {trial} may be running: {claim.by} claimed it at {claim.at}{place}{saved}. "
            "Continuing it here would end that run. Wait until it has ended or stop it; if it "
            "cannot end any more, give --take-over (take_over=True in a flow or in fit); or "
            "start a new trial"
        )
