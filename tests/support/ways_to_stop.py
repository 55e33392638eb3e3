"""The ways to run the flow `train`, as context managers in which a `Scene` trains.

The run and all its processes end with the block.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.prefect import ROOT, PrefectServer, process_worker
from tests.support.prefect_worker import GONE_SECONDS, Scene, kill
from tests.support.processes import descendants, wait_until_gone
from tests.support.waiting import WAIT_SECONDS, ask, until

SCRIPTS = Path(__file__).with_name("scripts")
# Periodic checkpoints, for runs that cannot save at their end.
SAVING = {"scheduling_unit": 20, "min_checkpoint_period": {"batches": 20}}
STUCK_AT = 50
DETACHED = {"command": f"{sys.executable} -m trialflow.flows.lifecycle.detached_engine"}


@dataclass(frozen=True)
class Worker:
    """A process worker.

    Attributes:
        pool: its work pool.
        pid: of its process.
    """

    pool: str
    pid: int


@dataclass(frozen=True)
class Stage:
    """What each way to run needs.

    Attributes:
        worker: shared with other tests.
    """

    server: PrefectServer
    worker: Worker
    folder: Path


@contextmanager
def cleared(scene: Scene) -> Iterator[Scene]:
    """End what is left of the run after the block."""
    try:
        yield scene
    finally:
        scene.clear_away()


@contextmanager
def on_a_worker(
    server: PrefectServer, worker: Worker, folder: Path, job: Any = None, **config: Any
) -> Iterator[Scene]:
    """Schedule a run for `worker`, with the job variables `job`. It does not train yet."""
    with cleared(Scene(server, folder, **config)) as scene:
        scene.deploy(worker.pool, worker.pid, **(job or {}))
        scene.create_run()
        yield scene


def process(scene: Scene, *arguments: str, **variables: str) -> AbstractContextManager[int]:
    """A Python process that belongs to the scene and uses the server; its pid."""
    return python_process(
        scene.server, scene.folder, *arguments, **{**scene.variables, **variables}
    )


@contextmanager
def python_process(
    server: PrefectServer, folder: Path, *arguments: str, **variables: str
) -> Iterator[int]:
    """A Python process that uses the server, and logs to `folder`; its pid.

    It ends with the block.
    """
    with (folder / "process.log").open("ab") as log:
        started = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, **server.environment, **variables},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield started.pid
    finally:
        pids = descendants(started.pid)
        started.kill()
        started.wait()
        for pid in wait_until_gone(pids, GONE_SECONDS):
            kill(pid)


@contextmanager
def worker(stage: Stage) -> Iterator[Scene]:
    """On a shared worker."""
    with on_a_worker(stage.server, stage.worker, stage.folder) as scene:
        scene.until_trained()
        yield scene


@contextmanager
def worker_with_a_command(stage: Stage) -> Iterator[Scene]:
    """If the job has a command, the worker signals its process, not a group."""
    job = {"command": f"{sys.executable} -m prefect.engine"}
    with on_a_worker(stage.server, stage.worker, stage.folder, job) as scene:
        scene.until_trained()
        yield scene


@contextmanager
def own_flow(stage: Stage, name: str = "own") -> Iterator[Scene]:
    """On a shared worker, as the subflow of a flow of the user's; a flow of `own_flow.py`."""
    with cleared(Scene(stage.server, stage.folder)) as scene:
        script = (SCRIPTS / "own_flow.py").relative_to(ROOT)
        scene.deploy(stage.worker.pool, stage.worker.pid, f"{script}:{name}")
        scene.create_run()
        scene.until_trained()
        yield scene


@contextmanager
def own_flow_in_tasks(stage: Stage) -> Iterator[Scene]:
    """As `own_flow`, within tasks: in other threads than the main one."""
    with own_flow(stage, "in_tasks") as scene:
        yield scene


@contextmanager
def detached(stage: Stage) -> Iterator[Scene]:
    """The worker's command is `trialflow.flows.lifecycle.detached_engine`."""
    with on_a_worker(stage.server, stage.worker, stage.folder, DETACHED) as scene:
        scene.until_trained()
        yield scene


@contextmanager
def served_flow(stage: Stage, flow: str = "train") -> Iterator[Scene]:
    """`flow.serve()`: a script runs scheduled runs, and signals only the flow's process."""
    scene = Scene(stage.server, stage.folder)
    name = scene.config.name
    with (
        cleared(scene),
        process(
            scene,
            "-m",
            "tests.support.scripts.serve",
            flow,
            name,
            PREFECT_RUNNER_POLL_FREQUENCY="1",
        ) as parent,
    ):
        scene.use_deployment(name, parent)
        scene.create_run()
        scene.until_trained()
        yield scene


@contextmanager
def served_own_flow(stage: Stage) -> Iterator[Scene]:
    """As `served_flow`, of a flow of the user's."""
    with served_flow(stage, "own") as scene:
        yield scene


@contextmanager
def called_flow(stage: Stage) -> Iterator[Scene]:
    """A user's script calls the flow."""
    with (
        cleared(Scene(stage.server, stage.folder)) as scene,
        process(scene, str(SCRIPTS / "train_here.py"), scene.config.model_dump_json()),
    ):
        scene.find_run()
        scene.until_trained()
        yield scene


@contextmanager
def container(stage: Stage) -> Iterator[Scene]:
    """As in a container: Prefect's engine without a worker."""
    pool = f"pool-{stage.folder.name}"
    ask(stage.server, "work_pools/", {"name": pool, "type": "process"})
    with cleared(Scene(stage.server, stage.folder)) as scene:
        scene.deploy(pool, parent=0)
        scene.create_run()
        with process(scene, "-m", "prefect.engine", PREFECT__FLOW_RUN_ID=scene.run_id):
            scene.until_trained()
            yield scene


@contextmanager
def orphan(stage: Stage) -> Iterator[Scene]:
    """The worker was killed and started again: the run trains on without a parent."""
    pool = f"pool-{stage.folder.name}"
    with (
        process_worker(stage.server, pool) as pid,
        on_a_worker(stage.server, Worker(pool, pid), stage.folder) as scene,
    ):
        scene.until_trained()
        os.kill(pid, signal.SIGKILL)
        assert wait_until_gone([pid], WAIT_SECONDS) == []
        with process_worker(stage.server, pool):
            scene.until_trained(len(scene.seen()) + 100)
            yield scene


@contextmanager
def stuck_batch(stage: Stage) -> Iterator[Scene]:
    """Rank 0 hangs in a batch, and cannot stop."""
    hangs = {"do": "sleep", "at_batch": STUCK_AT}
    with on_a_worker(
        stage.server, stage.worker, stage.folder, hyperparameters=hangs,
        stopping={"grace_seconds": 2}, **SAVING,
    ) as scene:  # fmt: skip
        scene.until_trained(STUCK_AT - 1)
        until(scene.store.list, "a checkpoint")
        yield scene


@contextmanager
def stuck_upload(stage: Stage) -> Iterator[Scene]:
    """An upload hangs, in a task that the flow has submitted."""
    with on_a_worker(
        stage.server, stage.worker, stage.folder, stopping={"grace_seconds": 2}, **SAVING
    ) as scene:
        until(scene.store.list, "a checkpoint")
        for pid in until(scene.uploaders, "an uploader"):
            os.kill(pid, signal.SIGSTOP)
        yield scene
