"""The installed wheel works beside a user's packages `flows`, `tasks` and `deployments`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.prefect import PrefectServer, isolated
from tests.support.slots import TOY, lines
from trial_core.processes.machine.run_dirs import trial_id

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 240.0
FOREIGN = 'raise ImportError("the package of the folder was imported, not trialflow\'s")\n'
ENDLESS = 10**6


@dataclass(frozen=True)
class Installed:
    """A fresh environment with trialflow's wheel, and a user's folder in which commands run.

    Attributes:
        bin: where the environment's commands are.
        folder: a user's folder, on PYTHONPATH. Holds a trial. Its packages `flows`, `tasks` and
            `deployments`, and its module `engine`, raise ImportError.
    """

    bin: Path
    folder: Path

    def variables(self, server: PrefectServer | None = None) -> dict[str, str]:
        prefect = server.environment if server else isolated(self.folder / "prefect")
        unwanted = ("PREFECT_API_URL", "VIRTUAL_ENV")
        inherited = {name: value for name, value in os.environ.items() if name not in unwanted}
        return {
            **inherited,
            **prefect,
            "PATH": os.pathsep.join([str(self.bin), os.environ["PATH"]]),
            "PYTHONPATH": str(self.folder),
            "TRIALFLOW_HOME": str(self.folder / "home"),
            "TORCH_EXTENSIONS_DIR": str(self.folder / "extensions"),
        }

    def run(self, *command: str, server: PrefectServer | None = None) -> str:
        """Run a command of the environment to its end. Return its standard output."""
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]], cwd=self.folder, check=False, text=True,
            env=self.variables(server), capture_output=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
        return done.stdout

    @contextmanager
    def running(self, *command: str, server: PrefectServer) -> Iterator[subprocess.Popen[bytes]]:
        """Start a command of the environment. Stop it by SIGTERM at the end of the block."""
        with (self.folder / "command.log").open("ab") as log:
            process = subprocess.Popen(
                [str(self.bin / command[0]), *command[1:]], cwd=self.folder, stdout=log, stderr=log,
                env=self.variables(server), stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        try:
            yield process
        except AssertionError as error:
            raise AssertionError((self.folder / "command.log").read_text()[-4000:]) from error
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def experiment(self, name: str, batches: int, **fields: Any) -> str:
        """Write an experiment for two ranks into the folder. Return its file's name."""
        file = self.folder / f"{name}.yaml"
        record = self.folder / f"record-{name}"
        record.mkdir()
        usual = {
            "name": name,
            "entrypoint": "toy_trial:ToyTrial",
            "resources": {"slots_per_trial": 2},
            "searcher": {"metric": "loss", "max_length": {"batches": batches}},
            "checkpoint_storage": str(self.folder / "checkpoints"),
            "hyperparameters": {"record": str(record)},
            "max_restarts": 0,
        }
        file.write_text(yaml.safe_dump({**usual, **fields}))
        return file.name

    def batches(self, name: str) -> list[int]:
        """The indices of the batches that rank 1 of an experiment has trained."""
        return [line[0] for line in lines(self.folder / f"record-{name}", "samples", 1)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our wheel, built from what the Dockerfile copies into the image."""
    folder = tmp_path_factory.mktemp("wheel")
    copies = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), flags=re.M)
    without_caches = shutil.ignore_patterns("__pycache__")
    for source in (ROOT / name for copy in copies for name in copy.split()):
        if source.is_dir():
            shutil.copytree(source, folder / source.name, symlinks=True, ignore=without_caches)
        else:
            shutil.copy(source, folder)
    # As pip does, which takes two more processes.
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in a new environment, which uses the test environment's dependencies."""
    where = tmp_path_factory.mktemp("installed")
    venv.create(where / "env")
    paths = {"base": str(where / "env"), "platbase": str(where / "env")}
    packages = Path(sysconfig.get_path("purelib", "venv", paths))
    # A path that a .pth file adds is searched, but its own .pth files are not read. So the editable
    # install of the tests' environment stays out.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", where / "env" / "bin" / "python", "install", "-q",
         "--no-deps", "--no-index", "--disable-pip-version-check", wheel], check=True,
    )  # fmt: skip
    folder = where / "mine"
    for name in ("flows", "tasks", "deployments"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(FOREIGN)
    (folder / "engine.py").write_text(FOREIGN)
    shutil.copy(TOY / "toy_trial.py", folder)
    return Installed(where / "env" / "bin", folder)


def test_the_wheel_holds_two_packages(wheel: Path) -> None:
    """The wheel has `trial_core` and `trialflow`, with every file of theirs: types, templates."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {
        str(Path(folder, name).relative_to(ROOT))
        for package in ("trial_core", "trialflow")
        for folder, _, names in os.walk(ROOT / package, followlinks=True)
        for name in names
        if not folder.endswith("__pycache__")
    }
    assert packed == files
    assert {"trial_core/py.typed", "trialflow/py.typed"} <= files


@pytest.mark.long
def test_names_of_the_facade_can_be_imported(installed: Installed) -> None:
    """All of `trialflow.__all__` can be imported. `import trialflow` loads no torch or Prefect."""
    program = (
        "import sys, trialflow; heavy = {'torch', 'prefect', 'fsspec'} & sys.modules.keys();"
        "assert not heavy, heavy;"
        "print([name for name in trialflow.__all__ if getattr(trialflow, name) is None])"
    )
    assert installed.run("python", "-c", program) == "[]\n"


@pytest.mark.slots
@pytest.mark.long
def test_a_trial_is_trained_in_a_folder_with_packages_of_our_names(installed: Installed) -> None:
    """`trialflow train` trains it, and its checkpoint is listed."""
    experiment = installed.experiment("alone", 4)
    result = json.loads(installed.run("trialflow", "train", experiment, "--json"))
    assert result["batches_trained"] == 4
    assert installed.batches("alone") == list(range(4))
    stored = json.loads(
        installed.run("trialflow", "checkpoints", "list", "--config", experiment, "--json")
    )
    assert [each["batches_trained"] for each in stored["checkpoints"]] == [4]
    assert not (installed.folder / "extensions").exists(), "CPU ranks compile nothing"


@pytest.mark.slots
@pytest.mark.long
def test_every_command_runs_in_a_folder_with_packages_of_our_names(installed: Installed) -> None:
    """No command imports a package of the user's folder."""
    experiment = installed.experiment("commands", 4)
    trained = json.loads(installed.run("trialflow", "train", experiment, "--json"))
    at, uuid = ("--config", experiment), trained["checkpoint_uuid"]
    listed = json.loads(installed.run("trialflow", "checkpoints", "list", *at, "--json"))
    assert uuid in [each["uuid"] for each in listed["checkpoints"]]
    for command in (
        f"checkpoints show {uuid}", f"checkpoints verify {uuid}", f"checkpoints pin {uuid}",
        f"checkpoints unpin {uuid}", "checkpoints prune --leftovers-only --dry-run",
        f"checkpoints download {uuid} --to here", f"export {uuid} --to model.safetensors",
        "models list",
    ):  # fmt: skip
        installed.run("trialflow", *command.split(), *at)
    installed.run("trialflow", "config", experiment)
    longer = ("--set", "searcher.max_length.batches=6", "--resume")
    resumed = json.loads(installed.run("trialflow", "train", experiment, *longer, "--json"))
    assert resumed["batches_trained"] == 6
    assert installed.batches("commands") == list(range(6))
    installed.run("trialflow", "evaluate", experiment)
    installed.run("trialflow", "retrain", experiment, "--set", "retraining.start=scratch")
    installed.run("trialflow", "doctor", "--storage", str(installed.folder / "checkpoints"))
    for command in (
        "deploy", "up", "worker", "join", "data-arrived", "models promote", "models rollback",
    ):  # fmt: skip
        installed.run("trialflow", *command.split(), "--help")


@pytest.mark.slots
@pytest.mark.server
@pytest.mark.long
def test_a_worker_runs_cancels_and_resumes_in_a_folder_with_packages_of_our_names(
    installed: Installed, prefect_server: PrefectServer
) -> None:
    """A worker runs a deployed trial. After a Cancel, another run continues the trial."""
    experiment = installed.experiment("worked", ENDLESS)
    config = json.loads(installed.run("trialflow", "config", experiment))

    def start(**parameters: Any) -> str:
        wanted = json.dumps({**config, **parameters})
        installed.run("python", "-m", "prefect", "deployment", "run", "train/train",
                      "--params", wanted, server=prefect_server)  # fmt: skip
        runs = prefect_server.query("flow_runs/filter", {"sort": "EXPECTED_START_TIME_DESC"})
        return str(runs[0]["id"])

    def state(run: str) -> str:
        return str(prefect_server.query(f"flow_runs/{run}")["state_name"])

    installed.run("trialflow", "deploy", "--pool", "wheel", server=prefect_server)
    try:
        with installed.running("trialflow", "worker", "--pool", "wheel", server=prefect_server):
            run = start()
            _until(lambda: len(installed.batches("worked")) > 3, "training")
            installed.run(
                "python", "-m", "prefect", "flow-run", "cancel", run, server=prefect_server
            )
            _until(lambda: state(run) == "Cancelled", "Cancelled")
            seen = len(installed.batches("worked"))
            trial = trial_id("worked", run)
            config["config"]["searcher"]["max_length"] = {"batches": seen + 3}
            again = start(trial=trial)
            _until(lambda: state(again) == "Completed", "Completed")
        assert installed.batches("worked") == list(range(seen + 3))
    finally:
        installed.run("trialflow", "deploy", "--pool", "wheel", "--remove", server=prefect_server)


@pytest.mark.slots
@pytest.mark.server
@pytest.mark.long
def test_a_flow_is_served_in_a_folder_with_packages_of_our_names(
    installed: Installed, prefect_server: PrefectServer
) -> None:
    """`trialflow.train.serve()` runs the flow, which Prefect pickles."""
    experiment = installed.experiment("served", 4)
    parameters = installed.run("trialflow", "config", experiment)
    script = installed.folder / "serve.py"
    script.write_text(
        "import trialflow\n\n"
        "if __name__ == '__main__':  # the process that runs the flow imports this script too\n"
        "    trialflow.train.serve(name='from-a-wheel')\n"
    )
    with installed.running("python", script.name, server=prefect_server):
        known = {"deployments": {"name": {"any_": ["from-a-wheel"]}}}
        _until(lambda: prefect_server.query("deployments/filter", known), "the deployment")
        installed.run("python", "-m", "prefect", "deployment", "run", "train/from-a-wheel",
                      "--params", parameters, server=prefect_server)  # fmt: skip

        def states() -> list[str]:
            return [run["state_name"] for run in prefect_server.query("flow_runs/filter", known)]

        _until(lambda: states() == ["Completed"], "Completed")
    assert installed.batches("served") == list(range(4))


def _until(is_so: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.2)
