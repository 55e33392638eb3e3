"""Names of flow runs."""

from __future__ import annotations

import pytest
from prefect import flow, runtime
from prefect.client.orchestration import get_client

from tests.flows.lifecycle.conftest import Stage
from trialflow.flows.lifecycle.run_names import train_name
from trialflow.flows.train import TrialResult

pytestmark = pytest.mark.server


def test_a_run_has_its_trials_name(stage: Stage) -> None:
    """Twelve runs of one experiment are told apart, and found again in the storage."""
    run, result = stage.train()
    assert isinstance(result, TrialResult)
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(run).name == result.trial
    assert result.trial.startswith("toy-")


@pytest.mark.usefixtures("stage")
def test_a_run_that_continues_a_trial_has_its_name() -> None:
    """Not that of the trial which its own id would begin."""

    @flow(flow_run_name=train_name)
    def train(config: str, trial: str) -> str:
        return str(runtime.flow_run.name)

    assert train("mine", "mine-4f0c21aa93b7") == "mine-4f0c21aa93b7"
