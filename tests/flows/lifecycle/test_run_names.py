"""Names of flow runs."""

from __future__ import annotations

import pytest
from prefect.client.orchestration import get_client

from tests.flows.lifecycle.conftest import Stage
from trialflow.flows.train import TrialResult

pytestmark = pytest.mark.server


def test_a_run_has_its_trials_name(stage: Stage) -> None:
    """Twelve runs of one experiment are told apart, and found again in the storage."""
    run, result = stage.train()
    assert isinstance(result, TrialResult)
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(run).name == result.trial
    assert result.trial.startswith("toy-")
