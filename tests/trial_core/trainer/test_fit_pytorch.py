"""A PyTorchTrial in a user's own script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.fitting import Launcher, start

SCRIPT = Path(__file__).parents[2] / "support" / "scripts" / "fit_pytorch.py"


def fit(launcher: Launcher, folder: Path, latest: str, batches: int, ranks: int = 2) -> Any:
    """The script's result; `latest` is what it resumes from."""
    folder.mkdir(exist_ok=True)
    output = start(launcher, folder, ranks, str(SCRIPT), latest, str(batches))
    assert "Traceback" not in output
    return json.loads(output.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "batches"), [("python", 5), ("torchrun", 4)])
def test_a_pytorch_trial_resumes_in_a_script(
    tmp_path: Path, launcher: Launcher, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends as the uninterrupted run, also if it was saved between two optimizer steps.

    The environment says that it continues, and the script's argument counts more.

    So does a run that continues from the URL of the checkpoint in another storage.

    The hook of rank 0's callback, which the other rank lacks, does not make it wait for that rank.
    The profiled batches leave one trace with the run's files.
    """
    whole = fit(launcher, tmp_path / "whole", "", 9)
    part = fit(launcher, tmp_path / "parts", "", batches)
    monkeypatch.setenv("DET_LATEST_CHECKPOINT", "latest")
    rest = fit(launcher, tmp_path / "parts", "", 9)
    elsewhere = fit(launcher, tmp_path / "elsewhere", part["url"], 9)
    assert rest["uuid"] != part["uuid"]
    assert elsewhere["metrics"] == rest["metrics"]
    assert rest["metrics"] == whole["metrics"] != part["metrics"]
    assert whole["metrics"]["noted"] == 1
    stored = tmp_path / "whole" / "home" / "checkpoints"
    assert len(list(stored.rglob("*.pt.trace.json"))) == 1
