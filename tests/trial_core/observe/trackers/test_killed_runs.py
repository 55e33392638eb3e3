"""Runs that are killed again and again: what their trackers show in the end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.cli import ROOT
from tests.support.driving import TRIAL
from tests.support.mlflow_server import MlflowServer
from tests.support.processes import descendants, wait_until_gone
from tests.support.slots import lines, toy_config
from tests.support.trackers import in_tensorboard, in_trackio, in_wandb
from tests.support.waiting import until
from trial_core.observe.trackers.journal import DRIVER_EVENTS, FOLDER

BATCHES, UNIT, KILLS = 3300, 20, 10


class Driven:
    """A run in a process of its own, which is started again after it was killed."""

    def __init__(self, folder: Path, config: Path) -> None:
        self.folder = folder
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        script = ROOT / "tests" / "support" / "scripts" / "drive_tracked.py"
        with (self.folder / "driver.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(script), str(self._config)], cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log,
            )  # fmt: skip

    def pids(self, named: str) -> list[int]:
        """Its living processes with a text in their command lines."""
        assert self._process is not None
        found = []
        for pid in descendants(self._process.pid):
            try:
                line = " ".join(psutil.Process(pid).cmdline())
            except psutil.Error:
                continue
            if named in line:
                found.append(pid)
        return found

    def kill(self, what: str) -> None:
        """Kill a rank, the sender, the driver, or the driver with all that it has started."""
        assert self._process is not None
        if what in ("rank", "sender"):
            named = "trialflow: rank" if what == "rank" else "trackers.sender"
            for pid in self.pids(named)[:1]:
                os.kill(pid, signal.SIGKILL)
            return
        all_of_it = descendants(self._process.pid)
        killed = [self._process.pid] + [
            p for p in all_of_it if what == "all" and p not in self.pids("wandb-core")
        ]
        for pid in killed:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        # On a busy machine the run may have ended before: its sender then has 15 s for a slow
        # tracker, and the packages' own exit comes on top. 53 s in all were seen.
        assert wait_until_gone(all_of_it, 120) == []
        self.start()

    def has_trained(self, batch: int) -> bool:
        """Whether its last attempt has reached a batch."""
        seen = lines(self.folder, "samples", 0)
        return bool(seen) and seen[-1][0] >= batch

    def until_ended(self) -> None:
        assert self._process is not None
        assert self._process.wait(600) == 0, (self.folder / "driver.log").read_text()[-5000:]


@pytest.mark.long
def test_a_run_killed_ten_times(
    mlflow: MlflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tracker shows one run, with every point, once. MLflow's server is killed as well."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    config = toy_config(
        tmp_path, BATCHES, name=f"toy-{tmp_path.name}", scheduling_unit=UNIT, max_restarts=KILLS,
        min_checkpoint_period={"batches": 2 * UNIT}, resources={"slots_per_trial": 1},
        hyperparameters={"record": str(tmp_path)},
        trackers=[
            {"mlflow": {"tracking_uri": mlflow.url}}, {"wandb": {"mode": "offline"}},
            "tensorboard", "trackio",
        ],
    )  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(config.model_dump_json())
    choose = random.Random(7)
    run = Driven(tmp_path, file)
    run.start()
    kinds = ["rank", "driver", "all", "sender", "server"] * 2
    choose.shuffle(kinds)
    for number, kind in enumerate(kinds):
        at = number * 300 + choose.randrange(300)
        until(
            lambda at=at: (
                lines(tmp_path, "samples", 0)[-1:] and lines(tmp_path, "samples", 0)[-1][0] >= at
            ),
            f"batch {at}",
        )
        if kind == "server":
            mlflow.kill()
            mlflow.start()
        else:
            run.kill(kind)
    run.until_ended()
    trial = tmp_path / "home" / TRIAL
    shown = {
        "mlflow": mlflow.points(TRIAL, config.name)["training/loss"],
        "wandb": in_wandb([trial / FOLDER / "wandb"], "training/loss"),
        "tensorboard": in_tensorboard(trial / DRIVER_EVENTS, "training/loss"),
        "trackio": in_trackio(tmp_path / "trackio", config.name, "training/loss"),
    }
    wanted = list(range(UNIT, BATCHES + 1, UNIT))
    seen = {name: [step for step, _ in points] for name, points in shown.items()}
    assert {name: sorted(steps) == wanted for name, steps in seen.items()} == dict.fromkeys(
        seen, True
    ), seen
    for name, points in shown.items():
        assert dict(points) == pytest.approx(dict(shown["tensorboard"]), rel=1e-5), name
