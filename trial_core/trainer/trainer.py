"""`Trainer`: trains a trial in a script of the user's own. Follows Determined's class."""

from __future__ import annotations

import logging
import uuid as uuids
import warnings
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, get_args

from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.config.script import named_metric, script_config
from trial_core.context import RunInfo
from trial_core.controller.collective_errors import on_every_rank, on_the_first_rank
from trial_core.controller.controller import Controller
from trial_core.controller.entrypoint import engine_of
from trial_core.deepspeed.context import DeepSpeedTrialContext
from trial_core.deepspeed.trial import DeepSpeedTrial
from trial_core.distributed import DistributedContext
from trial_core.errors import ConfigError, StorageError, TrialError
from trial_core.retention.claims import Running, running
from trial_core.run.run_dirs import clear_kept, home_folder, locked_run_dir, prepare_run_dir
from trial_core.run.run_files import rank_folder
from trial_core.run.sequencer import CheckpointPolicy, Schedule
from trial_core.slots.stop_barrier import StopBarrier
from trial_core.trainer.fit_loop import FitResult, follow_schedule
from trial_core.trainer.fit_stages import FitStages
from trial_core.trainer.termination import Termination
from trial_core.units import Batch, Epoch, TrainUnit

logger = logging.getLogger(__name__)

LATEST = "latest"
NOTHING_IS_BEST = (
    'checkpoint_policy "best" needs a metric to go by, and exp_conf names none: every validation '
    'is saved; give init exp_conf={"searcher": {"metric": ...}}, or fit checkpoint_policy="all" '
    'or "none"'
)


class Trainer:
    """Trains, validates and saves a trial, within `trial_core.deepspeed.init`.

    Args:
        trial: constructed with `context`, on every rank.
        context: what `init` gave.

    Raises:
        TrialError: one of them is something else.
    """

    def __init__(self, trial: DeepSpeedTrial, context: DeepSpeedTrialContext) -> None:
        if not isinstance(trial, DeepSpeedTrial):
            raise TrialError(
                f"Trainer takes a trial that is constructed, a DeepSpeedTrial; got {_kind(trial)}"
            )
        if not isinstance(context, DeepSpeedTrialContext):
            raise TrialError(
                "Trainer takes the context that trial_core.deepspeed.init gives as its second "
                f"argument; got {_kind(context)}"
            )
        self._trial = trial
        self._context = context
        self._has_fitted = False

    def configure_profiler(self, *_: Any, **__: Any) -> None:
        """Does nothing: Determined's own profiler is not here. Deprecated in the reference, too."""
        warnings.warn(
            "Trainer.configure_profiler has no effect: Determined's profiler ended with its "
            "server; call context.set_profiler(...), which takes the arguments of "
            "torch.profiler.profile",
            DeprecationWarning,
            stacklevel=2,
        )

    def fit(
        self,
        checkpoint_period: TrainUnit | None = None,
        validation_period: TrainUnit | None = None,
        max_length: TrainUnit | None = None,
        reporting_period: TrainUnit = Batch(100),  # noqa: B008 - never changed
        checkpoint_policy: CheckpointPolicy = "best",
        latest_checkpoint: str | None = None,
        step_zero_validation: bool = False,
        test_mode: bool = False,
    ) -> FitResult:
        """Train the trial. Collective: every rank calls this, with the same arguments; once.

        Whatever the periods, the end is validated and saved. Checkpoints go where ``exp_conf`` of
        `init` says (``checkpoint_storage``), else below ``./trialflow-runs``.

        Args:
            checkpoint_period: when to save: every ``Batch(n)`` or ``Epoch(n)``, or after those of
                a container, as ``Batch([5, 30, 45])``.
            validation_period: when to validate, likewise.
            max_length: where training ends; needed, except in test mode.
            reporting_period: when to report training metrics.
            checkpoint_policy: which validations lead to a checkpoint besides: the ``best`` so far,
                ``all``, or ``none``. The best is that by ``searcher.metric`` of ``exp_conf``;
                where that names none, every validation is saved, with a warning.
            latest_checkpoint: a checkpoint to go on from: its uuid, or how that begins. The trial
                that saved it is continued, bit for bit. ``"latest"`` is the newest undamaged one
                of this experiment's newest trial, or a new trial where there is none yet. By
                default a new trial begins, with the weights of ``searcher.source_checkpoint_uuid``
                if ``exp_conf`` names one.
            step_zero_validation: validate once before the first batch.
            test_mode: train one batch and validate one, try out saving, and keep nothing.

        SIGTERM to any rank, or the trial's own ``set_stop_requested``, ends it after the batch
        under way, saved, with ``stopped_early`` in what it returns.

        Raises:
            ConfigError: an argument cannot be used.
            TrialError: the trial breaks a rule, or does not report ``searcher.metric``.
            CheckpointNotFound: there is no `latest_checkpoint`.
            CheckpointDamaged: it, or all that ``"latest"`` may be, cannot be restored; names the
                file.
            CheckpointError: a checkpoint could not be stored.
            Superseded: another run has taken the trial over since, on another machine.
            TrialflowError: another run trains the trial, on this machine.
        """
        if self._has_fitted:
            raise TrialError(
                "fit was called twice; to train on, construct the trial anew and give fit "
                "latest_checkpoint=result.checkpoint_uuid"
            )
        schedule = _schedule(
            checkpoint_period, validation_period, max_length, reporting_period,
            checkpoint_policy, step_zero_validation, test_mode,
        )  # fmt: skip
        experiment = self._context.get_experiment_config()
        config = script_config(experiment, None, type(self._trial), schedule.max_length)
        metric = named_metric(experiment)
        schedule = replace(schedule, smaller_is_better=config.searcher.smaller_is_better)
        if metric is None and schedule.checkpoint_policy == "best":
            schedule = replace(schedule, checkpoint_policy="all")
            if not test_mode and self._context.distributed.get_rank() == 0:
                logger.warning(NOTHING_IS_BEST)
        store = self._open_store(config, test_mode)
        starts = on_the_first_rank(
            self._context.distributed, lambda: _starts(store, config, latest_checkpoint)
        )
        self._has_fitted = True
        with ExitStack() as held:
            fit = self._take_over(held, store, starts[0], config, metric, test_mode)
            if latest_checkpoint == LATEST and not test_mode:
                # Once more: until it was taken over, another attempt may have saved.
                starts = on_the_first_rank(
                    self._context.distributed, lambda: _continuing(store, fit.trial) or starts
                )
            result = follow_schedule(fit, schedule, starts)
            if not result.stopped_early:
                clear_kept(home_folder() / fit.trial, self._context.distributed.get_rank())
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
                f"{distributed.get_size()} ranks; give a folder that all see, or an object storage"
            )
        if not test_mode:
            on_the_first_rank(distributed, store.check_writable)
        return store

    def _take_over(
        self,
        held: ExitStack,
        store: CheckpointStore,
        start: ResumePoint,
        config: ExperimentConfig,
        metric: str | None,
        test_mode: bool,
    ) -> FitStages:
        """Put the trial behind a controller, in the run's folder; rank 0 holds that in `held`."""
        distributed, info = self._context.distributed, self._context.run_info
        if start.checkpoint is not None and start.restore == "everything":
            info.trial = start.checkpoint.trial
        else:
            info.trial = distributed.broadcast(info.trial)
        source = None if start.restore == "everything" else start.uuid
        on_the_first_rank(distributed, lambda: str(held.enter_context(locked_run_dir(info.trial))))
        taken: list[tuple[Running, Fence]] = []
        if not test_mode:
            on_the_first_rank(
                distributed, lambda: taken.append(_claim(held, store, info.trial, source))
            )
        claim, fence = next(iter(taken), (None, None))
        on_every_rank(distributed, lambda: _settle_in(info, distributed))
        stop_barrier = StopBarrier()
        termination = held.enter_context(Termination(distributed, stop_barrier))
        controller = Controller(
            emit=lambda _: None,
            distributed=distributed,
            stop_barrier=stop_barrier,
            ask_to_stop=termination.ask,
        )
        engine = engine_of(self._trial, self._context, config.reproducibility.experiment_seed)
        built = controller.attach(engine, info, home_folder() / info.trial, store)
        return FitStages(
            controller, built, info, distributed, store, config, metric, test_mode,
            lambda: termination.is_asked, fence, claim,
        )  # fmt: skip


