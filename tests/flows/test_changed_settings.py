"""A trial that is resumed with other hyperparameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.flow import one_slot, train

pytestmark = [pytest.mark.slots, pytest.mark.server]


def test_other_hyperparameters_that_a_restore_overrides_are_warned_of(here: Path) -> None:
    """With both values, in the report, as all notices are; an unchanged resume warns of nothing."""

    def report(batches: int, trial: str | None = None, **changes: float) -> tuple[str, str]:
        hparams = {"lr": 0.05, "gamma": 0.5, **changes}
        entrypoint = "settings_trials:Decaying"
        result = train(
            one_slot(here, batches, entrypoint=entrypoint, hyperparameters=hparams), trial
        )
        return result.trial, Path(result.report_path).read_text()

    trial, first = report(4)
    _, same = report(8, trial)
    _, other = report(12, trial, lr=0.005, gamma=0.9)
    assert "changed since" not in first + same
    assert other.count("changed since the checkpoint") == 1
    for text in (
        "lr 0.05 -> 0.005, gamma 0.5 -> 0.9",
        "optimizer 0 (SGD): initial_lr 0.05 (not 0.005); "
        "scheduler 0 (ExponentialLR): gamma 0.5 (not 0.9)",
    ):
        assert text in other
