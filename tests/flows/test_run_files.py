"""What a trial writes for TensorBoard, under the flow: stored with the run, and said where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.prefect import PrefectServer
from tests.support.slots import TOY, toy_config
from trial_core.checkpoint.store import CheckpointStore

pytestmark = [pytest.mark.slots, pytest.mark.server]


def train(config: Any) -> Any:
    """Run the flow, then send the server all that it has to say of it."""
    from trialflow.flows.server.embedded import flush
    from trialflow.flows.train import train as flow

    try:
        return flow(config)
    finally:
        flush()


def stage_names(server: PrefectServer, flow_run_id: str) -> list[str]:
    found = server.query(
        "task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run_id]}}, "limit": 200}
    )
    return [run["name"] for run in found]


@pytest.mark.parametrize("storage", ["file", "memory"])
def test_event_files_are_stored_and_said_where(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    """A stage of its own uploads what is left; the result and the report have the address."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    url = f"file://{tmp_path}/storage" if storage == "file" else "memory://measured"
    config = toy_config(
        tmp_path, 5, entrypoint="context_trials:Measuring", code=str(TOY.parent / "toy_context"),
        resources={"slots_per_trial": 1}, checkpoint_storage=url,
        environment={"environment_variables": {"PYTHONPATH": str(TOY)}},
    )  # fmt: skip
    with prefect_server.configured():
        result = train(config)
    assert result.tensorboard_url == f"{url}/runs/{result.trial}/tensorboard"
    assert f"TensorBoard: `{result.tensorboard_url}`" in Path(result.report_path).read_text()
    assert "upload-run-files @5" in stage_names(prefect_server, result.flow_run_id)

    stored = CheckpointStore(url).storage.sizes(f"runs/{result.trial}/tensorboard")
    local = {
        f"runs/{result.trial}/{path.relative_to(result.run_dir).as_posix()}": path.stat().st_size
        for path in (Path(result.run_dir) / "tensorboard").rglob("*")
        if path.is_file()
    }
    assert stored == local
    assert [key for key in stored if key.endswith(".pt.trace.json")]
