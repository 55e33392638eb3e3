"""Measures the replacement of a lost node or rank, compared with a whole new group.

The flow `train` runs on a real Prefect server. When a checkpoint is committed and training has
gone further, SIGKILL ends a rank, or the agent of a node. The time runs until the next batch. Each
pair has a run in which only the lost part is replaced, and one in which everything is new and reads
the storage, in alternating order:

- ``node``: two agents with a rank each, on the loopback interface. Of three agents one is a
  standby. In the other run, both agents are killed, and two new ones are started at once.
- ``rank``: two ranks on one machine. In the other run, the ranks are new interpreters, and the
  checkpoint's files that the machine has kept are deleted.

With ``--s3`` checkpoints are in a real S3 gateway (Ceph) on this machine, else in a local folder.
The Prefect server is the embedded one with a new database, or that of PREFECT_API_URL.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks.figures import Estimate, conclude
from benchmarks.ranks import ROOT, experiment, rank_processes
from benchmarks.restart import ENDLESS, SCHEDULING_UNIT, Killer
from benchmarks.workload import temporary_homes
from tests.support.s3 import S3Server, ceph_gateway
from trial_core.observe.events.observers import observing
from trial_core.processes.machine.run_dirs import KEPT
from trial_core.processes.nodes.join_token import write_token
from trial_core.processes.nodes.node_provider import AGENT_MODULE
from trial_core.processes.slots.addresses import LOOPBACK_ADDRESS

CASES = ("node", "rank")
TARGETS = {
    "node_ratio": 0.5,
    "node_seconds_replaced": 5.0,
    "rank_ratio": 0.5,
    "rank_seconds_replaced": 5.0,
}
READY_SECONDS = 120.0


@dataclass(frozen=True)
class Turn:
    """The times of one run in seconds.

    Attributes:
        notice: from SIGKILL until the driver has ended the other ranks and starts new ones.
        nodes: until the nodes are there.
        start: until all ranks have joined.
        build: the trial's construction; in a new interpreter, with its imports.
        fetch: until the checkpoint's files are on the machine, verified.
        restore: building the loaders and loading the state.
        train: from there to the end of the next batch.
    """

    notice: float
    nodes: float
    start: float
    build: float
    fetch: float
    restore: float
    train: float

    @property
    def total(self) -> float:
        """The time from SIGKILL to the end of the next batch."""
        return sum(float(getattr(self, name)) for name in PHASES)


PHASES = [each.name for each in fields(Turn)]


@dataclass
class Timeline(Killer):
    """Also notes ``gathered`` (end of wait-for-nodes) and ``fetched`` (end of fetch-checkpoint)."""

    def stage_ended(self, stage: str, detail: str, seconds: float) -> None:
        super().stage_ended(stage, detail, seconds)
        if stage == "wait-for-nodes":
            self._note("gathered")
        elif stage == "fetch-checkpoint":
            self._note("fetched")


def turn_of(times: dict[str, float], batches: list[float]) -> Turn:
    """Return the times between the events of a run.

    Args:
        times: the times of `Timeline`.
        batches: when each batch has ended, in seconds since the epoch.

    Raises:
        RuntimeError: the run has ended without a restart, or restored nothing.
    """
    after = [ended for ended in batches if ended > times.get("restored", ENDLESS**2)]
    if "restarting" not in times or times.get("fetched", 0.0) < times["restarting"] or not after:
        raise RuntimeError(f"nothing was killed and restored; the run noted {sorted(times)}")
    # A run on one machine does not wait for nodes.
    gathered = max(times.get("gathered", 0.0), times["restarting"])
    return Turn(
        notice=times["restarting"] - times["killed"],
        nodes=gathered - times["restarting"],
        start=times["joined"] - gathered,
        build=times["built"] - times["joined"],
        fetch=times["fetched"] - times["built"],
        restore=times["restored"] - times["fetched"],
        train=after[0] - times["restored"],
    )


@dataclass
class Agents:
    """The agents of a run, each with its own folder.

    Attributes:
        address, token: of the run's driver.
        folder: contains their folders.
    """

    address: str
    token: str
    folder: Path
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        """Start another agent."""
        home = self.folder / f"node-{len(self._started)}"
        home.mkdir(parents=True)
        with (home / "agent.log").open("wb") as log:
            agent = subprocess.Popen(
                [sys.executable, "-m", AGENT_MODULE, "--driver", self.address],
                cwd=ROOT, env={**os.environ, "TRIALFLOW_HOME": str(home)},
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        if agent.stdin is not None:
            agent.stdin.write(self.token.encode())
            agent.stdin.close()
        self._started.append(agent)

    def kill_one(self) -> None:
        """Kill the agent of the last rank with SIGKILL."""
        above = {process.pid for process in rank_processes()[-1].parents()}
        next(agent for agent in self._started if agent.pid in above).kill()

    def renew_all(self) -> None:
        """Kill all agents with SIGKILL, and start as many new ones."""
        before = [*self._started]
        for agent in before:
            agent.kill()
        for _ in before:
            self.start()

    def end(self) -> None:
        """End all agents."""
        for agent in self._started:
            agent.kill()
            agent.wait()


@contextmanager
def agents_of_run(folder: Path, count: int) -> Iterator[tuple[dict[str, Any], Agents]]:
    """Start agents. Yields the section `resources` of the run that they wait for, and them."""
    with socket.socket() as free:
        free.bind((LOOPBACK_ADDRESS, 0))
        port = free.getsockname()[1]
    folder.mkdir(parents=True)
    token_file = folder / "token"
    resources = {
        "slots_per_trial": 2, "slots_per_node": 1, "engine": "join",
        "max_wait_seconds": READY_SECONDS,
        "channel": {"bind": LOOPBACK_ADDRESS, "ports": port, "token_file": str(token_file)},
    }  # fmt: skip
    agents = Agents(f"tls://{LOOPBACK_ADDRESS}:{port}", write_token(token_file), folder)
    try:
        for _ in range(count):
            agents.start()
        yield resources, agents
    finally:
        agents.end()


@dataclass(frozen=True)
class Setting:
    """The settings that all runs share.

    Attributes:
        folder: for all files.
        model: a name in `benchmarks.models.MODELS`.
        server: for the checkpoints; None if they are in `folder`.
    """

    folder: Path
    model: str
    server: S3Server | None

    def storage(self, name: str) -> dict[str, Any]:
        """Return the section `checkpoint_storage` of the run with this name."""
        if self.server is None:
            return {"url": f"file://{self.folder}/{name}"}
        return {"url": self.server.new_bucket(), "options": self.server.options}


def run_turn(setting: Setting, case: str, is_new: bool) -> Turn:
    """Train, kill, and train a batch again.

    Args:
        is_new: True to replace everything.
    """
    name = uuid.uuid4().hex[:8]
    folder = setting.folder
    if case == "rank":
        resources = {"slots_per_trial": 2, "preload": not is_new}
        return train_until_replaced(
            setting, name, resources, lambda: kill_rank(folder if is_new else None)
        )
    with agents_of_run(folder / f"nodes-{name}", 2 if is_new else 3) as (resources, agents):
        kill = agents.renew_all if is_new else agents.kill_one
        return train_until_replaced(setting, name, resources, kill)


def kill_rank(forgetful: Path | None) -> None:
    """Kill a rank with SIGKILL.

    Args:
        forgetful: the folder below which kept files of checkpoints are deleted.
    """
    rank_processes()[-1].kill()
    for kept in forgetful.rglob(KEPT) if forgetful is not None else ():
        shutil.rmtree(kept)


def train_until_replaced(
    setting: Setting, name: str, resources: dict[str, Any], kill: Callable[[], None]
) -> Turn:
    """Run the flow until a batch was trained after `kill`."""
    from trialflow.flows.train import train  # Prefect reads its settings when it is imported

    record = setting.folder / f"{name}.txt"
    config = experiment(
        "benchmarks.stopping_trial:RestartedTrial", 2, setting.storage(name),
        name=name,
        hyperparameters={
            "model": setting.model, "bare_batches": 1, "record": str(record), "waits": False,
        },
        searcher={"name": "single", "metric": "seconds", "max_length": {"batches": ENDLESS}},
        scheduling_unit=SCHEDULING_UNIT, min_checkpoint_period={"batches": SCHEDULING_UNIT},
        resources=resources, max_restarts=1,
    )  # fmt: skip
    timeline = Timeline(kill)
    with observing(timeline):
        train(config)
    return turn_of(timeline.times, [float(line) for line in record.read_text().splitlines()])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.replace", description=__doc__)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--model", default="medium")
    parser.add_argument("--s3", action="store_true")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    s3 = ceph_gateway() if arguments.s3 else nullcontext()
    with temporary_homes() as folder, s3 as server:
        setting = Setting(folder, arguments.model, server)
        from trialflow.flows.server.embedded_server import prefect_api

        with prefect_api():
            for case in arguments.cases:
                turns = measure(setting, case, arguments.pairs)
                figures |= figures_of(case, turns)
    conclude(figures, {name: most for name, most in TARGETS.items() if name in figures})


def measure(setting: Setting, case: str, pairs: int) -> dict[bool, list[Turn]]:
    """Return the turns with all new (True), and with the lost part replaced, in pairs."""
    turns: dict[bool, list[Turn]] = {True: [], False: []}
    for number in range(pairs):
        # The order alternates, so that a drift of the machine's speed cancels out.
        for is_new in (True, False) if number % 2 == 0 else (False, True):
            began = time.monotonic()
            turn = run_turn(setting, case, is_new)
            turns[is_new].append(turn)
            phases = ", ".join(f"{name} {getattr(turn, name):.2f}" for name in PHASES)
            print(
                f"{case}, {_way(is_new)}: {turn.total:.2f} s ({phases}); the whole run "
                f"{time.monotonic() - began:.1f} s",
                flush=True,
            )
    return turns


def figures_of(case: str, turns: dict[bool, list[Turn]]) -> dict[str, float]:
    """Compute and print the figures: medians, and the ratio of the pairs."""
    figures: dict[str, float] = {}
    for is_new, of_case in turns.items():
        for name in ("total", *PHASES):
            seconds = Estimate.of([getattr(turn, name) for turn in of_case])
            phase = "" if name == "total" else f"_{name}"
            figures[f"{case}{phase}_seconds_{_way(is_new)}"] = seconds.median
            print(f"{case}, {_way(is_new)}: {name} {seconds.shown(2)} s")
    pairs = zip(turns[False], turns[True], strict=True)
    ratio = Estimate.of([ours.total / other.total for ours, other in pairs])
    figures |= {
        f"{case}_ratio": ratio.median,
        f"{case}_ratio_low": ratio.low,
        f"{case}_ratio_high": ratio.high,
    }
    print(f"{case}: replaced, relative to all new: {ratio.shown(2)}", flush=True)
    return figures


def _way(is_new: bool) -> str:
    return "all_new" if is_new else "replaced"


if __name__ == "__main__":
    main()
