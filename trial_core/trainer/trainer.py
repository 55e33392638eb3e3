"""`Trainer`: trains a trial in a user's own script. Follows Determined's class."""

from __future__ import annotations

import logging
import uuid as uuids
from contextlib import ExitStack
from dataclasses import replace
from typing import get_args

import msgspec

from trial_core.checkpoint.code_objects import RunCode
from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.config.script import has_code_folder, named_metric, script_config
from trial_core.context import RunInfo
from trial_core.controller.collective_errors import run_on_all_ranks, run_on_rank_0
from trial_core.controller.controller import Controller
from trial_core.distributed import DistributedContext
from trial_core.entrypoint import Context, Trial, build_engine, engine_of
from trial_core.errors import ConfigError, StorageError, TrialError
from trial_core.ledger.run_clock import RunClock
from trial_core.ledger.stored_ledger import KeptLedger
from trial_core.messages import BatchesTrained, BatchesValidated, TrialBuilt
from trial_core.pytorch.trial import PyTorchTrial
from trial_core.retention.claims import RunClaim
from trial_core.retention.trial_owner import own_trial
from trial_core.run.choose_resume_point import resume_points
from trial_core.run.run_dirs import clear_kept, locked_run_dir, prepare_run_dir, run_dir_of
from trial_core.run.run_loop import TrialResult, follow_schedule
from trial_core.run.sequencer import CheckpointPolicy, Schedule
from trial_core.slots.stop_barrier import StopBarrier
from trial_core.trainer.background_upload import retry_storage, run_long_on_rank_0
from trial_core.trainer.checkpoint_source import copy_into, is_place, resume_manifest
from trial_core.trainer.fit_stages import FitStages
from trial_core.trainer.fit_stop import FitStop
from trial_core.transfer.run_files import rank_folder
from trial_core.transfer.trial_code import code_of_folder
from trial_core.units import Batch, Epoch, TrainUnit

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
        context: from `init`.

    Raises:
        TrialError: an argument has the wrong type.
    """

    def __init__(self, trial: Trial, context: Context) -> None:
        if not isinstance(trial, Trial):
            raise TrialError(
                "Trainer takes a constructed trial, a PyTorchTrial or DeepSpeedTrial; got "
                f"{_kind(trial)}"
            )
        if not isinstance(context, type(trial).trial_context_class):
            kind = "pytorch" if isinstance(trial, PyTorchTrial) else "deepspeed"
            raise TrialError(
                f"Trainer takes the context that trial_core.{kind}.init gives as its second "
                f"argument; got {_kind(context)}"
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
            enabled: whether to profile.
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
    ) -> TrialResult:
        """Train the trial. Collective: every rank calls this once, with the same arguments.

        The end is always validated and saved, whatever the periods. Checkpoints go to
        ``checkpoint_storage`` of `init`'s ``exp_conf``, by default below ``./trialflow-runs``.
        SIGTERM to any rank, or the trial's ``set_stop_requested``, ends training after the current
        batch; the run then saves and returns with ``stopped_early``.

        Args:
            checkpoint_period: when to save: every ``Batch(n)`` or ``Epoch(n)``, or after those of
                a container, as ``Batch([5, 30, 45])``.
            validation_period: when to validate, likewise.
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
                or a new trial if there is none. By default a new trial begins, with the weights of
                ``searcher.source_checkpoint_uuid`` if ``exp_conf`` names one.
            step_zero_validation: validate once before the first batch.
            test_mode: train one batch, validate one, and save without keeping the checkpoint.
            profiling_enabled: whether to profile the first batches; `configure_profiler` says
                which ones.
            take_over: whether to continue a trial that another run may be training, which ends that
                run. A script that a scheduler restarts on another machine needs it: nothing tells
                whether the first machine is dead.

        Raises:
            ConfigError: an argument is invalid.
            TrialError: the trial breaks a rule, or does not report ``searcher.metric``.
            CheckpointNotFound: there is no `latest_checkpoint`.
            CheckpointDamaged: no checkpoint to resume from is intact; names the damaged file.
            CheckpointError: a checkpoint could not be stored.
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
        experiment = self._context.get_experiment_config()
        metric = named_metric(experiment)
        schedule = _schedule(
            checkpoint_period, validation_period, max_length, reporting_period,
            _policy(checkpoint_policy, metric), step_zero_validation, test_mode,
        )  # fmt: skip
        if latest_checkpoint is not None and not isinstance(latest_checkpoint, str):
            raise ConfigError(
                f'fit: latest_checkpoint is a checkpoint\'s uuid, "{LATEST}", a folder or a URL, '
                f"as text, got {latest_checkpoint!r}"
            )
        config = script_config(experiment, None, type(self._trial), schedule.max_length)
        distributed = self._context.distributed
        schedule = replace(schedule, smaller_is_better=config.searcher.smaller_is_better)
        is_first_rank = distributed.get_rank() == 0
        if metric is None and checkpoint_policy == "best" and is_first_rank and not test_mode:
            logger.warning(NO_METRIC_FOR_BEST)
        store = self._open_store(config, test_mode)
        points = run_on_rank_0(
            distributed, lambda: _resume_points(store, config, latest_checkpoint)
        )
        self._was_fitted = True
        clock = RunClock()
        clock.has_slots(distributed.get_size())
        clock.switch("build")
        with ExitStack() as stack:
            trial, claim, fence = self._take_over(stack, store, points[0], test_mode, take_over)
            if fence is not None:
                price = config.cost.per_slot_hour
                stack.enter_context(KeptLedger(store, trial, fence.number, clock, price, logger))
            if latest_checkpoint == LATEST and not test_mode:
                # Again: another attempt may have saved until this one took over.
                points = run_on_rank_0(distributed, lambda: resume_points(store, config, trial))
            elif latest_checkpoint not in (None, LATEST):
                given, chosen = str(latest_checkpoint), points
                points = run_long_on_rank_0(
                    distributed, lambda: _stored_points(store, chosen, given, fence)
                )
            controller, termination, built = self._attach(stack, store, config, clock)
            stages = FitStages(
                controller,
                built,
                self._context.run_info,
                distributed,
                store,
                config,
                schedule,
                points,
                metric,
                test_mode,
                lambda: termination.is_requested,
                fence,
                claim,
                self._code(config, store, test_mode),
                clock,
            )
            clock.switch("idle")
            result = follow_schedule(stages)
            if not result.stopped_early:
                distributed.allgather(None)  # until now a rank may have moved files there
                if distributed.get_local_rank() == 0:
                    clear_kept(run_dir_of(trial))
            return result

    # ----------------------------------------------------------------------------- internals

    def _open_store(self, config: ExperimentConfig, test_mode: bool) -> CheckpointStore:
        distributed = self._context.distributed
        distributed.connect()
        storage = config.checkpoint_storage
        store = CheckpointStore(storage.url, storage.options)
        if store.is_process_local and distributed.get_size() > 1:
            raise ConfigError(
                f"checkpoint_storage: {store.url} is in the memory of one process, and there are "
                f"{distributed.get_size()} ranks; use a folder that all ranks see, or an object "
                "storage"
            )
        if not test_mode:
            run_on_rank_0(distributed, store.check_writable)
        return store

    def _code(
        self, config: ExperimentConfig, store: CheckpointStore, test_mode: bool
    ) -> RunCode | None:
        """The trial's code for its checkpoints; None on all ranks but the first."""
        if test_mode:
            return None
        packed: list[RunCode | None] = []
        run_on_rank_0(self._context.distributed, lambda: packed.append(self._pack(config, store)))
        return next(iter(packed), None)

    def _pack(self, config: ExperimentConfig, store: CheckpointStore) -> RunCode | None:
        if not has_code_folder(type(self._trial).__module__):
            logger.info(
                "checkpoints hold no code: %s is defined in a notebook or in an installed package",
                type(self._trial).__name__,
            )
            return None
        return code_of_folder(config.code, store, logger).archive

    def _take_over(
        self,
        stack: ExitStack,
        store: CheckpointStore,
        point: ResumePoint,
        test_mode: bool,
        take_over: bool,
    ) -> tuple[str, RunClaim | None, Fence | None]:
        """Take over the trial and its folder until `stack` closes: its id, claim and fence.

        Only rank 0 has a claim and a fence, and none in test mode.
        """
        distributed, info = self._context.distributed, self._context.run_info
        continues = point.checkpoint is not None and point.restore == "everything"
        if point.checkpoint is not None and continues:
            info.trial = point.checkpoint.trial
        else:
            info.trial = distributed.broadcast(info.trial)
        source = None if continues else point.uuid
        run_on_rank_0(distributed, lambda: str(stack.enter_context(locked_run_dir(info.trial))))
        taken: list[tuple[RunClaim, Fence]] = []
        if not test_mode:
            run_on_rank_0(
                distributed,
                lambda: taken.append(_claim(stack, store, info.trial, source, take_over)),
            )
        run_on_all_ranks(distributed, lambda: _use_run_dir(info, distributed))
        claim, fence = next(iter(taken), (None, None))
        return info.trial, claim, fence

    def _attach(
        self, stack: ExitStack, store: CheckpointStore, config: ExperimentConfig, clock: RunClock
    ) -> tuple[Controller, FitStop, TrialBuilt]:
        """A controller with the trial attached, which stops on `FitStop`'s request."""

        def note(progress: BatchesTrained | BatchesValidated) -> None:
            if isinstance(progress, BatchesTrained):
                clock.batches_trained(progress.batches)

        distributed, info = self._context.distributed, self._context.run_info
        stop_barrier = StopBarrier()
        termination = stack.enter_context(FitStop(distributed, stop_barrier))
        controller = Controller(
            build_engine,
            emit=note,
            distributed=distributed,
            stop_barrier=stop_barrier,
            on_stop_requested=termination.request,
        )
        engine = engine_of(self._trial, self._context, config.reproducibility.experiment_seed)
        built = controller.attach(engine, info, run_dir_of(info.trial), store)
        # Of any rank: a hook's stage is collective, and callbacks may differ.
        hooks = set().union(*distributed.allgather(built.hooks))
        built = msgspec.structs.replace(built, hooks=sorted(hooks))
        stack.callback(controller.shut_down_callbacks)  # a fit that fails has not called the hook
        return controller, termination, built


