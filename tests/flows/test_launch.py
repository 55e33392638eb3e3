"""How many ranks a run is launched on."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.train import launch_slots
from tasks.run import TrialRun
from tests.support.slots import toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import LaunchError
from trial_core.observer import Observer


@pytest.fixture
def one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose NVIDIA driver reports one GPU, and an environment that does not hide it."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: Some GPU (UUID: a)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def toy_run(folder: Path, variables: dict[str, str]) -> TrialRun:
    """A run of the toy trial on two slots, not yet launched."""
    config = toy_config(folder, environment={"environment_variables": variables})
    return TrialRun(config, "toy-0a", folder, CheckpointStore("memory://"), Observer())


@pytest.mark.slots
@pytest.mark.usefixtures("one_gpu")
def test_the_experiment_may_choose_cpu_ranks(tmp_path: Path) -> None:
    """DS_ACCELERATOR=cpu in the YAML counts when slots are, as it does on the ranks."""
    with launch_slots(toy_run(tmp_path, {"DS_ACCELERATOR": "cpu"})) as slots:
        assert slots.world_size == 2
    with pytest.raises(LaunchError, match="this machine has 1 accelerator;"):
        launch_slots(toy_run(tmp_path, {}))
