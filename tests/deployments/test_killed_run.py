"""`trialflow train`, or its server, is killed with SIGKILL."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from tests.support.prefect import isolated, prepared
from tests.support.processes import alive, descendants, wait_until_gone
from tests.support.slots import TOY, lines
from tests.support.tensors import differing, tensors
from trial_core.checkpoint.store import CheckpointStore
from trial_core.observe.ledger.stored_ledger import read_ledger

pytestmark = [pytest.mark.slots, pytest.mark.server]

BATCHES, STUCK_AT = 16, 13
START_SECONDS = 180.0


class Folder:
    """A folder with an experiment and everything that its runs write."""

    def __init__(self, path: Path, prefect_home: Path, **hyperparameters: object) -> None:
        path.mkdir()
        self.path = path
        self.store = CheckpointStore(f"file://{path}/checkpoints")
        self._environment = {
            **os.environ, **isolated(prefect_home), "TRIALFLOW_HOME": str(path / "home")
        }  # fmt: skip
        experiment = {
            "name": "toy",
            "entrypoint": "toy_trial:ToyTrial",
            "code": str(TOY),
            "hyperparameters": {"record": str(path), "accumulation": 3, **hyperparameters},
            "resources": {"slots_per_trial": 2},
            "scheduling_unit": 4,
            "min_checkpoint_period": {"batches": 4},
            "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": BATCHES}},
            "checkpoint_storage": str(path / "checkpoints"),
        }
        (path / "experiment.yaml").write_text(yaml.safe_dump(experiment))

    def train(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `trialflow train` in the folder."""
        return subprocess.Popen(
            [sys.executable, "-m", "trialflow.deployments.cli.main", "train",
             str(self.path / "experiment.yaml"), *arguments],
            env=self._environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def wait_until_stuck(self, run: subprocess.Popen[str], once: Path) -> None:
        """Wait until the run has committed a checkpoint, and then is in the batch that waits."""
        deadline = time.monotonic() + START_SECONDS
        while not (once.exists() and self.store.list()):
            assert run.poll() is None, run.communicate()[0]
            assert time.monotonic() < deadline, "the run has not committed a checkpoint"
            time.sleep(0.1)

    def train_to_the_end(self, *arguments: str) -> str:
        """Run `trialflow train`; its output."""
        with self.train(*arguments) as run:
            output, _ = run.communicate()
        assert run.returncode == 0, output
        return output

    def weights(self) -> dict[str, torch.Tensor]:
        """All tensors of the last checkpoint."""
        newest = self.store.list()[-1]
        assert newest.progress.batches_trained == BATCHES
        return tensors(self.path / "checkpoints" / "checkpoints" / newest.uuid)


@pytest.fixture(scope="module")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("prefect"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, prefect_home: Path) -> Folder:
    """The folder of a run that was not killed."""
    folder = Folder(tmp_path_factory.mktemp("runs") / "straight", prefect_home)
    folder.train_to_the_end()
    return folder


@pytest.fixture(params=["the driver", pytest.param("the whole tree", marks=pytest.mark.long)])
def killed(
    request: pytest.FixtureRequest, tmp_path: Path, prefect_home: Path
) -> Iterator[tuple[Folder, list[int]]]:
    """A run that was killed at batch 13, after a commit; its folder and its processes."""
    once = tmp_path / "stuck"
    stuck = {"do": "sleep", "at_batch": STUCK_AT, "once": str(once)}
    folder = Folder(tmp_path / "killed", prefect_home, **stuck)
    with folder.train() as run:
        folder.wait_until_stuck(run, once)
        pids = descendants(run.pid)
        victims = pids if request.param == "the whole tree" else []
        for pid in [run.pid, *victims]:
            os.kill(pid, signal.SIGKILL)
        run.wait()
        yield folder, pids
    for pid in alive(pids):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_no_process_is_left(killed: tuple[Folder, list[int]]) -> None:
    """Ranks and embedded server are gone within 10 s after their driver."""
    _, pids = killed
    assert len(pids) >= 3  # two ranks and the embedded server
    assert wait_until_gone(pids, 10) == []


@pytest.mark.long
def test_resuming_is_bit_identical(killed: tuple[Folder, list[int]], uninterrupted: Folder) -> None:
    """`--resume` ends with the weights, optimizer and random state of an uninterrupted run."""
    folder, pids = killed
    assert wait_until_gone(pids, 10) == []
    output = folder.train_to_the_end("--resume")
    (trial,) = {manifest.trial for manifest in folder.store.list()}
    assert trial in output
    assert differing(uninterrupted.weights(), folder.weights()) == []
    for rank in (0, 1):
        straight, resumed = (lines(f.path, "samples", rank) for f in (uninterrupted, folder))
        # One line per micro-batch. The run resumed from batch 8 or 12, with the same samples.
        resumed_at = STUCK_AT - (len(resumed) - len(straight)) // 3
        assert resumed_at in (8, 12)
        assert resumed[-3 * (BATCHES - resumed_at) :] == straight[3 * resumed_at :]
    ledger = read_ledger(folder.store, trial)
    assert [run.is_over for run in ledger.runs] == [False, True]
    assert ledger.notes()[0].startswith("run 1 has no recorded end")


def server_of(driver_pid: int) -> int:
    """The embedded server of a run."""
    commands = {pid: psutil.Process(pid).cmdline() for pid in descendants(driver_pid)}
    (server,) = [pid for pid, command in commands.items() if "server_script" in str(command)]
    return server


@pytest.mark.long
def test_a_run_survives_its_server(tmp_path: Path) -> None:
    """The embedded server is killed while ranks train: the run ends as it would have."""
    once, release, prefect_home = tmp_path / "stuck", tmp_path / "release", tmp_path / "prefect"
    waiting = {"do": "wait", "at_batch": STUCK_AT, "once": str(once), "wait_for": str(release)}
    folder = Folder(tmp_path / "run", prefect_home, **waiting)
    with folder.train() as run:
        folder.wait_until_stuck(run, once)
        os.kill(server_of(run.pid), signal.SIGKILL)
        release.touch()
        output, _ = run.communicate()
    assert run.returncode == 0, output
    assert folder.store.list()[-1].progress.batches_trained == BATCHES
    with closing(sqlite3.connect(prefect_home / "prefect.db")) as database:
        assert database.execute("SELECT state_name FROM flow_run").fetchall() == [("Completed",)]
