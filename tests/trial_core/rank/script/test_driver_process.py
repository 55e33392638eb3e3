"""The driver process of a script, while its ranks have not joined yet."""

from __future__ import annotations

import logging
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from tests.support.slots import toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.driver.script_driver_main import _line_of
from trial_core.driver.script_order import Order
from trial_core.errors import LaunchError, StorageError, TrialflowError
from trial_core.messages import Abort, Invitation, Logged
from trial_core.processes.machine.child import Child
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.script import driver_process
from trial_core.rank.script.driver_process import DriverProcess

# Rank 0 is gone at once; the process that it has forked lives until its input ends.
SCRIPT = """
import os, sys
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.script.driver_process import DriverProcess

driver = DriverProcess(DistributedContext.from_environment())
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print(driver._child.pid, flush=True)
os._exit(0)
"""


@pytest.mark.long
def test_the_driver_ends_with_rank_0_although_a_forked_process_lives() -> None:
    """A loader's worker, for example, must not hold the pipe whose end tells the driver."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as script:
        assert script.stdout is not None
        pid = int(script.stdout.readline())
        try:
            with suppress(psutil.NoSuchProcess):  # it has ended already
                psutil.Process(pid).wait(60)
        finally:
            assert script.stdin is not None
            script.stdin.close()


@pytest.mark.parametrize(
    ("channel", "refusal"),
    [
        ({"bind": "127.0.0.1", "ports": "0", "advertise": "rank-0.cluster"}, ""),
        ({"bind": "203.0.113.7", "ports": "7600-7601"}, "203.0.113.7, ports 7600 to 7601: "),
    ],
)
def test_the_experiment_says_where_ranks_of_other_machines_join(
    channel: dict[str, str], refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `resources.channel`; an address that the machine does not have is refused."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path))
    config = toy_config(tmp_path, resources={"slots_per_trial": 2, "channel": channel})
    order = Order(
        experiment=config.model_dump(mode="json"), new_trial="toy-0000beef", world_size=2,
        has_other_machines=True, has_code=False,
    )  # fmt: skip
    with closing(DriverProcess(DistributedContext.from_environment())) as driver:
        if refusal:
            with pytest.raises(LaunchError, match=refusal):
                driver.give(lambda: order)
            return
        address = driver.give(lambda: order).address
        assert address is not None
        assert address.startswith("tls://rank-0.cluster:")
        assert driver._child is not None
        driver._child.kill()  # it would wait for its ranks


def test_a_scripts_new_trial_does_not_continue_another_with_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its driver is refused before it invites ranks."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path))
    config = toy_config(tmp_path)
    CheckpointStore(config.checkpoint_storage.url).take_over("toy-0000beef", "another")
    order = Order(
        experiment=config.model_dump(mode="json"), new_trial="toy-0000beef", world_size=1,
        has_other_machines=False, has_code=False,
    )  # fmt: skip
    with (
        closing(DriverProcess(DistributedContext.from_environment())) as driver,
        pytest.raises(TrialflowError, match="another trial with this id"),
    ):
        driver.give(lambda: order)


# Says a line, and ends well or fails with another one; or is killed.
DRIVER = """
import os, sys

does, first, last = sys.argv[1:]
sys.stdin.readline()
print(first, flush=True)
if does == "is killed":
    os.kill(os.getpid(), 9)
print(last, flush=True)
sys.exit(does == "fails")
"""
INVITATION = Invitation(path="", address=None, secret=b"", log_dir="")
LAST = {
    "ends": Logged(level=20, text="done\n  report  /r"),
    "fails": Abort.of(StorageError("the disk is full")),
    "is killed": INVITATION,
}


OF_SCRIPT = "the driver of this script"


@pytest.mark.parametrize(
    ("does", "logged"),
    [
        ("ends", "done\n  report  /r"),
        ("fails", f"{OF_SCRIPT} has failed after its ranks were done: the disk is full"),
        ("is killed", f"{OF_SCRIPT} was ended by SIGKILL"),
    ],
)
def test_how_a_driver_has_ended_is_logged(
    does: str, logged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Once, on rank 0, also if it has ended after its ranks; at a good end, the run's summary."""
    caplog.set_level(logging.INFO, "trial_core")
    lines = [_line_of(each).decode().strip() for each in (INVITATION, LAST[does])]
    started = Child(["-S", "-c", DRIVER, does, *lines], answers=True)
    monkeypatch.setattr(driver_process, "Child", lambda *_, **__: started)
    config = toy_config(tmp_path)
    order = Order(
        experiment=config.model_dump(mode="json"), new_trial="toy-0000beef", world_size=1,
        has_other_machines=False,
    )  # fmt: skip
    driver = DriverProcess(DistributedContext.from_environment())
    driver.give(lambda: order)
    driver.end()
    driver.close()
    assert [each.getMessage() for each in caplog.records] == [logged]