def _claim(
    stack: ExitStack, store: CheckpointStore, trial: str, source: str | None, take_over: bool
) -> tuple[RunClaim, Fence]:
    """Claim the trial's checkpoints until `stack` closes, and fence off earlier attempts.

    Deletes what dead attempts at the trial have stored and never committed.
    """
    owned = own_trial(store, trial, uuids.uuid4().hex, take_over=take_over, source=source)
    claim, fence = stack.enter_context(owned)
    try:
        for swept in store.sweep(trial, fence):
            logger.info("deleted leftovers of a dead attempt: %s", swept)
    except StorageError as error:
        logger.warning("leftovers of dead attempts are not deleted: %s", error)
    return claim, fence


def _use_run_dir(info: RunInfo, distributed: DistributedContext) -> None:
    """Prepare the run's folder on this machine, and move this rank's files for TensorBoard there.

    The rank wrote them elsewhere before it knew the trial's final id.
    """
    if distributed.get_local_rank() == 0:
        prepare_run_dir(info.trial)
    folder = run_dir_of(info.trial) / rank_folder(distributed.get_rank())
    info.instruments.move_to(folder)


def _resume_points(
    store: CheckpointStore, config: ExperimentConfig, latest_checkpoint: str | None
) -> list[ResumePoint]:
    """What a run may resume from, best first; at least one."""
    if latest_checkpoint is not None and latest_checkpoint != LATEST:
        of_place = is_place(latest_checkpoint)
        found = (resume_manifest if of_place else CheckpointStore.open)(store, latest_checkpoint)
        return [ResumePoint.continuing(found)]
    trial = store.newest_trial(config.name) if latest_checkpoint == LATEST else None
    return resume_points(store, config, trial)


