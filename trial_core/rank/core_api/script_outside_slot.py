"""A Core API script whose ranks another program has started: they join a driver.

The script runs in its own thread, usually the main one. A second thread is the compute lane of this
rank: it carries out `RunScript`, which lasts until the script's block has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trial_core.driver.script_order import Order
from trial_core.errors import SlotsError, TrialflowError
from trial_core.messages import BuildTrial
from trial_core.processes.machine.run_dirs import prepare_run_dir, run_dir_of
from trial_core.processes.slots.joined_rank import JoinedRank
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.core_api.script_controller import ScriptController
from trial_core.rank.core_api.script_host import ScriptHost
from trial_core.rank.script.driver_process import take_driver
from trial_core.schedule.command import ScriptCommand


@contextmanager
def joined_script(ranks: DistributedContext, order: Callable[[], Order]) -> Iterator[ScriptHost]:
    """Have a driver next to rank 0 run the block as a script. Collective: every rank enters it.

    `order` is called on rank 0 alone, and says what to drive.

    Raises:
        TrialflowError: the run could not begin, or has failed on another rank or in the driver.
    """
    with take_driver(ranks) as driver:
        invitation = driver.give(order)
        # Before the script asks whether to stop, a signal ends it as usual.
        with (
            JoinedRank(invitation, ranks.get_rank(), handles_signals=False) as joined,
            _ScriptInBlock(joined, ranks).running() as host,
        ):
            yield host
        driver.end()


class _ScriptInBlock:
    """The thread that serves the driver, and its meeting points with the script's thread."""

    def __init__(self, joined: JoinedRank, ranks: DistributedContext) -> None:
        self._joined = joined
        self._ranks = ranks
        self._controller = ScriptController(
            joined.send,
            joined.stop_barrier,
            self._run,
            distributed=ranks,
            run_dir_of=self._run_dir,
            on_first_question=joined.handle_signals,
        )
        self._host: ScriptHost | None = None
        self._error: BaseException | None = None
        self._cause: TrialflowError | None = None
        self._has_begun, self._has_ended = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="compute-lane", daemon=True)

    @contextmanager
    def running(self) -> Iterator[ScriptHost]:
        """The script: it begins when the driver says so, and ends with the block."""
        self._thread.start()
        self._has_begun.wait()
        if self._host is None:
            self._thread.join()
            raise self._error or SlotsError("the driver has ended this rank")
        try:
            yield self._host
        except BaseException as error:
            # `sys.exit(0)` is a success, as for a process.
            if not (isinstance(error, SystemExit) and error.code in (None, 0)):
                self._failure = error
            self._has_ended.set()
            self._thread.join()
            raise
        self._has_ended.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    # --------------------------------------------------------------------- in the compute lane

    def _serve(self) -> None:
        try:
            self._joined.serve(self._controller, self._failed)
        except BaseException as error:  # noqa: BLE001 - the thread's top frame: the script raises it
            self._error = error
        finally:
            self._has_begun.set()

    def _run(self, command: ScriptCommand, host: ScriptHost) -> None:
        self._host = host
        if self._cause is not None:  # meanwhile
            host.failed(self._cause)
        self._has_begun.set()
        self._has_ended.wait()
        if self._failure is not None:
            raise self._failure

    def _failed(self, error: TrialflowError) -> None:
        """Note that the run has failed elsewhere. The script may run. Called in another thread."""
        self._cause = error
        if self._host is not None:
            self._host.failed(error)

    def _run_dir(self, request: BuildTrial) -> Path:
        if self._ranks.cross_rank != 0 and self._ranks.get_local_rank() == 0:
            prepare_run_dir(request.trial)
        return run_dir_of(request.trial)
