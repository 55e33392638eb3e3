"""The flow `train` runs a Core API script on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.flow import stages, train, train_until_stopped
from tests.support.prefect import PrefectServer
from tests.support.slots import lines, toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import ConfigError, RankFailed

pytestmark = [pytest.mark.slots, pytest.mark.server]


def script_config(here: Path, steps: int, slots: int = 2, **hparams: Any) -> Any:
    given = {"record": str(here), "store_every": 4, "once": str(here / "once"), **hparams}
    return toy_config(
        here, entrypoint=f"python3 core_script.py {steps}", searcher={"metric": "loss"},
        hyperparameters=given, resources={"slots_per_trial": slots}, max_restarts=1,
    )  # fmt: skip


def steps_of(here: Path, rank: int = 0) -> list[int]:
    return [line["step"] for line in lines(here, "script", rank) if "step" in line]


def resumptions(here: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [line for line in lines(here, "script", rank) if "resumed" in line]


def test_what_a_script_reports_and_stores_is_the_runs(
    here: Path, prefect_server: PrefectServer
) -> None:
    """Its stages, metrics, checkpoints and report are on the server and in the storage."""
    config = script_config(here, 6)
    result = train(config)

    first = lines(here, "script", 1)[0]
    assert first["argv"] == [str(config.code / "core_script.py"), "6"]
    assert first["cwd"] == str(config.code)
    assert (result.batches_trained, result.stopped_early) == (6, False)
    assert result.training_metrics == {"total": 3 * sum(range(1, 7))}
    assert (result.validation_metrics, result.validated_at) == ({"loss": 1 / 4}, 4)

    store = CheckpointStore(config.checkpoint_storage.url)
    (manifest,) = store.list(result.trial)
    assert manifest.uuid == result.checkpoint_uuid
    assert manifest.progress.batches_trained == 4
    assert manifest.metrics["validation"] == {"loss": 1 / 4}
    assert {entry.path for entry in manifest.files} == {"metadata.json", "part-0", "state.pt"}
    assert store.find_damage(manifest.uuid, manifest.files) == []

    seen = stages(prefect_server, result.flow_run_id, "run-script [4→]")
    assert [stage.name for stage in seen] == [
        "build-trial", "run-script [0→]", "checkpoint-upload @4", "run-script [4→]"
    ]  # fmt: skip
    assert "**completed** · batch 6 of ?" in Path(result.report_path).read_text()


@pytest.mark.long
def test_a_script_that_breaks_resumes_from_its_checkpoint(here: Path) -> None:
    """New ranks run it again, with `latest_checkpoint`."""
    result = train(script_config(here, 10, do="raise", at_step=6))
    assert steps_of(here, 1) == [*range(1, 7), *range(5, 11)]
    totals = [line["total"] for line in lines(here, "script", 1) if "total" in line]
    assert totals[-1] == result.training_metrics["total"] == 3 * sum(range(1, 11))
    (resumed,) = resumptions(here, 1)
    assert resumed["resumed"] == 4
    assert resumed["metadata"] == {"steps_completed": 4, "note": "kept"}
    report = Path(result.report_path).read_text()
    assert "the script broke at step 6" in report


@pytest.mark.long
def test_a_damaged_checkpoint_of_a_script_gives_way_to_an_older_one(here: Path) -> None:
    """The report says so, as for a trial."""
    first = train(script_config(here, 9))
    part = Path(first.checkpoint_url.removeprefix("file://"), "state.pt")
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    result = train(script_config(here, 11), trial=first.trial)
    assert resumptions(here)[-1]["resumed"] == 4
    assert "training continues from batch 4, checkpoint" in Path(result.report_path).read_text()


@pytest.mark.long
def test_a_stopped_script_stores_and_ends_and_resumes_on_other_slots(here: Path) -> None:
    """All ranks are told at the same step. Each wrote its part, and one rank reads all parts."""
    config = script_config(here, 10**6, store_every=1, shard=True)
    stopped = train_until_stopped(config, 15)
    assert stopped.stopped_early
    told = [
        [line for line in lines(here, "script", rank) if "preempted" in line] for rank in (0, 1)
    ]
    assert told[0] == told[1] == [{"preempted": stopped.batches_trained}]

    steps = stopped.batches_trained + 3
    resumed = train(script_config(here, steps, slots=1, store_every=1), trial=stopped.trial)
    assert (resumed.batches_trained, resumed.stopped_early) == (steps, False)
    (seen,) = resumptions(here)
    assert (seen["resumed"], seen["parts"]) == (stopped.batches_trained, ["part-0", "part-1"])


@pytest.mark.long
@pytest.mark.parametrize(("do", "error"), [("0", None), ("3", "core_script.py exited with code 3")])
def test_an_exit_code_other_than_0_is_a_failure(here: Path, do: str, error: str | None) -> None:
    """`sys.exit(0)` is a success."""
    config = script_config(here, 4, do=do, at_step=4).model_copy(update={"max_restarts": 0})
    if error is None:
        assert train(config).batches_trained == 4
        return
    with pytest.raises(RankFailed, match=error) as failure:
        train(config)
    assert str(failure.value.rank_traceback).splitlines()[1].count("core_script.py") == 1


@pytest.mark.long
def test_a_script_that_reports_nothing_is_a_run(here: Path) -> None:
    """It needs neither reports nor checkpoints, nor the Core API."""
    code = here / "code"
    code.mkdir()
    (code / "quiet.py").write_text("print('nothing to report')\n")
    config = toy_config(
        here, entrypoint="python -m quiet", code=str(code), searcher={"metric": "loss"}
    )
    result = train(config)
    assert (result.batches_trained, result.checkpoint_uuid) == (0, None)
    assert "nothing to report" in (Path(result.run_dir) / "logs" / "rank-0.log").read_text()


@pytest.mark.long
def test_a_script_stores_in_memory(here: Path) -> None:
    """The driver reads and writes that storage for the ranks."""
    config = script_config(here, 10, do="raise", at_step=6)
    storage = type(config.checkpoint_storage).model_validate("memory://script")
    result = train(config.model_copy(update={"checkpoint_storage": storage}))
    assert result.batches_trained == 10
    assert [line["resumed"] for line in resumptions(here)] == [4]


@pytest.mark.long
def test_batch_inference_continues_after_a_kill(here: Path) -> None:
    """New ranks begin after the last stored progress; every result is there once."""
    result = train(
        toy_config(
            here, entrypoint="python3 batch_script.py", searcher={"metric": "total"},
            hyperparameters={"record": str(here), "kill_at": 3}, max_restarts=1,
        )
    )  # fmt: skip
    assert (here / "once").exists()
    assert result.batches_trained == 6  # 11 batches, 2 ranks
    assert result.validation_metrics == {"total": 2 * sum(range(8, 21))}  # of the second start
    outputs = (here / "checkpoints" / "runs" / result.trial / "outputs").rglob("*.txt")
    numbers = [int(number) for path in outputs for number in path.read_text().split()]
    assert sorted(numbers) == [2 * each for each in range(21)]


def test_a_flow_that_validates_needs_a_trial(here: Path) -> None:
    """Evaluate and retrain say so, and start no rank."""
    from trialflow.flows.evaluate import evaluate
    from trialflow.flows.retrain import retrain

    for flow in (evaluate, retrain):
        with pytest.raises(ConfigError, match="needs a trial, as module:Class"):
            flow(script_config(here, 4))
