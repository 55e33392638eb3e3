"""Each way to run the flow, and each way to end it: real server, worker, ranks.

`docs/stopping.md` has the same table for people. Rows, and what holds them:

- Cancel, a worker's own command: `test_stopping.test_a_cancelled_run_saves_first`
- Cancel, ``flow.serve()``, an explicit command, a worker that was killed and started again:
  `test_a_run_that_is_ended` [served-cancelled], [command-cancelled], [kept-cancelled],
  [orphaned-cancelled]; a script: [called-cancelled]
- Cancel, its grace over in a task that was called or submitted: [stuck_batch-cancelled],
  [stuck_upload-cancelled]
- Suspend: `test_stopping.test_a_suspended_run_stays_so_until_it_is_resumed`
- SIGTERM, a deployment's run: `test_stopping.test_a_preempted_run_goes_on_by_itself`, and
  [container-terminated]; twice: `test_a_second_signal_ends_it_at_once`
- SIGTERM, a script: [called-terminated]
- SIGKILL of the driver: `test_a_killed_driver_is_started_again`
- SIGTERM to the worker: `test_a_stopped_worker`, `test_a_stopped_worker_whose_runs_are_kept`; to
  what serves: [served-stopped]; SIGKILL: [orphaned-cancelled]
- declared dead while it lives: [worker-declared_crashed], `test_another_attempt_has_begun`
- a time budget: `test_stopping.test_a_time_budget_that_is_over`
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
    assert_closed,
    assert_nothing_left,
    assert_saved_where_it_ended,
)
from tests.support.processes import wait_until_gone
from tests.support.waiting import WAIT_SECONDS, until
from tests.support.ways_to_stop import (
    KEPT,
    SAVING,
    STUCK_AT,
    Stage,
    Worker,
    called_flow,
    cleared,
    container,
    kept,
    on_a_worker,
    orphan,
    served_flow,
    stuck_batch,
    stuck_upload,
    worker,
    worker_with_a_command,
)
from trialflow.deployments import desired_state

pytestmark = [pytest.mark.slots, pytest.mark.server]

# ------------------------------------------------------------------------------- ways to end


def cancelled(scene: Scene) -> None:
    """Cancel in the UI."""
    scene.cancel()


def terminated(scene: Scene) -> None:
    """SIGTERM to the process that runs the flow."""
    scene.signal_driver(signal.SIGTERM)


def keeper_terminated(scene: Scene) -> None:
    """SIGTERM to what has started the flow's process: a service that is stopped."""
    os.kill(scene.keeper, signal.SIGTERM)


def keeper_terminated_then_cancelled(scene: Scene) -> None:
    """`flow.serve()` waits for its flows when it is stopped, and hears of no Cancel any more."""
    keeper_terminated(scene)
    scene.until_trained(len(scene.seen()) + 100)
    scene.cancel()


def declared_crashed(scene: Scene) -> None:
    """Somebody, or an automation, takes the run for dead, and it is not."""
    scene.set_state("CRASHED", "Crashed", is_forced=True)


@dataclass(frozen=True)
class Row:
    """One way to run and one way to end.

    Attributes:
        state: what the UI shows at the end.
        saves: whether the run saves at its end; if not, its last checkpoint is good.
    """

    way: Callable[[Stage], AbstractContextManager[Scene]]
    end: Callable[[Scene], None]
    state: str
    saves: bool = True


ROWS = {
    "command-cancelled": Row(worker_with_a_command, cancelled, "Cancelled"),
    "container-terminated": Row(container, terminated, "AwaitingRetry"),
    "container-cancelled": Row(container, cancelled, "Cancelled"),
    "kept-cancelled": Row(kept, cancelled, "Cancelled"),
    "served-stopped": Row(served_flow, keeper_terminated_then_cancelled, "Cancelled"),
    "served-cancelled": Row(served_flow, cancelled, "Cancelled"),
    "orphaned-cancelled": Row(orphan, cancelled, "Cancelled"),
    "called-cancelled": Row(called_flow, cancelled, "Cancelled"),
    "called-terminated": Row(called_flow, terminated, "Crashed"),
    "stuck_batch-cancelled": Row(stuck_batch, cancelled, "Cancelled", saves=False),
    "stuck_upload-cancelled": Row(stuck_upload, cancelled, "Cancelled", saves=False),
    "worker-declared_crashed": Row(worker, declared_crashed, "Crashed"),
}
QUICK = {"command-cancelled"}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=name, marks=[] if name in QUICK else pytest.mark.long)
        for name, row in ROWS.items()
    ],
)
def test_a_run_that_is_ended(
    row: Row, prefect_server: PrefectServer, shared_worker: Worker, tmp_path: Path
) -> None:
    """Nothing is left of it, the state shown is true, what it can go on from is stored whole."""
    with row.way(Stage(prefect_server, shared_worker, tmp_path)) as scene:
        ports = scene.ports()
        assert ports
        row.end(scene)
        scene.until_state(row.state)
        assert_nothing_left(scene, ports)
        assert scene.state() == row.state
        if row.state == "Cancelled":  # a worker that has to kill it after 30 s says so too
            assert scene.run()["state"]["message"].startswith("Stopped: ")
        assert (assert_saved_where_it_ended(scene) if row.saves else scene.saved()) > 0