def _claim(
    held: ExitStack, store: CheckpointStore, trial: str, source: str | None
) -> tuple[Running, Fence]:
    """Keep others from deleting what the trial needs, for as long as `held`; and earlier attempts
    at it from committing, should one live on somewhere.

    What a dead attempt at it has stored and never committed is gone.
    """
    claim = held.enter_context(running(store, trial, source))
    fence = store.take_over(trial, uuids.uuid4().hex)
    try:
        for swept in store.sweep(trial, fence):
            logger.info("deleted what a dead attempt has left: %s", swept)
    except StorageError as error:
        logger.warning("what dead attempts have left is not deleted: %s", error)
    return claim, fence


def _settle_in(info: RunInfo, distributed: DistributedContext) -> None:
    """Prepare the run's folder on this rank's machine, and keep this rank's own files there.

    Until the trial's id was known for good, the rank has written for TensorBoard elsewhere.
    """
    if distributed.get_local_rank() == 0:
        prepare_run_dir(info.trial)
    folder = home_folder() / info.trial / rank_folder(distributed.get_rank())
    info.instruments.move_to(folder)


def _starts(
    store: CheckpointStore, config: ExperimentConfig, latest: str | None
) -> list[ResumePoint]:
    """What a run may start from, best first."""
    if latest == LATEST:
        trial = store.newest_trial(config.name)
        if trial is not None:
            return _continuing(store, trial)
    elif latest is not None:
        return [ResumePoint.continuing(store.open(latest))]
    source = config.searcher.source_checkpoint_uuid
    if source is not None:
        return [ResumePoint.warm(store.open(source), config.searcher.source_weights_only)]
    return [ResumePoint()]


def _continuing(store: CheckpointStore, trial: str) -> list[ResumePoint]:
    """What a trial may go on from, best first."""
    return [ResumePoint.continuing(manifest) for manifest in store.candidates(trial)]


def _schedule(
    checkpoint_period: TrainUnit | None,
    validation_period: TrainUnit | None,
    max_length: TrainUnit | None,
    reporting_period: TrainUnit,
    checkpoint_policy: CheckpointPolicy,
    step_zero_validation: bool,
    test_mode: bool,
) -> Schedule:
    """The schedule that `fit`'s arguments ask for.

    Raises:
        ConfigError: one of them is something else than it must be.
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
