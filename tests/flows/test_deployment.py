"""The deployment `train` as a team uses it: server, process worker, `prefect deployment run`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.prefect import PrefectServer, process_worker
from tests.support.processes import descendants, wait_until_gone
from tests.support.slots import lines, toy_config
from trial_core.checkpoint.store import CheckpointStore

pytestmark = [pytest.mark.slots, pytest.mark.server]

RUN_SECONDS = 240.0


def ended(server: PrefectServer, flow_run_id: str) -> dict[str, Any]:
    """The flow run, once it has reached a final state."""
    deadline = time.monotonic() + RUN_SECONDS
    while time.monotonic() < deadline:
        run: dict[str, Any] = server.query(f"flow_runs/{flow_run_id}")
        if run["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
            return run
        time.sleep(0.5)
    raise AssertionError(f"flow run {flow_run_id} is still {run['state_name']}")


def test_a_deployment_run_is_executed_by_a_process_worker(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """`prefect deploy`, `prefect worker start`, `prefect deployment run`: the worker trains the
    toy on 2 ranks; a parameter of the wrong type is refused before anything is scheduled."""
    prefect_server.prefect("work-pool", "create", "local", "--type", "process")
    prefect_server.prefect(
        "deploy", "--prefect-file", "deployments/prefect.yaml", "--name", "train"
    )  # fmt: skip
    config = toy_config(tmp_path, 4, hyperparameters={"record": str(tmp_path)})
    parameters = {"config": config.model_dump(mode="json")}

    wrong = json.loads(json.dumps(parameters))
    wrong["config"]["searcher"]["max_length"] = {"batches": "ten"}
    with pytest.raises(AssertionError, match="batches"):
        prefect_server.prefect("deployment", "run", "train/train", "--params", json.dumps(wrong))

    home = {"TRIALFLOW_HOME": str(tmp_path / "home")}
    with process_worker(prefect_server, "local", home) as worker:
        prefect_server.prefect(
            "deployment", "run", "train/train", "--params", json.dumps(parameters)
        )  # fmt: skip
        (scheduled,) = prefect_server.query(
            "flow_runs/filter", {"deployments": {"name": {"any_": ["train"]}}}
        )
        run = ended(prefect_server, scheduled["id"])
        log = prefect_server.home / "worker-local.log"
        assert run["state_name"] == "Completed", log.read_text()[-4000:]
        assert wait_until_gone(descendants(worker), 15) == []
    for rank in (0, 1):
        assert [line[0] for line in lines(tmp_path, "samples", rank)] == list(range(4))
    newest = CheckpointStore(config.checkpoint_storage.url).list()[-1]
    assert newest.trial == f"toy-{run['id'].replace('-', '')[:8]}"
