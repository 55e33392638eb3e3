"""What the flow `train` retries, with warm or new ranks, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trialflow.flows.train
import trialflow.tasks.stages
from tests.flows.conftest import HungRun
from tests.support.flow import one_slot, resumption, stages, train
from tests.support.prefect import PrefectServer
from tests.support.slots import lines
from tests.support.stages import all_stages, faking
from trial_core.errors import RankFailed, TrialflowError
from trial_core.processes.machine.run_dirs import locked_run_dir

pytestmark = [pytest.mark.slots, pytest.mark.server]


def retry_after_repair(
    monkeypatch: pytest.MonkeyPatch, stage: str, repair: Callable[[], None]
) -> None:
    """Make the flow retry `stage` at once, after calling `repair`."""
    task = trialflow.tasks.stages.task_of(all_stages()[stage])

    def condition(task: Any, task_run: Any, state: Any) -> bool:
        repair()
        return bool(original(task, task_run, state))

    original = task.retry_condition_fn
    quick = task.with_options(retry_delay_seconds=0, retry_condition_fn=condition)
    work = quick.submit if stage == "checkpoint_upload" else quick
    changed = faking(trialflow.flows.train.as_prefect_task, **{stage: work})
    monkeypatch.setattr(trialflow.flows.train, "as_prefect_task", changed)


@pytest.mark.long
def test_a_failed_upload_is_retried_with_warm_ranks(
    here: Path, prefect_server: PrefectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage fails once: the upload has one retry, and the ranks continue training.

    Both checkpoints are committed.
    """
    in_the_way = here / "checkpoints" / "checkpoints"
    in_the_way.parent.mkdir()
    in_the_way.write_text("no folder")
    retry_after_repair(monkeypatch, "checkpoint_upload", in_the_way.unlink)
    checkpointing = {"memory_gib_per_rank": 0}  # staged on disk, and kept there for restarts
    result = train(one_slot(here, 8, max_restarts=0, checkpointing=checkpointing))
    seen = stages(prefect_server, result.flow_run_id, "checkpoint-upload @8")
    tries = {stage.name: stage.tries for stage in seen}
    assert (tries["checkpoint-upload @4"], tries["checkpoint-upload @8"]) == (2, 1)
    assert {stage.state for stage in seen} == {"Completed"}
    assert [stage.name for stage in seen].count("build-trial") == 1
    assert len(list((here / "checkpoints" / "manifests" / result.trial).iterdir())) == 2
    assert not (Path(result.run_dir) / "kept").exists()  # a finished run needs no restart


@pytest.mark.long
def test_a_failed_fetch_is_retried_with_warm_ranks(
    here: Path, prefect_server: PrefectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local disk fails once."""
    first = train(one_slot(here, 4))
    in_the_way = Path(first.run_dir) / "restored"
    in_the_way.write_text("no folder")
    retry_after_repair(monkeypatch, "fetch_checkpoint", in_the_way.unlink)
    result = train(one_slot(here, 8, hyperparameters={"record": str(here)}), first.trial)
    seen = stages(prefect_server, result.flow_run_id, "checkpoint-upload @8")
    tries = {stage.name: stage.tries for stage in seen}
    assert tries["fetch-checkpoint @4"] == 2
    assert tries["build-trial"] == 1
    assert [line[0] for line in lines(here, "samples", 0)] == [4, 5, 6, 7]


def test_hung_ranks_are_replaced_and_their_stacks_logged(
    hung_run: HungRun, prefect_server: PrefectServer
) -> None:
    """The run resumes from its last checkpoint; the run's log says where they hung."""
    assert hung_run.result.batches_trained == 8
    resumption(hung_run.folder, 5, 8)
    of_this_run = {"logs": {"flow_run_id": {"any_": [hung_run.result.flow_run_id]}}, "limit": 200}
    messages = [each["message"] for each in prefect_server.query("logs/filter", of_this_run)]
    assert any(
        "no batch has ended for 3 s" in message and "in _misbehave" in message
        for message in messages
    )


@pytest.mark.long
def test_a_repeated_exception_is_not_retried(here: Path) -> None:
    """The same exception at the same batch after a restart ends the run, also in the middle of the
    first workload."""
    config = one_slot(
        here, 16, max_restarts=5, scheduling_unit=16, min_checkpoint_period=None,
        hyperparameters={"at_batch": 5, "do": "raise"},
    )  # fmt: skip
    with pytest.raises(RankFailed, match="RuntimeError: the toy was told to break"):
        train(config)
    logs = (next((here / "home").glob("toy-*")) / "logs" / "rank-0.log").read_text()
    assert logs.count("RuntimeError: the toy was told to break") == 2


def test_two_drivers_do_not_train_one_trial(here: Path) -> None:
    """The second one launches no ranks, and its error names the first one."""
    with locked_run_dir("toy-0000beef") as run_dir:
        with pytest.raises(TrialflowError, match="toy-0000beef is being trained by process"):
            train(one_slot(here, 4), "toy-0000beef")
        assert not (run_dir / "logs").exists()
