"""Mistakes of the user that a run finds late: trained batches are kept, and nothing is retried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trialflow.flows.evaluate
import trialflow.flows.train
from tests.support.flow import Stage, one_slot, stages, train
from tests.support.prefect import PrefectServer
from tests.support.slots import lines
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointError, CheckpointNotFound, LaunchError
from trialflow.flows.server.embedded_server import flush

pytestmark = [pytest.mark.slots, pytest.mark.server]


def newest_run(server: PrefectServer, last: str = "") -> list[Stage]:
    (run, *_) = server.query("flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})
    return stages(server, run["id"], last)


def searcher(metric: str) -> dict[str, Any]:
    return {"name": "single", "metric": metric, "max_length": {"batches": 6}}


@pytest.mark.long
def test_a_missing_searcher_metric_costs_no_training(
    here: Path, prefect_server: PrefectServer
) -> None:
    """A single validation without it is a warning, and the run saves all 6 batches.

    With the right metric, the resumed trial repeats that validation alone.
    """

    def config(metric: str) -> Any:
        return one_slot(here, 6, searcher=searcher(metric), hyperparameters={"record": str(here)})

    assert train(config("accuracy")).batches_trained == 6
    last = "callbacks on_trial_shutdown @6"
    states = {stage.name: stage.state for stage in newest_run(prefect_server, last)}
    assert states["checkpoint-upload @6"] == states[last] == "Completed"

    saved = CheckpointStore(f"file://{here}/checkpoints").list()
    assert [manifest.progress.batches_trained for manifest in saved] == [4, 6]
    result = train(config("mean_index"), saved[-1].trial)
    assert result.batches_trained == 6
    assert stages(prefect_server, result.flow_run_id, "validate @6")
    assert [line[0] for line in lines(here, "samples", 0)] == list(range(6))


@pytest.mark.long
def test_files_that_no_checkpoint_can_have_end_the_run(
    here: Path, prefect_server: PrefectServer
) -> None:
    """With the rank's message. Neither the upload nor the run is retried."""
    config = one_slot(
        here, 8, entrypoint="bad_trials:SavesUnderATakenName", max_restarts=5,
        hyperparameters={"record": str(here)},
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"^rank 0 saved a file 'manifest.json' at"):
        train(config)
    seen = newest_run(prefect_server)
    (upload,) = [stage for stage in seen if stage.name == "checkpoint-upload @4"]
    assert (upload.state, upload.tries) == ("Failed", 1)
    assert [stage.name for stage in seen].count("build-trial") == 1


def test_a_start_that_no_file_can_have_as_its_name(here: Path) -> None:
    """It is no path, and so a reference, to nothing."""
    with pytest.raises(CheckpointNotFound):
        trialflow.flows.train.started_from(one_slot(here, 6), "x" * 300, "toy-0000beef")


@pytest.mark.parametrize(
    "flow", [trialflow.flows.train, pytest.param(trialflow.flows.evaluate, marks=pytest.mark.long)]
)
def test_missing_code_reserves_no_accelerators(
    here: Path, prefect_server: PrefectServer, monkeypatch: pytest.MonkeyPatch, flow: Any
) -> None:
    """The error says where the code folder was expected."""
    monkeypatch.setattr(flow, "gpu_slots", lambda config: pytest.fail("it waits for GPUs"))
    name = flow.__name__.removeprefix("trialflow.flows.")
    with (
        prefect_server.configured(),
        pytest.raises(LaunchError, match=r"no code folder /nowhere on .* same place"),
    ):
        getattr(flow, name)(one_slot(here, 6, code="/nowhere"))
    flush()
