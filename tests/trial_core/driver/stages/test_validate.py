"""The stage validate."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.slots import toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.driver.run import Launch, Run
from trial_core.driver.stages.validate import report_validation, validate
from trial_core.errors import TrialError
from trial_core.messages import Validated


class OneRank:
    """A slot group of one rank whose validation reports another metric than the searcher's."""

    def request(self, *request: object, **limits: float | None) -> list[Validated]:
        return [Validated(metrics={"lost": 0.125}, seconds=0.0, stop_requested=False)]


def test_metrics_without_the_searcher_metric_belong_to_the_checkpoint(tmp_path: Path) -> None:
    """They are those of its batch, though the run fails: it is not listed as not validated."""
    store = CheckpointStore(str(tmp_path))
    launch = Launch(Run(toy_config(tmp_path), "toy-0000beef", tmp_path, store))
    launch.slots = OneRank()  # type: ignore[assignment]
    launch.answers.metrics["validation"] = {"loss": 0.25}
    assert validate(launch, 6)
    with pytest.raises(TrialError, match="lost"):
        report_validation(launch, 6)
    assert launch.answers.metrics["validation"] == {"lost": 0.125}
