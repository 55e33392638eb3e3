"""The ranks' imports begin before their run does."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.driving import drive
from tests.support.slots import TOY, toy_config
from tests.support.waiting import until
from trial_core.config import ExperimentConfig
from trial_core.driver.placement import (
    ForkServers,
    ThisMachine,
    _importing as importing,
    importing_ahead,
    place_ranks,
)
from trial_core.processes.slots import fork_server
from trial_core.processes.slots.device_locks import DESCRIPTORS_VARIABLE

TRIAL = """
import os
from pathlib import Path

from toy_trial import ToyTrial


class OwnTrial(ToyTrial):
    def __init__(self, context):
        super().__init__(context)
        Path(context.get_hparam("record"), "port").write_text(os.environ["LATE_PORT"])
"""

TRIAL_OF_DEVICE = """
import json
import os
from pathlib import Path

from toy_trial import ToyTrial


class OwnTrial(ToyTrial):
    def __init__(self, context):
        super().__init__(context)
        opened = [os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")
                  if os.path.exists(f"/proc/self/fd/{each}")]
        locks = [path for path in opened if path.endswith(".lock")]
        seen = {"device": os.environ["CUDA_VISIBLE_DEVICES"], "locks": locks}
        Path(context.get_hparam("record"), "seen").write_text(json.dumps(seen))
"""


def config_of(folder: Path, trial: str, **fields: Any) -> ExperimentConfig:
    """The experiment of an `OwnTrial`, which records what it has seen in the folder."""
    code = folder / "code"
    code.mkdir()
    shutil.copy(TOY / "toy_trial.py", code)
    (code / "own.py").write_text(trial)
    return toy_config(
        folder, 2, code=str(code), entrypoint="own:OwnTrial", **fields,
        resources={"slots_per_trial": 1}, hyperparameters={"record": str(folder)},
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.slots
def test_ranks_get_what_is_set_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_servers: list[fork_server.ServerProcess]
) -> None:
    """The run uses the process that imports already, and sets the variable in its ranks. A run with
    another variable gets another process."""
    config = config_of(tmp_path, TRIAL)
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    with importing_ahead(config, ["LATE_"]):
        assert len(fork_servers) == 1
        monkeypatch.setenv("LATE_PORT", "4200")
        assert drive(config).batches_trained == 2
        assert (tmp_path / "port").read_text() == "4200"
        assert len(fork_servers) == 1

    with importing_ahead(config, ["LATE_"]):
        monkeypatch.setenv("OTHER_PORT", "1")
        drive(config, "toy-0000cafe")
        assert len(fork_servers) == 3


def test_a_run_within_a_run_has_another_fork_server(tmp_path: Path) -> None:
    """A fork server starts the ranks of one run at a time. A block within another imports once."""
    config = toy_config(tmp_path, resources={"preload": False})

    def placed() -> ExitStack:
        stack = ExitStack()
        placement = stack.enter_context(place_ranks(config, tmp_path, lambda text: None))
        assert isinstance(placement, ThisMachine)
        servers.append(placement._fork_server)
        return stack

    servers: list[fork_server.ForkServer] = []
    with importing_ahead(config):
        ahead = importing.get()
        with importing_ahead(config), placed(), placed():
            pass
        with placed():
            pass
    assert [server is ahead for server in servers] == [True, False, True]


def test_fork_servers_outlive_runs_and_serve_one_at_a_time(tmp_path: Path) -> None:
    """The first one is the one that imports already."""
    config = toy_config(tmp_path, resources={"preload": False})

    def placed(servers: ForkServers) -> Iterator[fork_server.ForkServer]:
        with servers.one(config), place_ranks(config, tmp_path, lambda text: None) as placement:
            assert isinstance(placement, ThisMachine)
            launched = placement._fork_server.prepare(dict(os.environ), tmp_path, tmp_path / "log")
            yield placement._fork_server
            assert launched.serves(dict(os.environ), ())

    with importing_ahead(config), ForkServers() as servers:
        ahead = importing.get()
        (first,) = placed(servers)
        before = first._process
        for again in placed(servers):
            (other,) = placed(servers)
            assert ahead is first is again is not other
        assert first._process is before is not None
        (last,) = placed(servers)
        assert last in (first, other)
    with ForkServers() as servers:
        late = placed(servers)
        busy = next(late)
    assert busy._process is not None  # its run has not ended
    assert list(late) == []
    assert busy._process is None


@pytest.mark.slots
def test_a_fork_server_serves_runs_on_other_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_servers: list[fork_server.ServerProcess]
) -> None:
    """The ranks of each run have its devices and their locks; its end frees them, and its memory.
    Devices that the experiment names may belong to another run."""
    named = {"environment_variables": {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}}
    config = config_of(tmp_path, TRIAL_OF_DEVICE, environment=named)
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    with ForkServers() as servers:
        for trial, device in (("toy-0000beef", "GPU-0"), ("toy-0000cafe", "GPU-1")):
            lock_file = tmp_path / f"{device}.lock"
            with lock_file.open("w") as lock, servers.one(config):
                fcntl.flock(lock, fcntl.LOCK_EX)
                locks = {DESCRIPTORS_VARIABLE: str(lock.fileno())}
                drive(config, trial, devices={"CUDA_VISIBLE_DEVICES": device, **locks})
            seen = json.loads((tmp_path / "seen").read_text())
            assert seen == {"device": device, "locks": [str(lock_file)]}
            with lock_file.open() as again:
                fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
            until(partial(keeps_nothing, fork_servers), "its checkpoint's memory is freed")
        assert len(fork_servers) == 1


def keeps_nothing(servers: list[fork_server.ServerProcess]) -> bool:
    opened = Path(f"/proc/{servers[0]._process.pid}/fd").iterdir()
    # Not readlink: what it waits for may go between the two.
    return not any("memfd" in os.path.realpath(each) for each in opened)
