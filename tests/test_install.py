"""The repository, installed as a user does who has nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import uv

ROOT = Path(__file__).parents[1]


@pytest.mark.long
@pytest.mark.slots
@pytest.mark.timeout(1800)  # downloads torch
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_one_line_installs_the_repository(tmp_path: Path, installer: str) -> None:
    """Into an empty environment, from what git has; then the first trial runs."""
    bin_folder = tmp_path / "env" / "bin"
    if installer == "pip":
        run(tmp_path, sys.executable, "-m", "venv", "env")
        install = [bin_folder / "python", "-m", "pip", "install"]
    else:
        run(tmp_path, uv.find_uv_bin(), "venv", "-q", "--python", sys.executable, "env")
        install = [uv.find_uv_bin(), "pip", "install", "--python", bin_folder / "python"]
    repository = f"git+file://{ROOT}"
    run(tmp_path, *install, "-q", "-c", ROOT / "constraints.txt", repository)
    run(tmp_path, bin_folder / "trialflow", "init", "pytorch", ".")
    said = run(tmp_path, bin_folder / "trialflow", "train", "experiment.yaml", "--test")
    assert "restored" in said


def run(folder: Path, *command: str | Path) -> str:
    """Run a command in `folder`, without this environment's packages, and return its output."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "TRIALFLOW_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        command, cwd=folder, env=environment, check=False, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout
