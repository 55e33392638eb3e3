"""`init`: the context of a Core API script. Follows ``determined.core.init``.

The same script runs in the slots of ``trialflow train``, where the experiment file names it, and
with plain ``python`` or ``torchrun``, without Prefect::

    with trial_core.init() as core_context:
        for step in range(first_step, 1001):
            loss = train_one_step()
            if step % 100 == 0:
                core_context.train.report_training_metrics(step, {"loss": loss})
                with core_context.checkpoint.store_path({"steps_completed": step}) as (path, _):
                    torch.save(model.state_dict(), path / "model.pt")
            if core_context.preempt.should_preempt():
                break
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from trial_core.cluster_info import checkpoint_to_continue
from trial_core.config.lengths import OPEN_END
from trial_core.config.script import (
    SOURCE,
    checked_mapping,
    given_length,
    has_code_folder,
    named_metric,
    script_config,
    started_module,
)
from trial_core.driver.script_order import Order
from trial_core.errors import SlotsError, TrialError, TrialflowError
from trial_core.messages import BuildTrial
from trial_core.processes.machine.run_dirs import prepare_run_dir, run_dir_of, trial_id
from trial_core.processes.slots.joined_rank import JoinedRank
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.core_api.context import Context, PreemptMode, TensorboardMode
from trial_core.rank.core_api.script_controller import ScriptController
from trial_core.rank.core_api.script_host import ScriptHost, current_slot
from trial_core.rank.script import shown
from trial_core.rank.script.driver_process import take_driver
from trial_core.schedule.command import ScriptCommand, without_values

logger = logging.getLogger(__name__)


@contextmanager
def init(
    *,
    distributed: DistributedContext | None = None,
    checkpoint_storage: str | Mapping[str, Any] | None = None,
    preempt_mode: PreemptMode = PreemptMode.WorkersAskChief,
    tensorboard_mode: TensorboardMode = TensorboardMode.AUTO,
    exp_conf: Mapping[str, Any] | None = None,
    latest_checkpoint: str | None = None,
    take_over: bool = False,
) -> Iterator[Context]:
    """The context of a Core API script. Every rank enters it once.

    `init` does not initialise torch.distributed. Outside a slot, a script with several ranks does
    so first, and `init` is a collective. In a slot, the experiment file and the driver decide, and
    the arguments for scripts outside a slot are not used.

    Args:
        distributed: this rank's place among all; by default from the environment.
        checkpoint_storage: outside a slot: replaces the storage of `exp_conf`.
        preempt_mode: which ranks may ask `should_preempt`.
        tensorboard_mode: when files for TensorBoard are stored.
        exp_conf: outside a slot: any part of an experiment file, as plain data.
        latest_checkpoint: outside a slot: the checkpoint to resume from: its uuid or the first
            characters of it, or ``"latest"``, the newest intact one of this experiment's newest
            trial. Default: the environment variable ``DET_LATEST_CHECKPOINT``; without it a new
            trial begins. `Context.info` names the checkpoint that was found.
        take_over: outside a slot: continue a trial that another run may be training, and end that
            run.

    Raises:
        ConfigError: `exp_conf` is invalid; lists every mistake.
        TrialError: torch.distributed is not initialised, and there are several ranks.
        CheckpointNotFound: `latest_checkpoint` does not exist.
        CheckpointDamaged: no checkpoint to resume from is intact.
        TrialflowError: another run trains the trial, or may do so.
    """
    host = current_slot()
    if host is not None:
        host.distributed = distributed or host.distributed
        if checkpoint_storage is not None and host.distributed.get_rank() == 0:
            logger.warning(
                "init: checkpoint_storage is not used: in a slot of `trialflow train`, the "
                "experiment file decides"
            )
        yield Context(host, preempt_mode, tensorboard_mode)
        return
    ranks = distributed or DistributedContext.from_environment()
    if ranks.get_size() > 1 and not dist.is_initialized():
        raise TrialError(
            f"trial_core.init: there are {ranks.get_size()} ranks, and torch.distributed is not "
            "initialised; call torch.distributed.init_process_group before trial_core.init"
        )
    shown.install()
    with shown.visible_logs():
        given = dict(checked_mapping(exp_conf, SOURCE))
        if checkpoint_storage is not None:
            given["checkpoint_storage"] = checkpoint_storage
        length = given_length(given)
        config = script_config(given, max_length=OPEN_END if length is None else length)
        config = config.model_copy(update={"entrypoint": script_command()})

        def order() -> Order:
            return Order(
                experiment=config.model_dump(mode="json"),
                new_trial=trial_id(config.name, uuid4().hex),
                world_size=ranks.get_size(),
                has_other_machines=ranks.get_num_agents() > 1,
                latest_checkpoint=checkpoint_to_continue(latest_checkpoint),
                take_over=take_over,
                has_metric=named_metric(given) is not None,
                has_code=has_code_folder("__main__"),
            )

        with _joined_script(ranks, order) as host:
            yield Context(host, preempt_mode, tensorboard_mode)


def script_command() -> str:
    """How this program was started, as an entrypoint. Each checkpoint records it."""
    arguments = without_values(sys.argv[1:])
    module = started_module()
    if module is not None:
        return ScriptCommand(module.removesuffix(".__main__"), True, arguments).text
    name = Path(sys.argv[0]).name
    if not name.endswith(".py"):  # an installed command, ``python -c``, a console
        name = f"{name.lstrip('-') or 'script'}.py"
    return ScriptCommand(name, False, arguments).text


@contextmanager
def _joined_script(ranks: DistributedContext, order: Callable[[], Order]) -> Iterator[ScriptHost]:
    """Have a driver next to rank 0 run the block as a script. Collective: every rank enters it.

    `order`, called on rank 0 alone, says what to drive. Raises TrialflowError if the run could not
    begin, or has failed on another rank or in the driver.
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
    """The thread that serves the driver, and its meeting points with the script's thread.

    The script runs in its own thread, usually the main one. This second one is the compute lane of
    the rank: it carries out `RunScript`, which lasts until the script's block has ended.
    """

    def __init__(self, joined: JoinedRank, ranks: DistributedContext) -> None:
        self._joined = joined
        self._ranks = ranks
        self._controller = ScriptController(
            joined.send,
            joined.stop_barrier,
            joined.receipts,
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
