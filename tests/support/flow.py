"""Runs the flow `train` in a test, and reads what the server has recorded."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from tests.support.prefect import PrefectServer
from tests.support.processes import descendants
from tests.support.slots import lines, toy_config
from tests.support.waiting import WAIT_SECONDS
from trial_core.errors import Stopped
from trial_core.processes.slots import fork_server
from trial_core.processes.slots.fork_server import ForkServer, ServerProcess


class WarmForkServer(ForkServer):
    """A fork server whose process outlives its run, for later ones with the same variables.

    What a run of its own would lose with it is gone: ranks have ended before, and the links to
    memory that it keeps are deleted. One process starts runs of any number of ranks.
    """

    of_a_size = ("LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    processes: ClassVar[dict[Any, ServerProcess]] = {}

    def __init__(self, preload: Sequence[str] = (), late: Sequence[str] = ()) -> None:
        super().__init__(preload, (*late, *self.of_a_size))

    def prepare(
        self, environment: Mapping[str, str], working_dir: Path, log: Path
    ) -> ServerProcess:
        """Part of `ForkServer`."""
        variables = {key: environment[key] for key in environment if key != "PYTEST_CURRENT_TEST"}
        of_all = sorted(variables.keys() - {*self.of_a_size})
        of = (self._preload, tuple((key, variables[key]) for key in of_all))
        self._process = self.processes.get(of)
        self.processes[of] = super().prepare(variables, working_dir, log)
        return self.processes[of]

    def close(self) -> None:
        """Part of `ForkServer`."""
        self._process = None
        for link in Path(os.environ["TRIALFLOW_HOME"]).rglob("*"):
            if link.is_symlink() and os.readlink(link).startswith("/proc/"):
                link.unlink()


@pytest.fixture
def fork_servers(monkeypatch: pytest.MonkeyPatch) -> list[ServerProcess]:
    """The processes that fork servers have started in the test; none outlives its `ForkServer`.

    After `here` in a test's arguments: it has them outlive their runs.
    """
    made: list[ServerProcess] = []

    class Counted(ServerProcess):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(fork_server, "ServerProcess", Counted)
    monkeypatch.setattr("trial_core.driver.placement.ForkServer", ForkServer)
    return made


@pytest.fixture(scope="session")
def linked_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A link to the folder of the test that runs: warm fork servers have one TRIALFLOW_HOME."""
    yield tmp_path_factory.mktemp("linked") / "here"
    for process in WarmForkServer.processes.values():
        process.close()


@pytest.fixture
def warm_home(tmp_path: Path, linked_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for all files of runs. Their ranks are forked by processes that stay warm."""
    linked_folder.unlink(missing_ok=True)
    linked_folder.symlink_to(tmp_path)
    monkeypatch.setenv("TRIALFLOW_HOME", str(linked_folder / "home"))
    monkeypatch.setattr("trial_core.driver.placement.ForkServer", WarmForkServer)
    return tmp_path


@pytest.fixture
def here(prefect_server: PrefectServer, warm_home: Path) -> Iterator[Path]:
    """The folder of `warm_home`. Flows of this process use the real server."""
    with prefect_server.configured():
        yield warm_home


@dataclass
class Stage:
    """A task run in the server's record."""

    name: str
    state: str
    tries: int
    began: datetime
    ended: datetime


def stages(server: PrefectServer, flow_run_id: str | None, last: str = "") -> list[Stage]:
    """The task runs of a flow run, in the order of their start.

    Args:
        last: a stage to wait for, because the server records events with a delay.

    Raises:
        AssertionError: the server has not recorded it, or the end of a stage, in time.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    before: list[str] | None = None
    while True:
        found = server.query(
            "task_runs/filter",
            {"flow_runs": {"id": {"any_": [flow_run_id]}}, "limit": 200},
        )
        names = [run["name"] for run in found]
        is_complete = all(run["end_time"] for run in found)
        # Without a last stage to wait for: nothing new since the look before.
        if is_complete and (last in names if last else names == before):
            break
        assert time.monotonic() < deadline, f"recorded: {names}, of which some have not ended"
        before = names if is_complete else None
        time.sleep(0.1 if last else 0.5)
    known = [
        Stage(
            run["name"], run["state_name"], run["run_count"],
            datetime.fromisoformat(run["start_time"]), datetime.fromisoformat(run["end_time"]),
        )
        for run in found
    ]  # fmt: skip
    return sorted(known, key=lambda stage: stage.began)


def train(
    config: Any, trial: str | None = None, retries: int = 0, keep: list[str] | None = None
) -> Any:
    """Run the flow, then send its remaining events to the server."""
    from trialflow.flows.server.embedded_server import flush
    from trialflow.flows.train import train as flow

    try:
        return flow.with_options(retries=retries)(config, trial, keep=keep)
    finally:
        flush()


def train_until_stopped(config: Any, seconds: float) -> Any:
    """Run the flow with a time budget, which ends while it trains.

    On a slow machine, ranks may still be starting then: the run gets ten times as long.
    """
    for budget in (seconds, 10 * seconds):
        stopping = config.stopping.model_copy(update={"time_budget_seconds": budget})
        try:
            result = train(config.model_copy(update={"stopping": stopping}))
        except Stopped:
            if budget != seconds:
                raise
        else:
            assert result.stop_reason == f"time budget ({budget:g} s are over)"
            return result
    raise AssertionError("not reached: the last try returns or raises")


def one_slot(here: Path, batches: int, **changes: Any) -> Any:
    """A run on one rank that saves every 4 batches."""
    changes = {"scheduling_unit": 4, "min_checkpoint_period": {"batches": 4}, **changes}
    return toy_config(here, batches, resources={"slots_per_trial": 1}, **changes)


def breaking(here: Path, do: str, at_batch: int | str, **more: Any) -> dict[str, Any]:
    """Hyperparameters of a toy that breaks once, and records its samples."""
    return {
        "record": str(here), "do": do, "at_batch": at_batch, "once": str(here / "once"), **more
    }  # fmt: skip


def resumption(here: Path, broke_at: int, end: int) -> int:
    """The batch from which a broken run resumed; checkpoints are due every 4.

    When a rank breaks, the last checkpoint may still be uploading; the one before it is committed.
    """
    seen = [line[0] for line in lines(here, "samples", 0)]
    assert seen[:broke_at] == list(range(broke_at))
    resumed_at = int(seen[broke_at])
    assert resumed_at in (broke_at // 4 * 4, broke_at // 4 * 4 - 4)
    assert seen[broke_at:] == list(range(resumed_at, end))
    return resumed_at


def ranks() -> set[int]:
    """The rank processes that this process has started, warm groups included."""
    return {pid for pid in descendants(os.getpid()) if "trialflow: rank" in _command(pid)}


def _command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:  # it has just ended
        return ""
