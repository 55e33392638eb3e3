"""A trial that is resumed with other hyperparameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.flow import one_slot, train
from trial_core.errors import TrialflowError

pytestmark = [pytest.mark.slots, pytest.mark.server]


def test_what_a_person_has_changed_counts_and_is_told(here: Path) -> None:
    """With both values, in the report, as all notices are. A retry of nothing changes nothing."""

    def report(
        batches: int, trial: str | None = None, keep: list[str] | None = None, **changes: object
    ) -> tuple[str, str]:
        hparams = {"lr": 0.05, "gamma": 0.5, **changes}
        config = one_slot(
            here, batches, entrypoint="settings_trials:Decaying", hyperparameters=hparams
        )
        result = train(config, trial, keep=keep)
        return result.trial, Path(result.report_path).read_text()

    trial, first = report(4)
    _, longer = report(6, trial)
    _, other = report(8, trial, lr=0.005, gamma=0.9)
    _, kept = report(10, trial, keep=["scheduler"], lr=0.005, gamma=0.8)
    assert "since it was saved" not in first
    assert "since it was saved: searcher.max_length.batches 4 -> 6" in longer
    assert "count" not in longer.split("since it was saved")[1].splitlines()[0]
    for text in (
        "hyperparameters.lr 0.05 -> 0.005, hyperparameters.gamma 0.5 -> 0.9",
        "The new values count: scheduler 0 (ExponentialLR): gamma 0.5 -> 0.9, lr 0.05 -> 0.005",
    ):
        assert text in other
    stays = "gamma stays 0.9 (not 0.8), because you asked for it (keep)"
    assert f"The checkpoint's values stay: scheduler 0 (ExponentialLR): {stays}" in kept
    with pytest.raises(TrialflowError, match="a batch had 4 samples"):
        report(12, trial, global_batch_size=6)
