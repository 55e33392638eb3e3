"""A run in operation: on a real server, with two ranks that train an endless toy.

`Scene` shows the run's state on the server, what its ranks have trained, and its processes; it also
cancels or kills the run. Its processes, orphans included, are found by a folder in their
environment. `tests.support.ways_to_stop` has the ways to run it.
"""

from __future__ import annotations

import os
import signal
import socket
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.prefect import ROOT, STANDSTILL_SECONDS, PrefectServer
from tests.support.slots import lines, toy_config
from tests.support.waiting import WAIT_SECONDS, ask, retry_while_busy, until
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trialflow.deployments.automations import TAG

# However a run ends, no process is left. How soon depends on the machine; a test of `tests/faults`
# has that ranks end within 10 s of their killed driver.
GONE_SECONDS = 60.0
ENDLESS = 10**6


class Scene:
    """One run of the flow `train`, endless unless `config` says otherwise.

    Attributes:
        parent: the process that starts the run's driver; not one of the run's processes.
        run_id: the flow run's id.
    """

    def __init__(self, server: PrefectServer, folder: Path, **config: Any) -> None:
        self.server = server
        self.folder = folder
        hyperparameters = {"record": str(folder), **config.pop("hyperparameters", {})}
        self.config: ExperimentConfig = toy_config(
            folder, ENDLESS, name=f"toy-{uuid.uuid4().hex[:8]}", hyperparameters=hyperparameters,
            **{"scheduling_unit": ENDLESS, "max_restarts": 5, **config},
        )  # fmt: skip
        self.store = CheckpointStore(self.config.checkpoint_storage.url)
        self.parent = 0
        self.run_id = ""
        self._deployment_id = ""

    # ----------------------------------------------------------------------- start

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of all processes of this run."""
        return {"TRIALFLOW_HOME": str(self.folder / "home")}

    @property
    def parameters(self) -> dict[str, Any]:
        """The flow's parameters."""
        return {"config": self.config.model_dump(mode="json")}

    def deploy(
        self,
        pool: str,
        parent: int,
        entrypoint: str = "trialflow.flows.train.train",
        **job_variables: Any,
    ) -> None:
        """Create a deployment for this run alone, as `prefect deploy` does."""
        name = entrypoint.rpartition(":")[2] if ":" in entrypoint else "train"
        flow = ask(self.server, "flows/", {"name": name})
        folder = {"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}
        variables = {**self.variables, "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
        self.parent = parent
        self._deployment_id = ask(self.server, "deployments/",
            {
                "name": self.config.name, "flow_id": flow["id"],
                "entrypoint": entrypoint,
                "work_pool_name": pool, "pull_steps": [folder], "enforce_parameter_schema": False,
                "tags": [TAG], "job_variables": {"env": variables, **job_variables},
            },
        )["id"]  # fmt: skip

    def use_deployment(self, name: str, parent: int) -> None:
        """Use a deployment that another process creates."""
        self.parent = parent
        self._deployment_id = until(lambda: deployment_id(self.server, name), "the deployment")

    def create_run(self, trial: str | None = None) -> None:
        """Schedule a run of the deployment, of a new trial or of an existing one."""
        self.run_id = ask(
            self.server,
            f"deployments/{self._deployment_id}/create_flow_run",
            {"parameters": {**self.parameters, "trial": trial}},
        )["id"]

    def find_run(self) -> None:
        """Find the run that a script has started, by the experiment's name."""

        def runs() -> list[dict[str, Any]]:
            named = {"flow_runs": {"name": {"like_": self.config.name}}}
            found: list[dict[str, Any]] = ask(self.server, "flow_runs/filter", named)
            return found

        self.run_id = until(runs, "a flow run")[0]["id"]

    # ------------------------------------------------------------------------- observation

    def run(self) -> dict[str, Any]:
        """The flow run, from the server."""
        run: dict[str, Any] = ask(self.server, f"flow_runs/{self.run_id}")
        return run

    def state(self) -> str:
        """The name of the flow run's state."""
        name: str = self.run()["state_name"]
        return name

    def history(self) -> list[str]:
        """The names of all the states that the flow run has had."""
        states = ask(self.server, f"flow_run_states/?flow_run_id={self.run_id}")
        return [state["name"] for state in states]

    def shown(self) -> list[str]:
        """Its states and the end of its log, for a failed assertion."""
        logged = {"logs": {"flow_run_id": {"any_": [self.run_id]}}, "sort": "TIMESTAMP_DESC"}
        log = ask(self.server, "logs/filter", {**logged, "limit": 20})
        return [*self.history(), *(line["message"] for line in reversed(log))]

    def seen(self) -> list[int]:
        """The batches that rank 0 has trained, over all attempts."""
        return [line[0] for line in lines(self.folder, "samples", 0)]

    def saved(self) -> int:
        """The batches of the newest checkpoint, which is verified."""
        (newest, *_) = self.store.resume_candidates(self.trial)
        self.store.verify(newest.uuid)
        return newest.progress.batches_trained

    @property
    def trial(self) -> str:
        """The trial's id."""
        return self.store.list()[-1].trial

    def processes(self) -> list[int]:
        """All living processes of the run: driver, ranks, and their child processes."""
        return [pid for pid in psutil.pids() if pid != self.parent and self._is_own(pid)]

    def ranks(self) -> list[int]:
        """Its rank processes."""
        return [pid for pid in self.processes() if "trialflow: rank" in command(pid)]

    def uploaders(self) -> list[int]:
        """The processes that upload for the ranks."""
        return [pid for pid in self.processes() if "persister" in command(pid)]

    def driver(self) -> int:
        """The process that runs the flow."""
        (fork_server,) = {psutil.Process(rank).ppid() for rank in self.ranks()}
        return psutil.Process(fork_server).ppid()

    def ports(self) -> list[int]:
        """The TCP ports on which its processes listen."""
        return [
            connection.laddr.port
            for pid in self.processes()
            for connection in psutil.Process(pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]

    def _is_own(self, pid: int) -> bool:
        try:
            own = psutil.Process(pid).environ().get("TRIALFLOW_HOME")
        except psutil.Error:  # it has just ended, or is another user's
            return False
        # Python starts one for `flow.serve()`, which ends with it.
        belongs_to_parent = "multiprocessing.resource_tracker" in command(pid)
        return own == self.variables["TRIALFLOW_HOME"] and not belongs_to_parent

    # ---------------------------------------------------------------------- waiting

    def until_trained(self, batches: int = 5) -> None:
        """Wait until rank 0 has trained more than so many batches, over all attempts."""
        what = f"more than {batches} batches"
        until(lambda: len(self.seen()) > batches, what, instead=self.shown)

    def until_state(self, name: str, patience_seconds: float = WAIT_SECONDS) -> None:
        """Wait until the flow run has that state."""
        until(lambda: self.state() == name, name, patience_seconds, self.shown)

    def until_resumed(self, at: int, seen_before: int) -> None:
        """Wait until another attempt trains from batch `at`, after `seen_before` batches."""
        what = f"more than {seen_before} batches"
        until(lambda: len(self.seen()) > seen_before + 5, what, instead=self.shown)
        assert self.seen()[seen_before : seen_before + 5] == list(range(at, at + 5))

    # ------------------------------------------------------------------------- actions

    def set_state(self, kind: str, name: str, is_forced: bool = False) -> None:
        """As the UI's buttons do."""
        state = {"type": kind, "name": name}
        ask(self.server, f"flow_runs/{self.run_id}/set_state", {"state": state, "force": is_forced})

    def cancel(self) -> None:
        """As the UI's Cancel does."""
        self.set_state("CANCELLING", "Cancelling")

    def delete(self) -> None:
        """As the UI's Delete does: the flow run does not exist any more."""
        url = f"{self.server.api_url}/flow_runs/{self.run_id}"
        retry_while_busy(lambda: httpx.delete(url, timeout=STANDSTILL_SECONDS).raise_for_status())
        self.run_id = ""

    def signal_driver(self, number: signal.Signals) -> None:
        """Send a signal to the process that runs the flow, and to no other."""
        os.kill(self.driver(), number)

    def clear_away(self) -> None:
        """Cancel the run and kill its processes, so that nothing restarts it."""
        if self.run_id:
            self.set_state("CANCELLED", "Cancelled", is_forced=True)
        for pid in self.processes():
            kill(pid)


def assert_nothing_left(scene: Scene, ports: list[int]) -> None:
    """No process of the run is left, and none of their ports is open."""
    # Also none that one of them has started while it ended.
    until(
        lambda: not scene.processes(), "no process of the run is left", GONE_SECONDS,
        instead=lambda: [command(pid) for pid in scene.processes()],
    )  # fmt: skip
    assert_closed(ports)


def assert_closed(ports: list[int]) -> None:
    """No process listens on these ports."""
    for port in ports:
        until(partial(_is_closed, port), f"port {port} closed", GONE_SECONDS)


def _is_closed(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def assert_saved_where_it_ended(scene: Scene) -> int:
    """The newest checkpoint is of the last batch of both ranks; its batches."""
    trained = scene.saved()
    for rank in (0, 1):
        assert lines(scene.folder, "samples", rank)[-1][0] == trained - 1
    return trained


def assert_a_cancel_saves(scene: Scene) -> None:
    """After Cancel the last batch is saved, the state is Cancelled, and no process is left."""
    ports = scene.ports()
    scene.cancel()
    scene.until_state("Cancelled")
    assert_nothing_left(scene, ports)
    assert assert_saved_where_it_ended(scene) > 5


def deployment_id(server: PrefectServer, name: str) -> str | None:
    """The id of the deployment of that name; None if there is none."""
    named = {"deployments": {"name": {"any_": [name]}}}
    found = ask(server, "deployments/filter", named)
    return found[0]["id"] if found else None


def command(pid: int) -> str:
    """A process's command line; empty if it has ended."""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def kill(pid: int) -> None:
    """SIGKILL a process, if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
