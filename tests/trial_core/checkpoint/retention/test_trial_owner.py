"""A run does not take a live trial from another one, unless a person asks for it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from tests.support.manifests import LONG_AGO, commit_files
from trial_core.checkpoint.fencing import ATTEMPTS_KEPT, Fence
from trial_core.checkpoint.json_objects import encode_json, user_at_host
from trial_core.checkpoint.layout import attempt_key, claim_key
from trial_core.checkpoint.manifest import utc_now
from trial_core.checkpoint.retention import trial_owner
from trial_core.checkpoint.retention.claims import Claim, claims
from trial_core.checkpoint.retention.leftovers import SWEEPER
from trial_core.checkpoint.retention.trial_owner import describe_last_run, own_trial
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import (
    CheckpointNotFound,
    CommitConflict,
    StorageError,
    Superseded,
    TrialflowError,
)
from trial_core.processes.machine.process_identity import this_process

TRIAL = "gpt-0000beef"
OURS = user_at_host()
DEAD = "4194303@1"  # no machine has so old a process


def leave_claim(store: CheckpointStore, attempt: str, **changes: str) -> Claim:
    """What a run that was killed leaves, or a run that lives: its attempt and its claim."""
    store.take_over(TRIAL, attempt)
    claim = Claim(trial=TRIAL, by="ann@far", at=utc_now(), needs=[], owner="x", process=DEAD)
    claim = msgspec.structs.replace(claim, **changes)
    store.storage.write(claim_key(TRIAL), encode_json(claim))
    return claim


def test_a_trial_that_may_live_on_another_host_is_refused(local_store: CheckpointStore) -> None:
    """The message says whose it is, since when, and how to continue. Nothing is changed."""
    claim = leave_claim(local_store, "theirs")
    with (
        pytest.raises(TrialflowError, match=f"ann@far claimed it at {claim.at}.* --take-over"),
        own_trial(local_store, TRIAL, "ours"),
    ):
        pass
    assert claims(local_store) == [claim]
    assert local_store.take_over(TRIAL, "next").number == 2
    with own_trial(local_store, TRIAL, "ours", take_over=True) as (_, fence):
        assert fence.is_newest()


def test_a_live_process_of_this_host_is_respected(local_store: CheckpointStore) -> None:
    """Its run may have another folder of runs, and so another lock. A dead one is no obstacle."""
    with subprocess.Popen(
        [
            sys.executable, "-c",
            "import sys; from trial_core.processes.machine.process_identity import this_process\n"
            "print(this_process(), flush=True); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        leave_claim(local_store, "theirs", by=OURS, process=other.stdout.readline().strip())
        refused = pytest.raises(TrialflowError, match="may be running")
        with refused as raised, own_trial(local_store, TRIAL, "ours"):
            pass
        assert "another machine" not in str(raised.value)
        other.kill()
        other.wait()
        with own_trial(local_store, TRIAL, "ours"):
            pass


def test_a_number_that_another_process_has_now_is_not_the_claims(
    local_store: CheckpointStore,
) -> None:
    """Process numbers are used again, after a reboot at once."""
    leave_claim(local_store, "theirs", by=OURS, process="1@1000000000")
    with own_trial(local_store, TRIAL, "ours"):
        pass


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"boot": "00000000-0000-4000-8000-000000000000"},
        pytest.param({"namespace": "1"}, marks=pytest.mark.long),
    ],
    ids=["machine", "container"],
)
def test_another_machine_of_the_same_name_is_another_host(
    local_store: CheckpointStore, elsewhere: dict[str, str]
) -> None:
    """Two are called `localhost`; containers share a name. Their process numbers say nothing."""
    own = dict(zip(("process", "boot", "namespace"), this_process().split("/"), strict=True))
    theirs = "/".join({**own, "process": DEAD, **elsewhere}.values())
    leave_claim(local_store, "theirs", by=OURS, process=theirs)
    with (
        pytest.raises(TrialflowError, match="another machine or container of this name"),
        own_trial(local_store, TRIAL, "ours"),
    ):
        pass
    leave_claim(local_store, "dead", by=OURS, process="/".join({**own, "process": DEAD}.values()))
    with own_trial(local_store, TRIAL, "ours"):
        pass


def test_an_unreadable_claim_counts_as_live(local_store: CheckpointStore) -> None:
    """It names no process."""
    local_store.storage.write(
        claim_key(TRIAL),
        f'{{"trial":"{TRIAL}","by":"{OURS}","at":"{utc_now()}","needs":[]}}'.encode(),
    )
    with (
        pytest.raises(TrialflowError, match="may be running"),
        own_trial(local_store, TRIAL, "ours"),
    ):
        pass


def test_a_flow_run_continues_its_own_trial(local_store: CheckpointStore) -> None:
    """Wherever its last attempt died, and also if a prune has swept the leftovers since."""
    leave_claim(local_store, "same-flow-run")
    with own_trial(local_store, TRIAL, "same-flow-run"):
        pass
    leave_claim(local_store, "same-flow-run")
    local_store.take_over(TRIAL, "sweep-1")
    with own_trial(local_store, TRIAL, "same-flow-run") as (_, fence):
        assert fence.is_newest()


def test_an_ended_or_forgotten_trial_may_be_continued(local_store: CheckpointStore) -> None:
    """A run deletes its claim at its end; the claim of a lost machine does not count for ever."""
    with own_trial(local_store, TRIAL, "theirs"):
        pass
    with own_trial(local_store, TRIAL, "ours") as (_, fence):
        assert fence.number == 2
    leave_claim(local_store, "theirs", at=LONG_AGO)
    with own_trial(local_store, TRIAL, "ours"):
        pass


def test_of_two_runs_that_find_the_trial_free_one_gets_it(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one takes over between this one's look and its own take-over."""
    look = trial_owner._check_not_live

    def look_late(store: CheckpointStore, trial: str) -> None:
        look(store, trial)
        store.take_over(trial, "other")

    monkeypatch.setattr(trial_owner, "_check_not_live", look_late)
    with (
        pytest.raises(CommitConflict, match="leave the trial to that attempt"),
        own_trial(local_store, TRIAL, "ours"),
    ):
        pass
    assert claims(local_store) == []


