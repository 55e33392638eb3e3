"""`Trainer.fit` on ranks that another program has started: they join a driver of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from trial_core.driver.result import TrialResult
from trial_core.driver.script_order import Order
from trial_core.errors import SlotsError
from trial_core.messages import AttachTrial, StopRequested
from trial_core.processes.machine.run_dirs import clear_kept, prepare_run_dir, run_dir_of
from trial_core.processes.slots.joined_rank import JoinedRank
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.controller import AdapterBuilder, Controller
from trial_core.rank.script.driver_process import take_driver
from trial_core.trainer.entrypoint import AnyTrialContext


def fit_with_driver(
    context: AnyTrialContext, order: Callable[[], Order], adapt: AdapterBuilder
) -> TrialResult:
    """Have a driver next to rank 0 train a trial on these ranks. Collective.

    Args:
        order: called on rank 0; says what to drive.
        adapt: makes the adapter of the script's trial.

    Raises:
        TrialflowError: the run could not begin, or has failed on another rank or in the driver.
        Exception: the trial has raised it on this rank.
    """
    ranks, info = context.distributed, context.run_info
    with take_driver(ranks) as driver:
        invitation = driver.give(order)
        with JoinedRank(invitation, ranks.get_rank()) as joined:
            controller = Controller(
                adapt,
                joined.send,
                ranks,
                joined.stop_barrier,
                lambda: joined.send(StopRequested()),
                info,
                lambda request: _run_dir(ranks, request),
            )
            with closing(controller):
                joined.serve(controller)
        driver.end()
    if controller.fit_result is None:
        raise SlotsError("the driver has ended this rank without a result")
    result = TrialResult(**controller.fit_result)
    if not result.stopped_early and ranks.get_local_rank() == 0:
        clear_kept(run_dir_of(result.trial))  # of this machine
    return result


def _run_dir(ranks: DistributedContext, request: AttachTrial) -> Path:
    """The run's folder on this machine. Collective.

    On rank 0's machine the driver has prepared it.
    """
    if ranks.cross_rank != 0 and ranks.get_local_rank() == 0:
        prepare_run_dir(request.trial)
    ranks.allgather(None)  # the ranks of a machine wait for the first one
    return run_dir_of(request.trial)
