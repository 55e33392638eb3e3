"""Stages of a user's own in a run: `stages` of an experiment. `tests/support/toy/own_stages.py`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.driving import Notices, Seen, drive
from tests.support.fitting import fit_toys
from tests.support.flow import one_slot, stages, train
from tests.support.prefect import PrefectServer
from tests.support.slots import TOY, toy_config
from tests.trial_core.trainer.fits import every, run
from trial_core.checkpoint.retention_policy import best_of_trial
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import ConfigError, TrialError
from trial_core.schedule.stop_requests import StopHandler

pytestmark = [pytest.mark.slots, pytest.mark.server]

SCORE = {"run": "own_stages:score", "after": "validate", "blocking": True, "metrics": ["score"]}
NOTE = {"run": "own_stages:note", "after": "checkpoint-upload"}
FAIL = {"run": "own_stages:fail", "after": "checkpoint-upload", "retry_delay_seconds": 0.1}


def config(here: Path, *own: dict[str, Any], **changes: Any) -> Any:
    """12 batches on one slot, validated every 4."""
    return one_slot(
        here, 12, hyperparameters={"record": str(here)}, min_validation_period={"batches": 4},
        min_checkpoint_period=None, stages=list(own), **changes,
    )  # fmt: skip


def notes(here: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (here / "notes").read_text().splitlines()]


@pytest.mark.long
def test_their_metrics_decide_and_checkpoints_are_handed_over(
    here: Path, prefect_server: PrefectServer
) -> None:
    """What training waits for gives the searcher's metric; another one gets each checkpoint.

    Each has its place in the timeline. What a stage may not report is left out.
    """
    experiment = config(
        here, SCORE, NOTE, {**NOTE, "after": "training"},
        searcher={
            "metric": "score", "smaller_is_better": False, "max_length": {"batches": 12},
        },
        checkpoint_policy="best",
    )  # fmt: skip
    result = train(experiment)
    store = CheckpointStore(experiment.checkpoint_storage.url)
    best = best_of_trial(store.list(result.trial))
    assert best is not None
    assert best.progress.batches_trained == 8
    assert best.metrics["validation"]["score"] == 0
    assert result.validation_metrics["score"] == -4
    assert result.validation_metrics["loss"] != 7
    assert "more" not in result.validation_metrics

    told = notes(here)
    *uploads, end = told
    saved = {manifest.uuid: manifest for manifest in store.list(result.trial)}
    for each in uploads:  # the first and the last; one between may be left out
        assert each["after"] == "checkpoint-upload"
        assert each["checkpoint"]["url"] == store.files_url(each["checkpoint"]["uuid"])
        at = saved[each["checkpoint"]["uuid"]].progress.batches_trained
        assert each["batches_trained"] == at
    assert [uploads[0]["batches_trained"], uploads[-1]["batches_trained"]] == [4, 12]
    assert (end["after"], end["batches_trained"]) == ("training", 12)
    assert end["checkpoint"]["uuid"] == result.checkpoint_uuid
    names = {stage.name for stage in stages(prefect_server, result.flow_run_id)}
    assert {f"own-stage own_stages:score @{at}" for at in (4, 8, 12)} <= names
    assert "own-stage own_stages:note @12" in names


@pytest.mark.long
def test_a_failure_is_a_warning_unless_it_ends_the_run(here: Path) -> None:
    """Which then saves first. Without Prefect, as in a script."""
    seen = Notices()
    (here / "a").mkdir()
    result = drive(config(here / "a", FAIL), observer=seen)
    assert result.batches_trained == 12
    assert any("RuntimeError: no room for samples" in text for text in seen.notices)
    (here / "b").mkdir()
    failing = config(here / "b", {**FAIL, "on_failure": "fail"}, checkpoint_policy="all")
    with pytest.raises(TrialError, match="stage own_stages:fail: RuntimeError: no room"):
        drive(failing)
    saved = CheckpointStore(failing.checkpoint_storage.url).list()
    assert saved[0].progress.batches_trained == 4


@pytest.mark.long
def test_a_stage_is_called_again(here: Path) -> None:
    """As often as the experiment says."""
    retried = config(here, {**FAIL, "on_failure": "fail", "retries": 2})
    assert drive(retried).batches_trained == 12


@pytest.mark.long
def test_a_metric_stage_that_fails_ends_the_run_with_its_error(here: Path) -> None:
    """Not with that of a missing metric. What comes after training is left out."""
    failing = config(
        here, {**SCORE, "run": "own_stages:fail"}, {**NOTE, "after": "training"},
        searcher={"metric": "score", "max_length": {"batches": 12}},
    )  # fmt: skip
    with pytest.raises(TrialError, match="stage own_stages:fail: RuntimeError: no room"):
        drive(failing)
    assert not (here / "notes").exists()
    assert CheckpointStore(failing.checkpoint_storage.url).list()


@pytest.mark.long
def test_a_flow_repeats_a_stage(here: Path, prefect_server: PrefectServer) -> None:
    """As the experiment says, within one task."""
    result = train(config(here, {**FAIL, "on_failure": "fail", "retries": 2, "after": "training"}))
    (repeated,) = [
        stage
        for stage in stages(prefect_server, result.flow_run_id)
        if stage.name.startswith("own-stage")
    ]
    assert repeated.state == "Completed"
    assert (here / "tries").read_text() == "xxx"


def test_a_function_that_is_not_there_is_found_before_training(here: Path) -> None:
    """With its place in the file."""
    seen = Seen()
    found = {"run": "json:dumps", "after": "training"}
    missing = config(here, found, {"run": "json:nothing", "after": "training"})
    with pytest.raises(ConfigError, match=r"stages\[1\]\.run: it cannot be imported: .*nothing"):
        drive(missing, observer=seen)
    assert not any(stage.startswith("train-workload") for stage in seen.stages)


def test_a_stop_kills_those_that_run(here: Path) -> None:
    """The run saves, and does not wait for them."""
    code = here / "code"
    code.mkdir()
    shutil.copy(TOY / "toy_trial.py", code)
    (code / "hanging.py").write_text(  # a process that imports little
        "import pathlib, time\n"
        "def hang(argument):\n"
        f"    pathlib.Path({str(here / 'hangs')!r}).touch()\n"
        "    time.sleep(3600)\n"
    )
    hang = {
        "run": "hanging:hang", "after": "validate", "timeout_seconds": None,
        "retries": 3, "retry_delay_seconds": 600,
    }  # fmt: skip
    endless = one_slot(
        here, 10**6, code=str(code), min_validation_period={"batches": 4},
        min_checkpoint_period=None, stages=[hang],
        hyperparameters={"at_batch": 5, "do": "wait", "wait_for": str(here / "hangs")},
    )  # fmt: skip

    class Stopping(Seen):
        """Stops the run once the stage runs."""

        def batches_trained(self, batches: int) -> None:
            if (here / "hangs").exists():
                stopping.ask("interrupted")

    with StopHandler(60) as stopping:
        result = drive(endless, stopping=stopping, observer=Stopping())
    assert result.stopped_early
    assert result.checkpoint_at == result.batches_trained > 4


@pytest.mark.long
def test_nothing_is_deleted_while_one_may_read_it(here: Path) -> None:
    """The rules keep one checkpoint; the others go at the end."""

    class Releasing(Seen):
        """Lets the stage read once the last checkpoint is committed."""

        def checkpoint_committed(
            self, uuid: str, batches: int, total_bytes: int, digest: str = ""
        ) -> None:
            if batches == 12:
                (here / "released").touch()

    keeping = config(
        here, {"run": "own_stages:hold", "after": "checkpoint-upload"}, checkpoint_policy="all",
        checkpoint_storage={
            "url": f"file://{here}/checkpoints", "save_trial_best": 0, "save_trial_latest": 1,
        },
    )  # fmt: skip
    drive(keeping, observer=Releasing())
    assert (here / "held").read_text().splitlines()[0] == "4 True"
    store = CheckpointStore(keeping.checkpoint_storage.url)
    assert [manifest.progress.batches_trained for manifest in store.list()] == [12]


@pytest.mark.long
def test_a_restart_of_ranks_does_not_wait_for_them(here: Path) -> None:
    """A call that hangs is killed when a rank is lost."""
    hang = {"run": "own_stages:hang", "after": "validate", "timeout_seconds": None}
    begun = {"run": "own_stages:await_hang", "after": "validate", "blocking": True}
    breaking = one_slot(
        here, 12, min_validation_period={"batches": 4}, min_checkpoint_period=None,
        stages=[hang, begun],
        max_restarts=1, hyperparameters={
            "record": str(here), "do": "kill", "at_batch": 10, "once": str(here / "once"),
        },
    )  # fmt: skip
    assert drive(breaking).batches_trained == 12
    assert (here / "once").exists()


@pytest.mark.long
def test_a_trainer_has_them_too(tmp_path: Path) -> None:
    """The driver beside rank 0 calls them; the searcher's metric is one of theirs."""
    fit: dict[str, Any] = run(tmp_path, {**every(4, 12), "validation_period": {"batches": 4}})
    fit["init"]["exp_conf"]["searcher"] = {"metric": "score", "smaller_is_better": False}
    fit["init"]["exp_conf"]["stages"] = [SCORE, {**NOTE, "after": "training"}]
    ((outcome,),) = fit_toys("python", tmp_path / "launch", fit, ranks=1)
    assert outcome["validation_metrics"]["score"] == -4, outcome
    (told,) = notes(tmp_path)
    assert (told["after"], told["batches_trained"]) == ("training", 12)


@pytest.mark.long
def test_a_script_has_them_too(here: Path) -> None:
    """A Core API script hands over each checkpoint that it stores."""
    script = toy_config(
        here, entrypoint="python3 core_script.py 6", searcher={"metric": "loss"},
        hyperparameters={"record": str(here), "store_every": 4}, stages=[NOTE],
        resources={"slots_per_trial": 1},
    )  # fmt: skip
    result = train(script)
    (told,) = notes(here)
    assert told["checkpoint"]["uuid"] == result.checkpoint_uuid
    assert told["batches_trained"] == 4


@pytest.mark.long
def test_a_period_leaves_occasions_out(here: Path) -> None:
    """The first occasion after each so many batches."""
    drive(config(here, {**NOTE, "after": "validate", "every": {"batches": 8}}))
    assert [each["batches_trained"] for each in notes(here)] == [8]
