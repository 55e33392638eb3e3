"""A trial's TensorBoard files in a flow run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.flow import stages, train
from tests.support.prefect import PrefectServer
from tests.support.slots import TOY, toy_config
from trial_core.checkpoint.store import CheckpointStore

pytestmark = [pytest.mark.slots, pytest.mark.server]


@pytest.mark.long
@pytest.mark.parametrize("storage", ["file", "memory"])
def test_tensorboard_files_are_uploaded(
    prefect_server: PrefectServer, here: Path, storage: str
) -> None:
    """A stage at the end uploads the remaining files; the result and the report have the URL."""
    url = f"file://{here}/storage" if storage == "file" else "memory://measured"
    config = toy_config(
        here, 5, entrypoint="context_trials:Measuring", code=str(TOY.parent / "toy_context"),
        resources={"slots_per_trial": 1}, checkpoint_storage=url,
        environment={"environment_variables": {"PYTHONPATH": str(TOY)}},
    )  # fmt: skip
    result = train(config)
    assert result.tensorboard_url == f"{url}/runs/{result.trial}/tensorboard"
    assert f"TensorBoard: `{result.tensorboard_url}`" in Path(result.report_path).read_text()
    last = "upload-run-files @5"
    assert last in [each.name for each in stages(prefect_server, result.flow_run_id, last)]

    stored = CheckpointStore(url).storage.sizes(f"runs/{result.trial}/tensorboard")
    local = {
        f"runs/{result.trial}/{path.relative_to(result.run_dir).as_posix()}": path.stat().st_size
        for path in (Path(result.run_dir) / "tensorboard").rglob("*")
        if path.is_file()
    }
    assert stored == local
    assert [key for key in stored if key.endswith(".pt.trace.json")]
