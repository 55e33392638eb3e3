"""A flow run's retry on a machine where its storage is not mounted."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.states import Pending

import trialflow.flows.train
from tests.flows.lifecycle.conftest import Stage
from tests.support.stores import mount, unmount
from tests.support.wire import UNAUTHORIZED, Wire
from trial_core.checkpoint.fencing import newest_attempts
from trial_core.checkpoint.retention.trial_owner import own_trial
from trial_core.checkpoint.storage_mark import read_mark
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.driver.run import Given
from trial_core.errors import CheckpointNotFound, Stopped, StorageError, TrialflowError
from trial_core.processes.machine.run_dirs import trial_id
from trial_core.schedule.stop_requests import StopHandler
from trialflow.flows.lifecycle.storage_of_run import LABEL, storage_of_run
from trialflow.flows.train import TrialResult, train_trial

pytestmark = pytest.mark.server


def drive_without_ranks(config: ExperimentConfig, trial: str, given: Given) -> TrialResult:
    """Begin as `drive_trial`, and end."""
    storage = config.checkpoint_storage
    with own_trial(
        CheckpointStore(storage.url, storage.options), trial, given.attempt,
        is_new=given.is_new, mark=given.storage,
    ) as (_, fence):  # fmt: skip
        given.begun(fence.record.storage)
        return TrialResult(trial, batches_trained=4, stopped_early=False)


@pytest.fixture
def beginning(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Flow runs that begin their trial, and train nothing."""
    monkeypatch.setattr(trialflow.flows.train, "train_trial", train_trial)
    monkeypatch.setattr(trialflow.flows.train, "drive_trial", drive_without_ranks)
    return stage


def test_a_retry_does_not_begin_again_in_an_empty_folder(beginning: Stage, tmp_path: Path) -> None:
    """The server knows the storage of the flow run's first attempt. Mounted, it continues."""
    flow: Any = trialflow.flows.train.train
    store = CheckpointStore(beginning.config.checkpoint_storage.url)
    root = Path(store.url.removeprefix("file://"))
    assert root.is_relative_to(tmp_path)
    run = beginning.create_run(flow)
    trial = trial_id(beginning.config.name, str(run))

    def numbers() -> list[int]:
        return [number for number, _ in newest_attempts(store.storage, trial)]

    def execute() -> Any:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(run, Pending(), force=True)
        return beginning.execute(flow, run)

    assert execute().trial == trial
    assert numbers() == [1]
    unmount(root)
    with pytest.raises(StorageError, match="not the storage with which the run began: it has no"):
        execute()
    assert numbers() == []
    mount(root)
    assert execute().trial == trial
    assert numbers() == [2, 1]


class Answers:
    """The server answers requests of a kind only after some were lost.

    Args:
        lost: how many.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, lost: float) -> None:
        self.lost = lost
        answer = getattr(SyncPrefectClient, method)

        def answer_late(client: SyncPrefectClient, *given: Any) -> Any:
            if self.lost > 0:
                self.lost -= 1
                raise httpx.ConnectError("nothing is there")
            return answer(client, *given)

        monkeypatch.setattr(SyncPrefectClient, method, answer_late)


def label_of(run: UUID) -> Any:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(run).labels.get(LABEL)


def test_a_label_that_the_server_does_not_take_is_written_with_a_report(
    beginning: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has taken its trial, and trains."""
    answers = Answers(monkeypatch, "update_flow_run_labels", lost=2)
    lost: list[float] = []

    def drive_and_publish(config: ExperimentConfig, trial: str, given: Given) -> TrialResult:
        result = drive_without_ranks(config, trial, given)
        assert given.publish is not None
        for text in ("first", "second", "third"):
            given.publish(text)
            lost.append(answers.lost)
        return result

    monkeypatch.setattr(trialflow.flows.train, "drive_trial", drive_and_publish)
    run, result = beginning.train()
    assert isinstance(result, TrialResult)
    assert lost == [0, 0, 0]
    store = CheckpointStore(beginning.config.checkpoint_storage.url)
    assert label_of(run) == read_mark(store.storage)
    warnings = [text for level, text in beginning.log(run) if level == logging.WARNING]
    assert [text for text in warnings if "has not noted the run's storage" in text] == warnings


def test_a_run_waits_for_the_server_before_it_begins(
    stage: Stage, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within `stopping.server_outage_seconds`, unless it is stopped or the server refuses it."""
    monkeypatch.setattr(trialflow.flows.lifecycle.storage_of_run, "RETRY_SECONDS", 0.0)
    found: list[str | None] = []

    def begin(run: UUID, stopping: StopHandler) -> None:
        with get_client(sync_client=True) as client:
            client.update_flow_run_labels(run, {LABEL: "a mark"})
        with monkeypatch.context() as patch:
            answers = Answers(patch, "read_flow_run", lost=3)
            found.append(storage_of_run(None, stopping))
            answers.lost = math.inf
            with pytest.raises(TrialflowError, match=r"outage_seconds \(0.0\): nothing is there"):
                storage_of_run(0.0, stopping)
            stopping.ask("cancelled", "by this test")
            with pytest.raises(Stopped, match="nothing was begun"):
                storage_of_run(None, stopping)
        wire.cut(UNAUTHORIZED)
        with pytest.raises(TrialflowError, match="401"):
            storage_of_run(None, stopping)
        wire.mend()
        found.append("the end")  # a stopped run's error would not be seen

    stage.act = begin
    stage.train()
    assert found == ["a mark", "the end"]


def test_a_run_continues_only_a_trial_that_is_there(beginning: Stage) -> None:
    """The parameter `trial` names one that has run; its own trial is new.

    The refused run has no storage yet: it may be retried when the folder is mounted.
    """
    with pytest.raises(CheckpointNotFound, match="trial toy-0000beef is not continued"):
        trialflow.flows.train.train(beginning.config, "toy-0000beef")
    store = CheckpointStore(beginning.config.checkpoint_storage.url)
    assert read_mark(store.storage) is None
    begun = trialflow.flows.train.train(beginning.config)
    assert isinstance(begun, TrialResult)
