"""The flow and `Trainer.fit` tell the same story: their order is written twice, and held here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fitting import fit_toys
from tests.support.prefect import PrefectServer
from tests.support.slots import lines, toy_config

pytestmark = [pytest.mark.slots, pytest.mark.server]

# When an upload ends beside training is chance, so is where its hook falls.
BY_CHANCE = "on_checkpoint_upload_end"
DIFFERENT_EACH_TIME = ("at", "uuid", "folder")


def story(folder: Path) -> list[dict[str, Any]]:
    """Every hook that ran, with its arguments, on rank 0."""
    return [
        {name: value for name, value in line.items() if name not in DIFFERENT_EACH_TIME}
        for line in lines(folder, "hooks", 0)
    ]


def test_every_hook_runs_at_the_same_place(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutually prime periods, a validation before the first batch, epochs that end in between: the
    same hooks with the same arguments in the same order."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    flow_folder, fit_folder = tmp_path / "flow", tmp_path / "fit"
    flow_folder.mkdir()
    hparams = {"train_samples": 14}
    config = toy_config(
        flow_folder, 16, resources={"slots_per_trial": 1}, scheduling_unit=7,
        min_validation_period={"batches": 3}, min_checkpoint_period={"batches": 5},
        perform_initial_validation=True, checkpoint_policy="best",
        hyperparameters={**hparams, "record": str(flow_folder)},
    )  # fmt: skip
    with prefect_server.configured():
        from flows.train import train

        train(config)
    fit = {
        "max_length": {"batches": 16}, "reporting_period": {"batches": 7},
        "validation_period": {"batches": 3}, "checkpoint_period": {"batches": 5},
        "step_zero_validation": True,
    }  # fmt: skip
    init = {
        "hparams": {**hparams, "record": str(fit_folder)},
        "exp_conf": {"searcher": {"metric": "loss"}},
    }
    fit_toys("python", fit_folder, {"init": init, "fit": fit}, ranks=1)

    expected, seen = story(flow_folder), story(fit_folder)
    assert len(expected) > 30
    assert [e for e in seen if e["hook"] != BY_CHANCE] == [
        e for e in expected if e["hook"] != BY_CHANCE
    ]
    assert seen.count({"hook": BY_CHANCE}) == expected.count({"hook": BY_CHANCE}) > 3
    assert seen[-2:] == expected[-2:] == [{"hook": BY_CHANCE}, {"hook": "on_trial_shutdown"}]
