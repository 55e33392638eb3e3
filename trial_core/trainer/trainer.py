"""`Trainer`: trains a trial in a user's own script. Follows Determined's class."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import get_args

from trial_core.cluster_info import checkpoint_to_continue
from trial_core.config.script import has_code_folder, named_metric, script_config
from trial_core.driver.changed_settings import check_keep
from trial_core.driver.result import TrialResult
from trial_core.driver.script_order import Order
from trial_core.errors import ConfigError, SlotsError, TrialError
from trial_core.messages import AttachTrial, FitBegun, Length, StopRequested
from trial_core.processes.machine.run_dirs import clear_kept, prepare_run_dir, run_dir_of
from trial_core.processes.slots.joined_rank import JoinedRank
from trial_core.pytorch.context import kind_of
from trial_core.pytorch.trial import PyTorchTrial
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.controller import AdapterBuilder, Controller
from trial_core.rank.core_api.script_host import ScriptHost, current_slot
from trial_core.rank.script.driver_process import take_driver
from trial_core.rank.trial.context import RunInfo
from trial_core.rank.trial.trial_adapter import TrialAdapter
from trial_core.schedule.sequencer import CheckpointPolicy
from trial_core.schedule.units import Batch, Epoch, TrainUnit
from trial_core.trainer.entrypoint import AnyTrial, AnyTrialContext, adapter_of

logger = logging.getLogger(__name__)

LATEST = "latest"
NO_METRIC_FOR_BEST = (
    'checkpoint_policy "best" needs a metric, and exp_conf names none: every validation is saved. '
    'Give init exp_conf={"searcher": {"metric": ...}}, or give fit checkpoint_policy="all" or '
    '"none"'
)


class Trainer:
    """Trains, validates and saves a trial, within `init` of its kind.

    Args:
        trial: constructed with `context`, on every rank.
        context: the context that `init` gave.

    Raises:
        TrialError: an argument has the wrong type.
    """

    def __init__(self, trial: AnyTrial, context: AnyTrialContext) -> None:
        if not isinstance(trial, AnyTrial):
            raise TrialError(
                "Trainer takes a constructed trial, a PyTorchTrial or DeepSpeedTrial; got "
                f"{kind_of(trial)}"
            )
        if not isinstance(context, type(trial).trial_context_class):
            kind = "pytorch" if isinstance(trial, PyTorchTrial) else "deepspeed"
            raise TrialError(
                f"Trainer takes the context that trial_core.{kind}.init gives as its second "
                f"argument; got {kind_of(context)}"
            )
        self._trial = trial
        self._context = context
        self._was_fitted = False

    def configure_profiler(
        self,
        sync_timings: bool = True,
        enabled: bool = False,
        begin_on_batch: int = 0,
        end_after_batch: int | None = None,
    ) -> None:
        """Profile some batches on rank 0. Call it before `fit`; the last call counts.

        The trace of torch's profiler is stored with the run's files for TensorBoard. For other
        settings of the profiler call ``context.set_profiler``.

        Args:
            sync_timings: not used: torch's profiler reads the accelerator's own clock.
            enabled: True to profile.
            begin_on_batch, end_after_batch: indices of the first and the last batch to profile;
                five batches if there is no last one.
        """
        self._context.run_info.experiment["profiling"] = {
            "enabled": enabled,
            "begin_on_batch": begin_on_batch,
            "end_after_batch": end_after_batch,
        }

    def fit(
        self,
        checkpoint_period: TrainUnit | None = None,
        validation_period: TrainUnit | None = None,
        max_length: TrainUnit | None = None,
        reporting_period: TrainUnit = Batch(100),  # noqa: B008 - never changed
        checkpoint_policy: CheckpointPolicy | None = None,
        latest_checkpoint: str | None = None,
        step_zero_validation: bool = False,
        test_mode: bool = False,
        profiling_enabled: bool = False,
        take_over: bool = False,
        keep: Sequence[str] = (),
    ) -> TrialResult:
        """Train the trial. Collective: every rank calls this once, with the same arguments.

        The end is always validated and saved, whatever the periods. Checkpoints go to
        ``checkpoint_storage`` of `init`'s ``exp_conf``, by default below ``./trialflow-runs``.
        SIGTERM or Ctrl-C to any rank, or the trial's ``set_stop_requested``, ends training after
        the current batch; the run then saves and returns with ``stopped_early``. A second Ctrl-C
        raises KeyboardInterrupt.

        Args:
            checkpoint_period: when to save: every ``Batch(n)`` or ``Epoch(n)``, or after the ones
                in a container, as ``Batch([5, 30, 45])``.
            validation_period: when to validate, in the same form.
            max_length: where training ends; required, except in test mode.
            reporting_period: when to report training metrics.
            checkpoint_policy: which validations are also saved: the ``best`` so far, ``all``, or
                ``none``. ``best`` needs ``searcher.metric`` in ``exp_conf``; without it every
                validation is saved, with a warning. Default: ``best`` with that metric, ``all``
                without.
            latest_checkpoint: the checkpoint to resume from: its uuid, or the first characters of
                it; the folder of a downloaded checkpoint; or the URL of one in any storage, which
                is copied to the run's. This continues the trial that saved it, bit for bit.
                ``"latest"`` is the newest undamaged checkpoint of this experiment's newest trial,
                or a new trial if there is none. Default: the environment variable
                ``DET_LATEST_CHECKPOINT``; without it a new trial begins, with the weights of
                ``searcher.source_checkpoint_uuid`` if ``exp_conf`` names one.
            step_zero_validation: validate once before the first batch.
            test_mode: train one batch, validate one, and save without keeping the checkpoint.
            profiling_enabled: profile the first batches; `configure_profiler` says which ones.
            take_over: continue a trial that another run may be training, and end that run. A script
                that a scheduler restarts on another machine needs this: it cannot know if the first
                machine is dead.
            keep: settings that stay as in `latest_checkpoint`, although the trial is built with
                other values now: ``optimizer``, ``scheduler``, ``scaler``, ``engine``, or one of
                its settings, ``optimizer.lr``.

        Raises:
            ConfigError: an argument is invalid.
            TrialError: the trial breaks a rule, or does not report ``searcher.metric``.
            CheckpointNotFound: `latest_checkpoint` does not exist.
            CheckpointDamaged: no checkpoint to resume from is intact; names the damaged file.
            CheckpointError: a checkpoint could not be stored.
            RankFailed, Stalled: another rank has failed, or the ranks hang.
            Stopped: a stop was requested before training began.
            Superseded: another run, on another machine, has taken over the trial.
            TrialflowError: another run trains the trial, or may do so on another machine.
        """
        if self._was_fitted:
            raise TrialError(
                "fit was called twice; to continue training, construct a new trial and give fit "
                "latest_checkpoint=result.checkpoint_uuid"
            )
        if profiling_enabled:
            given = self._context.run_info.experiment.get("profiling") or {}
            self._context.run_info.experiment["profiling"] = {**given, "enabled": True}
        if latest_checkpoint is not None and not isinstance(latest_checkpoint, str):
            raise ConfigError(
                f'fit: latest_checkpoint is a checkpoint\'s uuid, "{LATEST}", a folder or a URL, '
                f"as text, got {latest_checkpoint!r}"
            )
        if max_length is None and test_mode:
            max_length = Batch(1)
        asked = fit_begun(
            checkpoint_period, validation_period, max_length, reporting_period, checkpoint_policy,
            step_zero_validation, keep,
        )  # fmt: skip
        slot = current_slot()
        if slot is not None:
            return self._fit_in_slot(slot, asked, test_mode)
        if max_length is None:
            raise ConfigError("fit needs max_length: Batch(1000) or Epoch(3), for example")
        start = checkpoint_to_continue(latest_checkpoint)
        return self._fit_here(asked, max_length, start, test_mode, take_over)

    # ----------------------------------------------------------------------------- internals

    def _fit_in_slot(self, slot: ScriptHost, asked: FitBegun, test_mode: bool) -> TrialResult:
        """Have the driver of ``trialflow train`` train the trial."""
        if test_mode:
            raise ConfigError(
                "fit(test_mode=True) trains one batch outside a run: start the script with python "
                "or torchrun"
            )
        if asked.max_length is None and slot.max_length is None:
            raise ConfigError(
                "fit needs max_length: Batch(1000) or Epoch(3), for example; or give the "
                "experiment searcher.max_length"
            )
        self._was_fitted = True
        context, seed = self._context, slot.run.experiment_seed
        return slot.fit(
            asked, lambda *_: adapter_of(self._trial, context, seed), context.distributed
        )

    def _fit_here(
        self,
        asked: FitBegun,
        max_length: TrainUnit,
        latest_checkpoint: str | None,
        test_mode: bool,
        take_over: bool,
    ) -> TrialResult:
        """Have a driver next to rank 0 train the trial, on ranks that are started already."""
        context, distributed = self._context, self._context.distributed
        experiment = context.get_experiment_config()
        metric = named_metric(experiment)
        has_no_best = metric is None and asked.checkpoint_policy == "best" and not test_mode
        if has_no_best and distributed.get_rank() == 0:
            logger.warning(NO_METRIC_FOR_BEST)
        distributed.connect()
        self._was_fitted = True

        def order() -> Order:
            config = script_config(experiment, None, type(self._trial), max_length)
            return Order(
                experiment=config.model_dump(mode="json"),
                new_trial=context.run_info.trial,
                world_size=distributed.get_size(),
                has_other_machines=distributed.get_num_agents() > 1,
                fit=asked,
                latest_checkpoint=latest_checkpoint,
                take_over=take_over,
                test_mode=test_mode,
                has_metric=metric is not None,
                has_code=has_code_folder(type(self._trial).__module__),
            )

        def adapt(info: RunInfo, ranks: DistributedContext) -> TrialAdapter:
            return adapter_of(self._trial, context, info.experiment_seed)

        return fit_with_driver(context, order, adapt)


def fit_with_driver(
    context: AnyTrialContext, order: Callable[[], Order], adapt: AdapterBuilder
) -> TrialResult:
    """Have a driver next to rank 0 train a trial on these ranks. Collective.

    `order` is called on rank 0 alone, and says what to drive.

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
    """The run's folder on this machine. Collective. The driver has prepared that of rank 0's."""
    if ranks.cross_rank != 0 and ranks.get_local_rank() == 0:
        prepare_run_dir(request.trial)
    ranks.allgather(None)  # the ranks of a machine wait for the first one
    return run_dir_of(request.trial)


