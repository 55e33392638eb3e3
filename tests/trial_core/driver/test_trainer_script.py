"""A script with `init` and `Trainer` that an experiment file names is a trial of its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.consolidated import consolidated
from tests.support.driving import TRIAL, Seen, drive
from tests.support.flow import breaking, resumption
from tests.support.slots import lines, toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.driver.result import TrialResult
from trial_core.errors import ConfigError, RankFailed

pytestmark = pytest.mark.slots


@pytest.fixture
def here(warm_home: Path) -> Path:
    return warm_home


def script(
    here: Path, batches: int = 10, fit_length: int | str = 99, **changes: Any
) -> ExperimentConfig:
    """The experiment of the script, whose fit asks for another length."""
    entrypoint = f"python3 trainer_script.py {fit_length}"
    return toy_config(here, batches, entrypoint=entrypoint, **changes)


def weights(config: ExperimentConfig, result: TrialResult, into: Path) -> dict[str, list[float]]:
    """Those of the last checkpoint."""
    store = CheckpointStore(config.checkpoint_storage.url)
    assert result.checkpoint_uuid is not None
    folder = Path(store.files_url(result.checkpoint_uuid).removeprefix("file://"))
    return {name: each.tolist() for name, each in consolidated(folder / "model0", into).items()}


@pytest.mark.long
def test_the_experiment_decides_and_the_fit_says_when(here: Path, tmp_path: Path) -> None:
    """Hyperparameters, name, metric, storage, seed and length are the experiment's.

    Periods are the fit's. Trained are the same weights as by the class, bit for bit.
    """
    seen, record = Seen(), {"record": str(here)}
    config = script(here, hyperparameters=record)
    result = drive(config, observer=seen)
    assert (result.trial, result.batches_trained, result.stopped_early) == (TRIAL, 10, False)
    beside = ("callbacks", "checkpoint-upload")
    assert [stage for stage in seen.stages if not stage.startswith(beside)] == [
        "build-trial", "run-script [0→]", "attach-trial", "build-loaders @0", "check-metrics",
        "train-workload [0→3]", "validate @3", "train-workload [3→4]", "checkpoint-save @4",
        "train-workload [4→8]", "validate @8", "checkpoint-save @8", "train-workload [8→10]",
        "validate @10", "checkpoint-save @10", "run-script [10→]",
    ]  # fmt: skip
    store = CheckpointStore(config.checkpoint_storage.url)
    assert [each.progress.batches_trained for each in store.list(TRIAL)] == [4, 8, 10]
    assert result.ledger is not None
    assert result.ledger["slot_seconds"]["build"] > result.ledger["slot_seconds"]["train"]
    assert "**completed**" in Path(str(result.report_path)).read_text()

    class_config = toy_config(
        here, 10, scheduling_unit=4, min_checkpoint_period={"batches": 4},
        min_validation_period={"batches": 10}, hyperparameters=record,
        checkpoint_storage=f"file://{here}/of-class",
    )  # fmt: skip
    by_class = drive(class_config, "class-0000beef")
    assert weights(config, result, here / "a") == weights(class_config, by_class, here / "b")


def test_a_crash_and_a_second_run_resume_it(here: Path) -> None:
    """As of any run: new ranks run the script again, from the last committed checkpoint."""
    config = script(
        here, 10, max_restarts=1, resources={"slots_per_trial": 1},
        hyperparameters=breaking(here, "kill", 7),
    )  # fmt: skip
    result = drive(config)
    assert (result.batches_trained, result.stopped_early) == (10, False)
    resumption(here, 7, 10)
    again = drive(
        script(here, 12, resources={"slots_per_trial": 1}, hyperparameters={"record": str(here)})
    )
    assert again.batches_trained == 12
    assert [line[0] for line in lines(here, "samples", 0)][-2:] == [10, 11]


@pytest.mark.long
def test_a_stop_saves_it(here: Path) -> None:
    """Requested by the trial; the script then goes on to its end."""
    hparams = {"record": str(here), "at_batch": 5, "do": "stop"}
    result = drive(script(here, 100, hyperparameters=hparams))
    assert result.stopped_early
    assert 5 < result.batches_trained < 8
    config = script(here)
    manifest = CheckpointStore(config.checkpoint_storage.url).list(TRIAL)[-1]
    assert manifest.progress.batches_trained == result.batches_trained
    log = (Path(str(result.run_dir)) / "logs" / "rank-0.log").read_text()
    assert f"rank 0 fitted until batch {result.batches_trained}" in log


@pytest.mark.long
def test_a_stop_by_one_fits_trial_is_not_the_next_ones(here: Path) -> None:
    """The next fit trains its own trial, to its own length."""
    config = script(
        here, fit_length="20 9", searcher={"metric": "loss"}, resources={"slots_per_trial": 1},
        hyperparameters={"record": str(here), "at_batch": 5, "do": "stop"},
    )  # fmt: skip
    assert drive(config).batches_trained == 9
    assert [line[0] for line in lines(here, "samples", 0)] == list(range(9))


@pytest.mark.long
def test_a_length_is_needed_once(here: Path) -> None:
    """By the experiment or by the fit; without either, the error names both."""
    without = {"searcher": {"metric": "loss"}, "resources": {"slots_per_trial": 1}}
    assert drive(script(here, fit_length=5, **without)).batches_trained == 5
    with pytest.raises(RankFailed, match=r"fit needs max_length: .*searcher\.max_length") as failed:
        drive(script(here, fit_length=0, **without), "toy-0000cafe")
    assert failed.value.error_type == ConfigError.__name__


@pytest.mark.long
def test_several_fits_continue_one_trial(here: Path) -> None:
    """Each with a new trial object, from the last checkpoint of the one before."""
    config = script(
        here, fit_length="3 8", searcher={"metric": "loss"}, resources={"slots_per_trial": 1},
        hyperparameters={"record": str(here)},
    )  # fmt: skip
    result = drive(config)
    assert (result.batches_trained, result.stopped_early) == (8, False)
    assert [line[0] for line in lines(here, "samples", 0)] == list(range(8))
    log = (Path(str(result.run_dir)) / "logs" / "rank-0.log").read_text()
    assert [line[-1] for line in log.splitlines() if "fitted until batch" in line] == ["3", "8"]
