"""A trial that is resumed with other hyperparameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.flow import one_slot, train
from tests.support.slots import toy_config
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.errors import TrialflowError
from trial_core.schedule.units import EpochLength
from trialflow.deployments.cli.main import main

pytestmark = [pytest.mark.slots, pytest.mark.server]


GAMMA = "The new values count: scheduler 0 (ExponentialLR): gamma 0.5 -> 0.9"


def decaying(here: Path, batches: int, **changes: object) -> ExperimentConfig:
    return one_slot(
        here, batches, entrypoint="settings_trials:Decaying",
        hyperparameters={"lr": 0.05, "gamma": 0.5, **changes},
    )  # fmt: skip


@pytest.mark.long
def test_what_a_person_has_changed_counts_and_is_told(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With both values: by --dry-run, in the report, the result and the checkpoints' manifests."""

    def report(
        batches: int, trial: str | None = None, keep: list[str] | None = None, **changes: object
    ) -> tuple[str, str]:
        result = train(decaying(here, batches, **changes), trial, keep=keep)
        text = Path(result.report_path).read_text()
        assert all(each in text for each in result.changes)
        return result.trial, text

    trial, first = report(4)
    store = CheckpointStore(decaying(here, 4).checkpoint_storage.url)
    assert "since it was saved" not in first
    _, longer = report(6, trial)
    assert "since it was saved: searcher.max_length.batches 4 -> 6" in longer
    assert "count" not in longer.split("since it was saved")[1].splitlines()[0]

    folder = Path(store.url.removeprefix("file://"))
    before = {file for file in folder.rglob("*") if file.is_file()}
    unchanged = "nothing has changed since it was saved"
    for batches, changes, text in ((8, {"gamma": 0.9}, GAMMA), (6, {}, unchanged)):
        path = here / "experiment.yaml"
        path.write_text(yaml.dump(decaying(here, batches, **changes).model_dump(mode="json")))
        capsys.readouterr()
        assert main(["train", str(path), "--resume", "--dry-run", "--quiet"]) == 0
        assert text in capsys.readouterr().out
    assert {file for file in folder.rglob("*") if file.is_file()} == before

    _, other = report(8, trial, lr=0.005, gamma=0.9)
    _, kept = report(10, trial, keep=["scheduler", "optimizer.lr"], lr=0.005, gamma=0.8)
    for text in ("hyperparameters.lr 0.05 -> 0.005, hyperparameters.gamma 0.5 -> 0.9",
                 f"{GAMMA}, lr 0.05 -> 0.005"):  # fmt: skip
        assert text in other
    stays = "gamma stays 0.9 (not 0.8), because you asked for it (keep)"
    assert f"The checkpoint's values stay: scheduler 0 (ExponentialLR): {stays}" in kept
    assert "Not kept: optimizer.lr, because it has not changed" in kept
    noted = store.list(trial)[-1].changes
    assert [each.split("(batch ")[1][0] for each in noted] == ["4", "6", "8"]
    assert GAMMA in noted[1]
    with pytest.raises(TrialflowError, match="a batch had 4 samples"):
        report(12, trial, global_batch_size=6)


@pytest.mark.long
def test_batches_have_another_size_from_an_epochs_end_on(here: Path) -> None:
    """48 samples, by 4 in the first epoch and then by 8: as the error says that it can be done."""

    def resumed(batches: int, size: int) -> Manifest:
        config = decaying(here, batches, global_batch_size=size)
        store, trials = CheckpointStore(config.checkpoint_storage.url), [*trial]
        trial[:] = [train(config, *trials).trial]
        return store.list(*trial)[-1]

    trial: list[str] = []
    resumed(6, 4)
    with pytest.raises(TrialflowError, match=r"24 samples of .* max_length of 12 batches"):
        resumed(20, 10)
    resumed(12, 4)
    for batches, counted in ((16, "batch size 4 -> 8"), (20, "max_length.batches 16 -> 20")):
        saved = resumed(batches, 8)
        assert counted in saved.changes[-1]
        assert saved.epoch == EpochLength(6, 1, first_epoch=1, first_batch=12)
        assert saved.progress.batches_trained * 8 + saved.progress.extra_samples == 8 * batches - 48


@pytest.mark.long
@pytest.mark.parametrize("keep", [None, ["optimizer"]])
def test_a_script_that_restores_itself_is_compared(here: Path, keep: list[str] | None) -> None:
    """The run says what has changed in its experiment, and that it cannot keep anything."""

    def report(steps: int, trial: str | None = None, **hparams: Any) -> tuple[str, str]:
        config = toy_config(
            here, entrypoint=f"python3 core_script.py {steps}", searcher={"metric": "loss"},
            hyperparameters={"record": str(here), "store_every": 2, **hparams},
            resources={"slots_per_trial": 1},
        )  # fmt: skip
        result = train(config, trial, keep=keep if trial else None)
        return result.trial, Path(result.report_path).read_text()

    trial, _ = report(2)
    _, text = report(4, trial, lr=0.5)
    assert text.count("changed since it was saved: ") == 1
    assert "hyperparameters.lr 0.5, which is new" in text
    told = "keep has no effect (optimizer): the script restores its state itself"
    assert (told in text) is (keep is not None)
