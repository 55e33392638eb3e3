"""`Trainer.fit` on a single rank, in plain python. All runs share one start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.fitting import fit_toys
from tests.support.slots import lines
from tests.trial_core.trainer.fits import assert_same_end, every, hooks, run, store
from trial_core.observe.ledger.stored_ledger import read_ledger

pytestmark = pytest.mark.slots

HPARAMS = {"accumulation": 3, "train_samples": 50, "zero_stage": 2}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs in test mode, stopped, resumed, and with mistakes."""
    folder = tmp_path_factory.mktemp("alone")
    runs = {
        "test": run(folder / "test", {"test_mode": True}),
        "stop": run(folder / "stop", every(5, 50), at_batch=7, do="stop"),
        "metric": run(folder / "metric", {**every(5, 5), "validation_period": {"batches": 2}}),
        "straight": run(folder / "straight", every(4, 9), **HPARAMS),
        "first": run(folder / "parts", every(4, 4), **HPARAMS),
        "rest": run(folder / "parts", {**every(4, 9), "latest_checkpoint": "latest"}, **HPARAMS),
        "zero 1": run(folder / "zero", every(4, 4), zero_stage=1),
        "zero 3": run(
            folder / "zero", {**every(5, 9), "latest_checkpoint": "latest"}, zero_stage=3
        ),
        "saves twice": run(
            folder / "damaged",
            {**every(3, 5), "checkpoint_period": {"batches": 3}, "checkpoint_policy": "none"},
        ),
        "finds damage": {
            "trial": "damaging_trials:FindsDamage",
            **run(
                folder / "damaged", {**every(3, 6), "latest_checkpoint": "latest"},
                storage=f"{folder}/damaged/checkpoints",
            ),
        },
        "prunes": run(
            folder / "prunes", {**every(4, 20), "checkpoint_period": {"batches": 4}},
        ),
        "nothing best": run(folder / "any", {**every(5, 6), "validation_period": {"batches": 2}}),
    }  # fmt: skip
    runs["metric"]["init"]["exp_conf"]["searcher"]["metric"] = "accuracy"
    runs["prunes"]["init"]["exp_conf"] = {
        "name": "toy",
        "checkpoint_storage": {
            "url": f"file://{folder}/prunes/checkpoints", "save_trial_latest": 1,
            "keep_every": {"batches": 8},
        },
    }  # fmt: skip
    runs["rest"]["init"]["exp_conf"]["cost"] = {"per_slot_hour": 2.5}
    del runs["nothing best"]["init"]["exp_conf"]["searcher"]
    outcomes = fit_toys("python", folder / "launch", *runs.values(), ranks=1)
    return {"folder": folder, **{name: o[0] for name, o in zip(runs, outcomes, strict=True)}}


@pytest.mark.long
def test_periods_in_containers_and_epochs(tmp_path: Path) -> None:
    """Validations after 5, 30 and at the end; checkpoints after epochs 1 and 3 and at the end."""
    folder = tmp_path / "periods"
    periods = {
        "max_length": {"epochs": 4}, "reporting_period": {"batches": 13},
        "validation_period": {"batches": [5, 30]}, "checkpoint_period": {"epochs": [1, 3]},
        "checkpoint_policy": "none",
    }  # fmt: skip
    # 8 micro-batches per epoch.
    fit_toys("python", tmp_path, run(folder, periods, train_samples=16), ranks=1)
    manifests = store(folder).list()
    assert [each.progress.batches_trained for each in manifests] == [8, 24, 32]
    assert manifests[-1].progress.validated_at == 32
    called = [each["hook"] for each in hooks(folder)]
    assert called.count("on_validation_end") == 3
    # The workloads end after 5, 8, 13, 24, 26, 30 and 32 batches.
    assert [
        each["batches"] for each in hooks(folder) if each["hook"] == "on_training_workload_end"
    ] == [5, 3, 5, 11, 2, 4, 2]
    assert called.count("on_training_epoch_end") == 4


def test_test_mode_trains_and_validates_one_batch_and_keeps_nothing(alone: dict[str, Any]) -> None:
    """It also saves, but uploads nothing. It needs no max_length."""
    folder = alone["folder"] / "test"
    assert alone["test"]["batches_trained"] == 1
    assert alone["test"]["checkpoint_uuid"] is None
    assert alone["test"]["validation_metrics"]["mean_index"] == 0.5  # of samples 0 and 1
    assert "on_checkpoint_write_end" in [each["hook"] for each in hooks(folder)]
    assert not (folder / "checkpoints").exists()