def test_a_flow_run_continues_its_trial_after_a_sweep_in_between(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep is an attempt, too; the trial is this run's whatever comes between."""
    with own_trial(local_store, TRIAL, "ours"):
        pass
    take_over = CheckpointStore.take_over

    def take_over_late(store: CheckpointStore, *arguments: Any) -> Fence:
        monkeypatch.undo()
        store.take_over(TRIAL, f"{SWEEPER}abc")
        return take_over(store, *arguments)

    monkeypatch.setattr(CheckpointStore, "take_over", take_over_late)
    with own_trial(local_store, TRIAL, "ours") as (_, fence):
        assert fence.is_newest()


def test_a_run_that_is_superseded_before_it_has_claimed_does_not_begin(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one came between its take-over and its claim, and saw no claim."""
    take_over = CheckpointStore.take_over

    def take_over_twice(*args: object) -> object:
        mine = take_over(*args)  # type: ignore[arg-type]
        take_over(local_store, TRIAL, "other")
        return mine

    monkeypatch.setattr(CheckpointStore, "take_over", take_over_twice)
    with (
        pytest.raises(Superseded, match="attempt other"),
        own_trial(local_store, TRIAL, "ours"),
    ):
        pass
    assert claims(local_store) == []


@pytest.mark.parametrize(
    ("left", "shown"), [("an attempt", "last started by"), ("a checkpoint", "last saved at")]
)
def test_a_new_trial_does_not_continue_another_with_its_id(
    local_store: CheckpointStore, left: str, shown: str
) -> None:
    """Two random ids may be equal. Later attempts of the run that has begun a trial continue it."""
    if left == "an attempt":
        local_store.take_over(TRIAL, "theirs")
    else:
        commit_files(local_store, trial=TRIAL)
    stored = local_store.storage.sizes("attempts")
    with (
        pytest.raises(TrialflowError, match=f"another trial with this id, {shown}"),
        own_trial(local_store, TRIAL, "ours", is_new=True),
    ):
        pass
    assert local_store.storage.sizes("attempts") == stored
    with own_trial(local_store, "gpt-0000cafe", "ours", is_new=True):
        pass
    local_store.take_over("gpt-0000cafe", "a person's")
    with own_trial(local_store, "gpt-0000cafe", "ours", is_new=True) as (_, fence):
        assert fence.number == 3


@pytest.mark.parametrize("left", ["unreadable", "later attempts", "sweeps"])
def test_a_flow_run_continues_its_trial_without_a_record_of_its_own(
    local_store: CheckpointStore, left: str
) -> None:
    """The server says that it has begun. A stranger's trial has all its records, and none is it."""
    mark = local_store.take_over(TRIAL, "ours").record.storage
    if left == "unreadable":
        leave_claim(local_store, "ours")
        for number in (1, 2):
            local_store.storage.write(attempt_key(TRIAL, number), b"{")
    else:
        for _ in range(ATTEMPTS_KEPT):
            local_store.take_over(TRIAL, f"{SWEEPER}1" if left == "sweeps" else "later")
    with (
        pytest.raises(TrialflowError, match="another trial with this id"),
        own_trial(local_store, TRIAL, "ours", is_new=True),
    ):
        pass
    with own_trial(local_store, TRIAL, "ours", is_new=True, mark=mark) as (_, fence):
        assert fence.is_newest()
    local_store.take_over("gpt-0000cafe", "theirs")
    with (
        pytest.raises(TrialflowError, match="another trial with this id"),
        own_trial(local_store, "gpt-0000cafe", "ours", is_new=True, mark=mark),
    ):
        pass


@pytest.mark.parametrize("known", ["by an attempt", "by a checkpoint", ""])
def test_a_trial_is_continued_only_where_it_is_known(
    local_store: CheckpointStore, known: str
) -> None:
    """Elsewhere it would be trained from the beginning. A checkpoint alone may have been copied."""
    if known == "by an attempt":
        local_store.take_over(TRIAL, "theirs")
    if known == "by a checkpoint":
        commit_files(local_store, trial=TRIAL)
    owned = own_trial(local_store, TRIAL, "ours", is_new=False)
    if known:
        with owned:
            return
    with pytest.raises(CheckpointNotFound, match="is mounted on this machine"), owned:
        pass
    assert local_store.storage.sizes("attempts") == {}
    with own_trial(local_store, TRIAL, "ours"):  # its checkpoint comes from another place
        pass


def test_a_run_does_not_begin_a_trial_in_another_storage(local_store: CheckpointStore) -> None:
    """It knows the mark of its storage from an earlier start."""
    with (
        pytest.raises(StorageError, match="expected theirs"),
        own_trial(local_store, TRIAL, "ours", is_new=True, mark="theirs"),
    ):
        pass
    assert local_store.storage.sizes("attempts") == {}


def test_the_last_run_is_described(local_store: CheckpointStore) -> None:
    """Before a trial is continued: whose it is."""
    assert describe_last_run(local_store, TRIAL) == "never run"
    at = local_store.take_over(TRIAL, "theirs").record.at
    assert describe_last_run(local_store, TRIAL) == f"last started by {OURS} at {at}"
