"""The ready-made callbacks, and runs whose losses are not finite, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.driving import drive as drive_run
from tests.support.slots import Driven, drive, lines, toy_config
from tests.support.tensors import differing, tensors
from trial_core.callbacks import EarlyStopping, ExponentialMovingAverage, StopOnNonFinite
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import TrialError
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.pytorch import PyTorchTrialContext
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.trial.callback import may_change_metrics
from trial_core.rank.trial.context import RunInfo

Warm = Callable[[int], SlotGroup]


def config(folder: Path, batches: int, **hparams: Any) -> Any:
    folder.mkdir(exist_ok=True)
    hparams = {"record": str(folder), "global_batch_size": 4, **hparams}
    return toy_config(
        folder, batches, entrypoint="callback_trials:ReadyMade", scheduling_unit=4,
        min_checkpoint_period={"batches": 4}, min_validation_period={"batches": 4},
        checkpoint_policy="none", hyperparameters=hparams,
    )  # fmt: skip


def context(**searcher: Any) -> PyTorchTrialContext:
    return PyTorchTrialContext(
        RunInfo("toy-1", {"searcher": searcher}), DistributedContext.from_environment()
    )


@pytest.mark.slots
def test_averages_are_validated_exported_and_resumed_exactly(
    warm_slots: Warm, tmp_path: Path
) -> None:
    """Validations see them, training does not. A resumed run has the same ones, bit for bit."""

    def run(folder: Path, batches: int, resume: Driven | None = None) -> Driven:
        of = config(folder, batches)
        return drive(warm_slots(2), of, folder, resume=resume, persist=True)

    whole = run(tmp_path / "whole", 8)
    rest = run(tmp_path / "parts", 8, run(tmp_path / "parts", 4))
    stored = [
        tmp_path / name / "checkpoints" / "checkpoints" / driven.checkpoints[-1]
        for name, driven in (("whole", whole), ("parts", rest))
    ]
    assert differing(*map(tensors, stored)) == []
    state = torch.load(stored[0] / "state_dict.pth", weights_only=True)
    averages, weights = state["models_state_dict"][0], state["training_weights"][0]
    assert differing(averages, weights) != []
    seen = lines(tmp_path / "whole", "validated", 0)
    assert seen[-1] == float(averages["0.weight"].sum())
    assert whole.training[-1]["samples_per_second"] > 0
    assert whole.training[-1]["peak_memory_gib"] > 0


@pytest.mark.long
@pytest.mark.slots
@pytest.mark.parametrize("zero_stage", [0, 2])
def test_averages_of_an_engine_are_resumed_exactly(
    warm_slots: Warm, tmp_path: Path, zero_stage: int
) -> None:
    """They are in each rank's state."""
    stored = []
    for name, parts in (("whole", [8]), ("parts", [4, 8])):
        driven = None
        for batches in parts:
            of = config(tmp_path / name, batches, zero_stage=zero_stage)
            of = of.model_copy(update={"entrypoint": "callback_trials:ReadyMadeEngine"})
            driven = drive(warm_slots(2), of, tmp_path / name, resume=driven, persist=True)
        assert driven is not None
        stored.append(tensors(tmp_path / name / "checkpoints/checkpoints" / driven.checkpoints[-1]))
    assert sum("averages" in name for name in stored[0]) == 8
    assert differing(*stored) == []


@pytest.mark.long
@pytest.mark.slots
@pytest.mark.usefixtures("warm_home")
def test_a_scripts_loss_that_stays_nan_ends_it_too(tmp_path: Path) -> None:
    """What it wrote in the meantime is not committed."""
    of = toy_config(
        tmp_path, 40, entrypoint="python3 core_script.py 40", searcher={"metric": "loss"},
        hyperparameters={"record": str(tmp_path), "store_every": 4, "nan_at": 10},
    )  # fmt: skip
    with pytest.raises(TrialError, match="the loss is not finite since batch 10"):
        drive_run(of)
    store = CheckpointStore(of.checkpoint_storage.url)
    assert [each.progress.batches_trained for each in store.list()] == [4, 8]


@pytest.mark.long
@pytest.mark.slots
@pytest.mark.usefixtures("warm_home")
def test_a_loss_that_stays_nan_ends_the_run_before_it_saves_it(tmp_path: Path) -> None:
    """The error names the batch and rank; the last checkpoint is from before it; no restart.

    With `StopOnNonFinite` the run ends well, and earlier, with its reason.
    """
    of = config(tmp_path / "fails", 24, nan_at=10).model_copy(update={"max_restarts": 3})
    with pytest.raises(TrialError, match=r"since batch 10 \(\"loss\" is nan in batch 10 on rank 1"):
        drive_run(of)
    store = CheckpointStore(of.checkpoint_storage.url)
    assert [each.progress.batches_trained for each in store.list()] == [4, 8]
    report = next((tmp_path / "home").rglob("report.md")).read_text()
    assert 'training metric "loss" is nan in batch 10 on rank 1' in report.replace("\\", "")

    result = drive_run(config(tmp_path / "stops", 24, nan_at=10, stops="nan"), "toy-0000beee")
    assert (result.batches_trained, result.checkpoint_at, result.stopped_early) == (12, 8, True)
    assert result.trial_stop_reason == "loss is nan in 1 workload, until batch 12"
    assert result.ledger is not None
    assert result.ledger["runs"][0]["is_over"]
    assert "completed early: loss is nan" in Path(str(result.report_path)).read_text()