def test_a_stop_request_ends_the_fit_after_its_batch(alone: dict[str, Any]) -> None:
    """In the 8th batch of a workload of 10: the fit saves and ends there."""
    assert alone["stop"]["stopped_early"]
    assert alone["stop"]["batches_trained"] == 8
    (manifest,) = store(alone["folder"] / "stop").list()
    assert manifest.progress.batches_trained == 8


def test_a_single_rank_resumes_bit_for_bit(alone: dict[str, Any]) -> None:
    """4 + 5 batches equal 9, without a launcher."""
    folder = alone["folder"]
    assert alone["rest"]["trial"] == alone["first"]["trial"]
    assert_same_end(folder / "straight", folder / "parts", [alone["straight"]], [alone["rest"]])


def test_the_ledger_has_the_time_of_all_fits_of_a_trial(alone: dict[str, Any]) -> None:
    """With the price that `exp_conf` names; test mode leaves none."""
    folder = alone["folder"]
    first, rest = read_ledger(store(folder / "parts"), alone["rest"]["trial"]).runs
    assert [first.trained_to, rest.trained_to] == [4, 9]
    assert [first.per_slot_hour, rest.per_slot_hour] == [None, 2.5]
    assert first.is_over
    assert rest.is_over
    for run_time, restored in ((first, False), (rest, True)):
        assert {
            "build",
            "train",
            "validate",
            "checkpoint_stall",
        } <= run_time.slot_milliseconds.keys()
        assert ("restore" in run_time.slot_milliseconds) == restored
        assert "redone" not in run_time.slot_milliseconds
    assert read_ledger(store(folder / "test"), alone["test"]["trial"]).runs == ()


def test_a_fit_resumes_from_the_newest_intact_checkpoint_and_claims_it(
    alone: dict[str, Any],
) -> None:
    """The newest one is damaged. The one before it is claimed while the fit trains."""
    folder = alone["folder"] / "damaged"
    assert alone["finds damage"]["trial"] == alone["saves twice"]["trial"]
    assert [line[0] for line in lines(folder, "samples", 0)] == [*range(5), *range(3, 6)]
    older = next(each for each in store(folder).list() if each.progress.batches_trained == 3)
    assert json.loads((folder / "claims.json").read_text()) == [older.uuid]


def test_other_machines_cannot_connect_to_a_script(alone: dict[str, Any]) -> None:
    """Without a launcher, torch.distributed's store listens on the loopback interface alone."""
    assert alone["test"]["exposed"] == alone["straight"]["exposed"] == []


def test_a_missing_searcher_metric(alone: dict[str, Any]) -> None:
    """The message lists the metrics that the trial reports.

    The trial's callback could have added it in on_validation_end, so it is missed after the
    second validation.
    """
    assert alone["metric"]["error"] == (
        'TrialError: searcher.metric "accuracy" is not among the validation metrics that the trial '
        'reports: loss, mean_index. Set searcher.metric to one of these, or report "accuracy" in '
        "the trial's validation"
    )


def test_without_a_searcher_metric_every_validation_is_saved(alone: dict[str, Any]) -> None:
    """Any of them might be the best."""
    saved = [each.progress.batches_trained for each in store(alone["folder"] / "any").list()]
    assert saved == [2, 4, 6]


def test_a_fit_resumes_with_another_zero_stage(alone: dict[str, Any]) -> None:
    """4 batches with ZeRO-1 and 5 more with ZeRO-3, in one order of the data."""
    assert alone["zero 3"]["trial"] == alone["zero 1"]["trial"]
    assert alone["zero 3"]["batches_trained"] == 9
    seen = lines(alone["folder"] / "zero", "samples", 0)
    assert [line[0] for line in seen] == [*range(9)]
    assert len({sample for line in seen for sample in line[2:]}) == 18


def test_a_fit_prunes_by_its_retention_policy(alone: dict[str, Any]) -> None:
    """Saved every 4 batches; kept are the last one, and one for every 8 batches."""
    manifests = store(alone["folder"] / "prunes").list()
    assert [manifest.progress.batches_trained for manifest in manifests] == [8, 16, 20]
    assert alone["prunes"]["checkpoint_uuid"] == manifests[-1].uuid
