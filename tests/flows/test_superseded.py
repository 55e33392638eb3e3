"""A presumed-dead run whose trial another run has taken over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trialflow.flows.train
from tests.support.flow import one_slot, ranks, train
from trial_core.checkpoint.fencing import newest_attempts
from trial_core.checkpoint.json_objects import encode_json
from trial_core.checkpoint.layout import claim_key
from trial_core.checkpoint.manifest import Manifest, utc_now
from trial_core.checkpoint.retention.claims import Claim, claims
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import Superseded, TrialflowError

pytestmark = [pytest.mark.slots, pytest.mark.server]


@pytest.mark.long
@pytest.mark.usefixtures("prefect_server")
def test_a_superseded_run_ends(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its earlier checkpoint is kept; its next commit is refused, which ends it and its ranks.

    A later run resumes from the kept checkpoint, and may save.
    """
    commit = CheckpointStore.commit

    def commit_and_be_superseded(
        store: CheckpointStore, manifest: Manifest, *arguments: Any
    ) -> None:
        commit(store, manifest, *arguments)
        store.take_over(manifest.trial, "another")

    before = ranks()
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "commit", commit_and_be_superseded)
        with pytest.raises(Superseded, match="attempt another, by"):
            train(one_slot(here, 12, max_restarts=3))
    assert ranks() == before
    store = CheckpointStore(f"file://{here}/checkpoints")
    (kept,) = store.list()
    assert kept.progress.batches_trained == 4
    assert train(one_slot(here, 8), kept.trial).batches_trained == 8
    assert [each.progress.batches_trained for each in store.list()] == [4, 8]


def claimed_elsewhere(here: Path) -> str:
    """A trial that may be running on another machine."""
    store = CheckpointStore(f"file://{here}/checkpoints")
    claim = Claim(trial="toy-0000beef", by="ann@far", at=utc_now(), needs=[], owner="", process="")
    store.take_over(claim.trial, "theirs")
    store.storage.write(claim_key(claim.trial), encode_json(claim))
    return claim.trial


@pytest.mark.usefixtures("prefect_server")
def test_a_run_is_refused_before_it_takes_a_live_trial(here: Path) -> None:
    """The other run's claim and its trial are left alone, and no rank is started."""
    trial, before = claimed_elsewhere(here), ranks()
    with pytest.raises(TrialflowError, match="may be running: ann@far claimed it"):
        train(one_slot(here, 4), trial)
    store = CheckpointStore(f"file://{here}/checkpoints")
    assert [claim.by for claim in claims(store)] == ["ann@far"]
    assert [number for number, _ in newest_attempts(store.storage, trial)] == [1]
    assert ranks() == before


@pytest.mark.long
@pytest.mark.usefixtures("prefect_server")
def test_a_person_may_take_a_live_trial(here: Path) -> None:
    """With the flow's parameter."""
    trial = claimed_elsewhere(here)
    result = trialflow.flows.train.train(one_slot(here, 4), trial, take_over=True)
    assert (result.trial, result.batches_trained) == (trial, 4)