def test_early_stopping_continues_its_count() -> None:
    """Resumed after any validation, it stops at the same one, with the same reason."""
    values = [5.0, 4.0, 4.5, float("-inf"), float("nan"), 1.0]

    def reason_after(resumed_at: int) -> tuple[int, str | None]:
        state = None
        for validation, value in enumerate(values):
            if validation in (0, resumed_at):
                trial = context(metric="loss", smaller_is_better=True)
                stop = EarlyStopping(patience=3, min_delta=0.1)
                stop.attach(trial)
                if state is not None:
                    stop.load_state_dict(state)
            trial.run_info.batches_trained = 10 * (validation + 1)
            stop.on_validation_end({"loss": np.float32(value)})  # as callbacks get it
            state = stop.state_dict()
            if trial.get_stop_requested():
                return validation, trial.run_info.stop_reason
        return -1, None

    expected = (4, "loss has not improved by more than 0.1 since batch 20")
    for resumed_at in range(5):
        assert reason_after(resumed_at) == expected


@pytest.mark.parametrize(
    ("searcher", "value", "begins_again"),
    [
        ({"metric": "accuracy", "smaller_is_better": False}, 0.7, False),
        ({"metric": "loss", "smaller_is_better": True}, 1.4, True),
        ({"metric": "accuracy", "smaller_is_better": True}, 0.95, True),
    ],
)
def test_early_stopping_does_not_compare_with_another_metrics_best(
    searcher: dict[str, Any], value: float, begins_again: bool
) -> None:
    """After a change of metric or direction it counts from the beginning."""
    before, after = EarlyStopping(patience=2), EarlyStopping(patience=2)
    before.attach(context(metric="accuracy", smaller_is_better=False))
    for earlier in (0.9, 0.8):
        before.on_validation_end({"accuracy": earlier})
    trial = context(**searcher)
    after.attach(trial)
    after.load_state_dict(before.state_dict())
    after.on_validation_end({searcher["metric"]: value})
    assert trial.get_stop_requested() is not begins_again
    assert after.state_dict()["best"] == (value if begins_again else 0.9)


def test_early_stopping_takes_what_it_is_not_told_from_the_searcher() -> None:
    stop = EarlyStopping()
    stop.attach(context(metric="accuracy", smaller_is_better=False))
    assert (stop.metric, stop.smaller_is_better) == ("accuracy", False)
    stop.on_validation_end({"acc": 0.5})  # misspelt: the driver says so
    with pytest.raises(TrialError, match="needs a metric"):
        EarlyStopping().attach(context())
    other = EarlyStopping(metric="f1")
    other.attach(context(metric="accuracy"))
    for metrics in ({"accuracy": 0.5}, {"f1": 0.5}, {"accuracy": 0.5}):
        other.on_validation_end(metrics)  # one validation may lack it
    with pytest.raises(TrialError, match=r'metric "f1" must be a number.*accuracy'):
        other.on_validation_end({"accuracy": 0.5})


def test_a_workload_that_is_finite_begins_the_count_again() -> None:
    trial, stop = context(), StopOnNonFinite(patience=2)
    stop.attach(trial)
    for value, asks in ((float("inf"), False), (1.0, False), (float("nan"), False)):
        stop.on_training_workload_end({"loss": value}, [])
        assert trial.get_stop_requested() is asks
    again = StopOnNonFinite(patience=2)
    again.attach(trial)
    again.load_state_dict(stop.state_dict())
    again.on_training_workload_end({"loss": float("nan")}, [])
    assert trial.get_stop_requested()


def test_a_misspelt_searcher_metric_is_found_in_spite_of_them() -> None:
    """They only look into the metrics; a callback that writes to them may add one."""

    class Adds(EarlyStopping):
        def on_validation_end(self, metrics: dict[str, Any]) -> None:
            metrics["mean"] = 0.5

    class Passes(EarlyStopping):
        def on_validation_end(self, metrics: dict[str, Any]) -> None:
            self.note(metrics)

    class Looks(EarlyStopping):
        def on_validation_end(self, metrics: dict[str, Any]) -> None:
            if "loss" in metrics and metrics["loss"] < 1:
                print(f"{metrics}", len(metrics), [*sorted(metrics)])

    seen = [Adds(), Passes(), Looks(), EarlyStopping(), ExponentialMovingAverage()]
    assert [may_change_metrics(each) for each in seen] == [True, True, False, False, False]
