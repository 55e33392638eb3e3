"""Each way to run the flow, with each way to end it: real server, worker and ranks.

`docs/guides/stopping.md` has the same table for users. All of these tests are long. The default
suite has `test_stopped_runs.test_a_cancelled_run_saves_first`,
`test_deployment.test_a_stopped_worker_requeues_its_run` and, without ranks, `test_stop_monitor`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from prefect.client.orchestration import get_client

from tests.support.prefect import PrefectServer, process_worker
from tests.support.prefect_worker import (
    Scene,
    assert_nothing_left,
    assert_saved_where_it_ended,
)
from tests.support.processes import wait_until_gone
from tests.support.waiting import WAIT_SECONDS, until
from tests.support.ways_to_stop import (
    DETACHED,
    SAVING,
    STUCK_AT,
    Stage,
    Worker,
    called_flow,
    cleared,
    container,
    detached,
    on_a_worker,
    orphan,
    own_flow,
    served_flow,
    served_own_flow,
    stuck_batch,
    stuck_upload,
    worker,
    worker_with_a_command,
)
from trialflow.deployments import automations

pytestmark = [pytest.mark.slots, pytest.mark.server, pytest.mark.long]

# ------------------------------------------------------------------------------- ways to end


def cancelled(scene: Scene) -> None:
    """Cancel in the UI."""
    scene.cancel()


def terminated(scene: Scene) -> None:
    """SIGTERM to the process that runs the flow."""
    scene.signal_driver(signal.SIGTERM)


def parent_terminated(scene: Scene) -> None:
    """SIGTERM to the process that started the flow's: its service is stopped."""
    os.kill(scene.parent, signal.SIGTERM)


def parent_terminated_then_cancelled(scene: Scene) -> None:
    """A stopped `flow.serve()` waits for its flows, and no longer sees a Cancel."""
    parent_terminated(scene)
    scene.until_trained(len(scene.seen()) + 100)
    scene.cancel()


def marked_crashed(scene: Scene) -> None:
    """A person or an automation marks the living run as crashed."""
    scene.set_state("CRASHED", "Crashed", is_forced=True)


@dataclass(frozen=True)
class Row:
    """One way to run and one way to end.

    Attributes:
        state: the flow run's final state.
        saves: whether the run saves at its end; if not, its last checkpoint is intact.
    """

    way: Callable[[Stage], AbstractContextManager[Scene]]
    end: Callable[[Scene], None]
    state: str
    saves: bool = True