@pytest.mark.long
def test_a_run_that_is_deleted(
    prefect_server: PrefectServer, shared_worker: Worker, tmp_path: Path
) -> None:
    """Whoever deletes a run in the UI does not leave its ranks to nobody."""
    with worker(Stage(prefect_server, shared_worker, tmp_path)) as scene:
        ports = scene.ports()
        scene.delete()
        until(lambda: not scene.processes(), "no process")
        assert_nothing_left(scene, ports)
        assert assert_saved_where_it_ended(scene) > 0


@pytest.mark.long
def test_what_was_ended_can_be_resumed(
    prefect_server: PrefectServer, shared_worker: Worker, tmp_path: Path
) -> None:
    """A new run of the deployment that is given the trial goes on where the cancelled one saved."""
    with worker(Stage(prefect_server, shared_worker, tmp_path)) as scene:
        scene.cancel()
        scene.until_state("Cancelled")
        saved = assert_saved_where_it_ended(scene)
        scene.create_run(trial=scene.trial)
        scene.until_it_goes_on(saved, saved)


# ------------------------------------------------------------- what goes on by itself, and how


@contextmanager
def automated(server: PrefectServer, pool: str) -> Iterator[None]:
    """The server has the automations that `trialflow deploy` makes for that process work pool."""
    with server.configured(), get_client(sync_client=True) as client:
        made = [client.create_automation(each) for each in desired_state.automations([pool])]
        try:
            yield
        finally:
            for each in made:
                client.delete_automation(each)


@pytest.mark.long
def test_a_killed_driver_is_started_again(
    prefect_server: PrefectServer, shared_worker: Worker, tmp_path: Path
) -> None:
    """SIGKILL, or out of memory: its ranks are gone within 10 s, it is shown as Crashed, and the
    same run goes on from its last checkpoint."""
    with (
        automated(prefect_server, shared_worker.pool),
        on_a_worker(prefect_server, shared_worker, tmp_path, **SAVING) as scene,
    ):
        until(scene.store.list, "a checkpoint")
        before, ports = scene.processes(), scene.ports()
        scene.signal_driver(signal.SIGKILL)
        assert wait_until_gone(before, 10) == []
        assert_closed(ports)
        seen, saved = len(scene.seen()), scene.saved()
        scene.until_it_goes_on(saved, seen)
        assert "Crashed" in scene.history()
        assert scene.state() == "Running"


@pytest.mark.long
def test_a_second_signal_ends_it_at_once(
    prefect_server: PrefectServer, shared_worker: Worker, tmp_path: Path
) -> None:
    """Whoever sends SIGTERM twice does not wait for a batch that hangs; the run goes on later."""
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
        scene.until_it_goes_on(saved, seen)


@pytest.mark.long
def test_a_stopped_worker(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM to the worker (a service that is stopped) ends its flows unsaved, and Prefect shows
    them as running for ever; once nothing was heard of them they go on, by another worker."""
    monkeypatch.setattr(desired_state, "SILENCE", timedelta(seconds=45))
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
            keeper_terminated(scene)
            assert wait_until_gone([pid, *before], 10) == []
            assert scene.state() == "Running"
        with process_worker(prefect_server, pool):
            seen, saved = len(scene.seen()), scene.saved()
            scene.until_it_goes_on(saved, seen)


@pytest.mark.long
def test_a_stopped_worker_whose_runs_are_kept(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """With `trialflow.flows.lifecycle.detached_engine` as its command, a worker that is stopped leaves its flows the time to
    save; they go back into their queue, and go on by another worker."""
    pool = f"pool-{tmp_path.name}"
    with cleared(Scene(prefect_server, tmp_path)) as scene:
        with process_worker(prefect_server, pool) as pid:
            scene.deploy(pool, pid, **KEPT)
            scene.create_run()
            scene.until_trained()
            before = scene.processes()
            keeper_terminated(scene)
            assert wait_until_gone([pid, *before], WAIT_SECONDS) == []
            saved = assert_saved_where_it_ended(scene)
            assert scene.run()["state_type"] == "SCHEDULED"
        with process_worker(prefect_server, pool):
            scene.until_it_goes_on(saved, saved)


@pytest.mark.long
def test_another_attempt_has_begun(
    prefect_server: PrefectServer, shared_worker: Worker, tmp_path: Path
) -> None:
    """A driver that was taken for dead, and sees that its run was started again, ends at once, and
    leaves the run to the other."""
    with worker(Stage(prefect_server, shared_worker, tmp_path)) as scene:
        before, seen = scene.processes(), len(scene.seen())
        scene.set_state("CRASHED", "Crashed", is_forced=True)
        scene.set_state("RUNNING", "Running", is_forced=True)
        assert wait_until_gone(before, WAIT_SECONDS) == []
        assert len(scene.seen()) >= seen
        assert scene.state() == "Running"
        assert scene.store.list() == []