def _stored_points(
    store: CheckpointStore, points: list[ResumePoint], given: str, fence: Fence | None
) -> list[ResumePoint]:
    """`points`, in the run's own storage: a checkpoint in another place is copied there.

    Rank 0 alone calls this: other machines may have no folder of that name.
    """
    if not is_place(given):
        return points
    return [ResumePoint.continuing(retry_storage(lambda: copy_into(store, given, fence)))]


def _policy(given: CheckpointPolicy | None, metric: str | None) -> CheckpointPolicy:
    """The checkpoint policy of a fit; any validation might be the best if no metric decides."""
    if given in (None, "best"):
        return "all" if metric is None else "best"
    return given


def _schedule(
    checkpoint_period: TrainUnit | None,
    validation_period: TrainUnit | None,
    max_length: TrainUnit | None,
    reporting_period: TrainUnit,
    checkpoint_policy: CheckpointPolicy,
    step_zero_validation: bool,
    test_mode: bool,
) -> Schedule:
    """The schedule of `fit`'s arguments.

    Raises:
        ConfigError: an argument is invalid.
    """
    if max_length is None and test_mode:
        max_length = Batch(1)
    if max_length is None:
        raise ConfigError("fit needs max_length: Batch(1000) or Epoch(3), for example")
    _check_unit("max_length", max_length)
    if not isinstance(max_length.value, int):
        raise ConfigError(f"fit: max_length is one number of batches or epochs, got {max_length!r}")
    _check_unit("reporting_period", reporting_period)
    if validation_period is not None:
        _check_unit("validation_period", validation_period)
    if checkpoint_period is not None:
        _check_unit("checkpoint_period", checkpoint_period)
    if checkpoint_policy not in get_args(CheckpointPolicy):
        raise ConfigError(
            f'fit: checkpoint_policy is "best", "all" or "none", got {checkpoint_policy!r}'
        )
    return Schedule(
        max_length=max_length,
        reporting_period=reporting_period,
        validation_period=validation_period,
        checkpoint_period=checkpoint_period,
        checkpoint_policy=checkpoint_policy,
        step_zero_validation=step_zero_validation,
    )


def _check_unit(name: str, value: object) -> None:
    if not isinstance(value, (Batch, Epoch)):
        hint = f"; did you mean Batch({value})?" if isinstance(value, int) else ""
        raise ConfigError(f"fit: {name} is a Batch or an Epoch, got {value!r}{hint}")


def _kind(thing: object) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else type(thing).__name__