def fit_begun(
    checkpoint_period: TrainUnit | None,
    validation_period: TrainUnit | None,
    max_length: TrainUnit | None,
    reporting_period: TrainUnit,
    checkpoint_policy: CheckpointPolicy | None,
    step_zero_validation: bool,
    keep: Sequence[str] = (),
) -> FitBegun:
    """`fit`'s arguments, for its driver. Raises ConfigError if an argument is invalid."""
    check_keep(keep)
    length = _optional("max_length", max_length, None)
    if length is not None and not isinstance(length.value, int):
        raise ConfigError(f"fit: max_length is one number of batches or epochs, got {max_length!r}")
    if checkpoint_policy is not None and checkpoint_policy not in get_args(CheckpointPolicy):
        raise ConfigError(
            f'fit: checkpoint_policy is "best", "all" or "none", got {checkpoint_policy!r}'
        )
    return FitBegun(
        max_length=length,
        reporting_period=_plain("reporting_period", reporting_period, max_length),
        validation_period=_optional("validation_period", validation_period, max_length),
        checkpoint_period=_optional("checkpoint_period", checkpoint_period, max_length),
        checkpoint_policy=checkpoint_policy,
        step_zero_validation=step_zero_validation,
        keep=[*keep],
    )


def _optional(name: str, unit: TrainUnit | None, max_length: TrainUnit | None) -> Length | None:
    return None if unit is None else _plain(name, unit, max_length)


def _plain(name: str, unit: TrainUnit, max_length: TrainUnit | None) -> Length:
    if not isinstance(unit, (Batch, Epoch)):
        hint = f"; did you mean Batch({unit})?" if isinstance(unit, int) else ""
        raise ConfigError(f"fit: {name} is a Batch or an Epoch, got {unit!r}{hint}")
    value = unit.value
    if not isinstance(value, int):
        if isinstance(value, Iterable):
            try:
                value = sorted(map(operator.index, value))
            except TypeError:
                raise ConfigError(
                    f"fit: {name} is a number of batches or epochs, or a container of such "
                    f"numbers, got {value!r}"
                ) from None
        elif type(max_length) is type(unit) and isinstance(max_length.value, int):
            value = [number for number in range(1, max_length.value + 1) if number in value]
        else:
            raise ConfigError(
                f"fit: {name} is a container that cannot be listed, {value!r}: give a list or a "
                "range of numbers"
            )
    return Length(unit="batches" if isinstance(unit, Batch) else "epochs", value=value)