ROWS = {
    "command-cancelled": Row(worker_with_a_command, cancelled, "Cancelled"),
    "container-terminated": Row(container, terminated, "AwaitingRetry"),
    "container-cancelled": Row(container, cancelled, "Cancelled"),
    "detached-cancelled": Row(detached, cancelled, "Cancelled"),
    "served-stopped": Row(served_flow, parent_terminated_then_cancelled, "Cancelled"),
    "served-cancelled": Row(served_flow, cancelled, "Cancelled"),
    "served_own-cancelled": Row(served_own_flow, cancelled, "Cancelled"),
    "orphaned-cancelled": Row(orphan, cancelled, "Cancelled"),
    "called-cancelled": Row(called_flow, cancelled, "Cancelled"),
    "called-terminated": Row(called_flow, terminated, "Cancelled"),
    "own-cancelled": Row(own_flow, cancelled, "Cancelled"),
    "stuck_batch-cancelled": Row(stuck_batch, cancelled, "Cancelled", saves=False),
    "stuck_upload-cancelled": Row(stuck_upload, cancelled, "Cancelled", saves=False),
    "worker-marked_crashed": Row(worker, marked_crashed, "Crashed"),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_stopped_run(
    row: Row, prefect_server: PrefectServer, shared_worker: Worker, tmp_path: Path
) -> None:
    """No process is left, the state is right and says where it saved, and the newest checkpoint is
    intact."""
    with row.way(Stage(prefect_server, shared_worker, tmp_path)) as scene:
        ports = scene.ports()
        assert ports
        row.end(scene)
        scene.until_state(row.state)
        assert_nothing_left(scene, ports)
        assert scene.state() == row.state
        # Prefect writes a parent's message.
        if row.state == "Cancelled" and row.way not in (own_flow, served_own_flow):
            message = scene.run()["state"]["message"]
            assert message.startswith("Stopped: ")
            assert not row.saves or "; saved at batch " in message
        assert (assert_saved_where_it_ended(scene) if row.saves else scene.saved()) > 0


def test_a_deleted_run(
    prefect_server: PrefectServer, shared_worker: Worker, tmp_path: Path
) -> None:
    """After Delete in the UI the run saves and ends."""
    with worker(Stage(prefect_server, shared_worker, tmp_path)) as scene:
        ports = scene.ports()
        scene.delete()
        until(lambda: not scene.processes(), "no process")
        assert_nothing_left(scene, ports)
        assert assert_saved_where_it_ended(scene) > 0


# ------------------------------------------------------------- restarts by automations


@contextmanager
def automated(server: PrefectServer, pool: str) -> Iterator[None]:
    """The server has the automations of `trialflow deploy` for that process work pool."""
    with server.configured(), get_client(sync_client=True) as client:
        created = [client.create_automation(each) for each in automations.automations([pool])]
        try:
            yield
        finally:
            for each in created:
                client.delete_automation(each)


def test_a_second_signal_ends_a_run_at_once(
    prefect_server: PrefectServer, shared_worker: Worker, tmp_path: Path
) -> None:
    """A second SIGTERM does not wait for a hung batch; the run resumes later."""
    once = tmp_path / "once"
    hangs = {"do": "sleep", "at_batch": STUCK_AT, "once": str(once)}
    with on_a_worker(
        prefect_server, shared_worker, tmp_path, hyperparameters=hangs,
        stopping={"grace_seconds": 600}, **SAVING,
    ) as scene:  # fmt: skip
        until(once.exists, "a batch that hangs")
        before, driver = scene.processes(), scene.driver()
        scene.signal_driver(signal.SIGTERM)

        def ends() -> bool:
            if psutil.pid_exists(driver):
                os.kill(driver, signal.SIGTERM)
            return not wait_until_gone(before, 2)

        until(ends, "no process")
        seen, saved = len(scene.seen()), scene.saved()
        scene.until_resumed(saved, seen)


def test_a_stopped_worker(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM to Prefect's own worker kills its runs, and Prefect shows them as Running. After the
    silence timeout another worker resumes them."""
    monkeypatch.setattr(automations, "SILENCE_TIMEOUT", timedelta(seconds=45))
    pool = f"pool-{tmp_path.name}"
    with (
        automated(prefect_server, pool),
        cleared(Scene(prefect_server, tmp_path, **SAVING)) as scene,
    ):
        with process_worker(prefect_server, pool) as pid:
            scene.deploy(pool, pid)
            scene.create_run()
            until(scene.store.list, "a checkpoint")
            before = scene.processes()
            parent_terminated(scene)
            assert wait_until_gone([pid, *before], 10) == []
            assert scene.state() == "Running"
        with process_worker(prefect_server, pool):
            seen, saved = len(scene.seen()), scene.saved()
            scene.until_resumed(saved, seen)


def test_a_stopped_worker_with_detached_engines(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """With `detached_engine` as the command, the runs of a stopped worker save, go back into their
    queue, and resume on another worker."""
    pool = f"pool-{tmp_path.name}"
    with cleared(Scene(prefect_server, tmp_path)) as scene:
        with process_worker(prefect_server, pool) as pid:
            scene.deploy(pool, pid, **DETACHED)
            scene.create_run()
            scene.until_trained()
            before = scene.processes()
            parent_terminated(scene)
            assert wait_until_gone([pid, *before], WAIT_SECONDS) == []
            saved = assert_saved_where_it_ended(scene)
            assert scene.run()["state_type"] == "SCHEDULED"
        with process_worker(prefect_server, pool):
            scene.until_resumed(saved, saved)


def test_another_attempt_has_started(
    prefect_server: PrefectServer, shared_worker: Worker, tmp_path: Path
) -> None:
    """A presumed-dead driver ends at once when another attempt at its run has started."""
    with worker(Stage(prefect_server, shared_worker, tmp_path)) as scene:
        before, seen = scene.processes(), len(scene.seen())
        # Its machine sleeps: a driver that sees its run crashed, before there is another attempt,
        # saves.
        driver = scene.driver()
        os.kill(driver, signal.SIGSTOP)
        scene.set_state("CRASHED", "Crashed", is_forced=True)
        scene.set_state("RUNNING", "Running", is_forced=True)
        os.kill(driver, signal.SIGCONT)
        assert wait_until_gone(before, WAIT_SECONDS) == []
        assert len(scene.seen()) >= seen
        assert scene.state() == "Running"
        assert scene.store.list() == []
