"""The controller: carries out a rank's workloads, for every kind of trial.

It owns the trial's adapter, loaders, callbacks and progress. At a driver's request it builds the
trial, or attaches the one of a script's `Trainer`. The sequencer, not the controller, decides on
the next step.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
from msgspec.structs import replace

from trial_core import messages
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.run_files import rank_folder
from trial_core.errors import SlotsError
from trial_core.processes.machine.run_dirs import rank_run_dir
from trial_core.processes.slots.stop_barrier import StopBarrier
from trial_core.rank.checkpoint_files import CheckpointFiles, tensorboard_in
from trial_core.rank.collectives.accelerator import accelerator_name, peak_memory_bytes
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.data.loaders import Loaders, build_loaders
from trial_core.rank.forward_time import ForwardClock
from trial_core.rank.rank_checkpoint import Snapshots
from trial_core.rank.rank_state import RankRemap, capture_rng, restore_rng
from trial_core.rank.state_files.built_settings import BuiltSettings
from trial_core.rank.state_files.late_copies import finish_copies
from trial_core.rank.training import BatchReporter, TrainingLoop
from trial_core.rank.trial.callback import HOOKS, may_change_metrics, overridden_hooks
from trial_core.rank.trial.context import RunInfo
from trial_core.rank.trial.metric_values import as_reported
from trial_core.rank.trial.trial_adapter import TrialAdapter
from trial_core.rank.validation import evaluating, metric_names, validate
from trial_core.rank.weight_watch import WeightWatch
from trial_core.schedule.work import Work

T = TypeVar("T")

Progressed = messages.BatchesTrained | messages.BatchesValidated
AdapterBuilder = Callable[[RunInfo, DistributedContext], TrialAdapter]
"""Constructs the trial that an experiment names. Collective: every rank calls it."""

logger = logging.getLogger(__name__)

VERSIONED = ("trialflow", "torch", "deepspeed", "numpy")

PROFILED_BATCHES = 5
"""How many batches are profiled, if the experiment does not name the last one."""


@dataclass(frozen=True)
class _AttachedTrial:
    adapter: TrialAdapter
    info: RunInfo
    files: CheckpointFiles
    snapshots: Snapshots
    forward_clock: ForwardClock

    def close(self) -> None:
        self.files.close()
        self.snapshots.close()


class Controller:
    """Carries out workloads on this rank.

    Args:
        emit: gets progress messages during workloads, on rank 0.
        on_stop_requested: called when the trial requests a stop during a train-workload; must have
            the driver pause all ranks (see `stop_barrier`).
        info, run_dir_of_script: the state, and the folder on this machine, of a script's trial,
            which exists already and is attached, not built.
    """

    def __init__(
        self,
        build_adapter: AdapterBuilder,
        emit: Callable[[Progressed], None],
        distributed: DistributedContext | None = None,
        stop_barrier: StopBarrier | None = None,
        on_stop_requested: Callable[[], None] = lambda: None,
        info: RunInfo | None = None,
        run_dir_of_script: Callable[[Any], Path] = lambda request: rank_run_dir(request.run_dir),
    ) -> None:
        self._build_adapter = build_adapter
        self._emit = emit
        self._on_stop_requested = on_stop_requested
        self._scripts_info = info
        self._run_dir_of_script = run_dir_of_script
        self.fit_result: dict[str, Any] | None = None  # of `Trainer.fit`, once it has ended
        self._has_requested_stop = False
        self._owes_shutdown_hook = False
        self._stop_barrier = stop_barrier or StopBarrier()
        self._distributed = distributed or DistributedContext.from_environment()
        self._attached: _AttachedTrial | None = None
        self._loaders: Loaders | None = None
        self._rng: dict[str, Any] | None = None
        self._training: TrainingLoop | None = None
        # Arguments that only this rank knows, for the hooks that follow a workload.
        self._hook_arguments: dict[str, dict[str, Any]] = {}
        self._handlers: dict[type, Callable[[Any], messages.AnyResult]] = {
            messages.BuildTrial: self.build_trial,
            messages.AttachTrial: self.attach_trial,
            messages.FetchCheckpoint: self.fetch_checkpoint,
            messages.BuildLoadersAndRestore: self.build_loaders_and_restore,
            messages.TrainBatches: self.train,
            messages.NameMetrics: self.name_metrics,
            messages.RunValidation: self.validate,
            messages.SaveCheckpoint: self.save_checkpoint,
            messages.PersistCheckpoint: self.persist_checkpoint,
            messages.ReleaseStaging: self.release_staging,
            messages.RunHook: self.run_hook,
            messages.FinishRunFiles: self.finish_run_files,
            messages.EndFit: self.end_fit,
        }

    def carry_out(self, request: messages.AnyRequest) -> messages.AnyResult:
        """Carry out one request. The caller runs it in the lane that the request names."""
        return self._handlers[type(request)](request)

    @property
    def batches_trained(self) -> int | None:
        """The number of batches trained, or None before the trial is built."""
        return None if self._attached is None else self._attached.info.batches_trained

    def close(self) -> None:
        """Release the trial's loaders, TensorBoard files and snapshots, after the callbacks'
        `on_trial_shutdown` if a run has failed before it."""
        with ExitStack() as stack:
            if self._attached is not None:
                stack.callback(self._attached.close)
                stack.callback(self._attached.info.tensorboard.finish)
            self.shut_down_callbacks()
            self._loaders = self._training = None  # loader workers end with their iterators

    def shut_down_callbacks(self) -> None:
        """Call `on_trial_shutdown` of every callback, if it is due, even if another one raises."""
        if self._attached is None or not self._owes_shutdown_hook:
            return
        self._owes_shutdown_hook = False
        with ExitStack() as stack:
            for callback in reversed(list(self._attached.adapter.callbacks.values())):
                stack.callback(callback.on_trial_shutdown)

    def _free_trial(self) -> None:
        """Free an earlier trial's memory, before the next one is built."""
        self.close()
        if self._attached is not None:
            self._attached.adapter.destroy()
            self._attached = self._rng = None
            if _has_compiled():
                # In one process, torch compiles a function a few times, and then no more.
                torch.compiler.reset()
            gc.collect()  # modules, hooks and engines refer to each other

    # ------------------------------------------------------------------------ the workloads

    def build_trial(self, request: messages.BuildTrial) -> messages.TrialBuilt:
        """Construct the user's trial, in place of an earlier one. Collective."""
        self._stop_barrier.reset()
        self._free_trial()
        run_dir = rank_run_dir(request.run_dir)
        tensorboard = tensorboard_in(run_dir, self._distributed.get_rank())
        info = RunInfo(
            request.trial, request.experiment, tensorboard=tensorboard,
            micro_batch_samples=request.micro_batch_samples,
        )  # fmt: skip
        adapter = self._build_adapter(info, self._distributed)
        return self.attach(adapter, info, run_dir, CheckpointStore.from_spec(request.storage))

    def attach_trial(self, request: messages.AttachTrial) -> messages.TrialBuilt:
        """Take over the trial that a script has constructed. Collective."""
        info = self._scripts_info
        if info is None:
            raise SlotsError("this rank runs no script's trial")
        self._stop_barrier.reset()
        run_dir = self._run_dir_of_script(request)
        info.trial = request.trial
        info.tensorboard.move_to(run_dir / rank_folder(self._distributed.get_rank()))
        adapter = self._build_adapter(info, self._distributed)
        return self.attach(adapter, info, run_dir, CheckpointStore.from_spec(request.storage))

    def attach(
        self, adapter: TrialAdapter, info: RunInfo, run_dir: Path, store: CheckpointStore
    ) -> messages.TrialBuilt:
        """Take over a constructed trial, in place of an earlier one.

        Its context answers from `info`, which is kept up to date. `run_dir` is the folder on this
        machine for staged and fetched checkpoints.
        """
        if self._attached is not None:
            self._attached.close()
        info.batch_samples = adapter.batch_samples
        settings = info.checkpointing
        files = CheckpointFiles(run_dir, store, self._distributed, info)
        self._attached = _AttachedTrial(
            adapter,
            info,
            files,
            Snapshots(adapter, files, self._distributed, settings),
            ForwardClock(adapter.whole_models if self._distributed.get_size() > 1 else ()),
        )
        profiling = info.profiling
        if profiling.enabled:
            first, last = profiling.begin_on_batch, profiling.end_after_batch
            last = first + PROFILED_BATCHES - 1 if last is None else last
            info.tensorboard.profile_batches(first, last, lambda: info.batches_trained)
        self._loaders = self._training = self._rng = None
        self._has_requested_stop = self._owes_shutdown_hook = False
        self._hook_arguments = {}
        hooks = overridden_hooks(adapter.callbacks)
        if "on_trial_shutdown" in hooks:
            hooks |= {"on_trial_startup"}  # from then on, this rank owes the other one
        return messages.TrialBuilt(
            hooks=sorted(hooks),
            topology=adapter.topology(),
            batch_samples=adapter.batch_samples,
            versions=library_versions(),
        )

    def fetch_checkpoint(self, request: messages.FetchCheckpoint) -> messages.Fetched:
        """Fetch a checkpoint's files to this machine. I/O lane."""
        trial, files = self._trial, request.files
        if request.saved_by is not None:
            ranks_here = self._distributed.local_ranks
            files = trial.adapter.files_read(files, request.saved_by, request.restore, ranks_here)
        return trial.files.try_fetch(request.uuid, files)

    def build_loaders_and_restore(
        self, request: messages.BuildLoadersAndRestore
    ) -> messages.ReadyToTrain:
        """Build the loaders, and restore from a fetched checkpoint. Collective."""
        adapter, info, snapshots = self._trial.adapter, self._trial.info, self._trial.snapshots
        continues = request.checkpoint is not None and request.restore == "everything"
        info.batches_trained = info.initial_batch = request.batches_trained
        seed = info.experiment_seed
        remap = RankRemap.of(request.saved_by, adapter, seed, request.batches_trained)
        if remap is not None and self._distributed.get_rank() == 0:
            logger.info("%s", remap)
        began = time.monotonic()
        state = snapshots.read_state(request.checkpoint, request.restore, remap)
        restore_seconds = time.monotonic() - began
        loaders = build_loaders(adapter, self._distributed, seed, info.compares_data)
        hooks = overridden_hooks(adapter.callbacks)
        wants_batch_metrics = any(  # of any rank: all ranks must exchange the same
            self._distributed.allgather("on_training_workload_end" in hooks)
        )
        loaders.validation.limit = request.validation_limit
        resized = ""
        if request.checkpoint is not None and continues:
            samples = snapshots.batch_samples(request.checkpoint)
            position = (state or {}).get("training_data")
            has_other_ranks = remap is not None and not remap.keeps_data_shards
            of_trial = request.saved_by.batch_samples if request.saved_by else 0
            resized = loaders.count_on(
                request.epoch, request.batches_trained, samples, position, has_other_ranks, of_trial
            )
        info.epoch = loaders.epoch
        told, warnings = messages.RestoredSettings(), [*loaders.warnings]
        settings_here = BuiltSettings(adapter.setting_parts())
        is_common = len(set(self._distributed.allgather(settings_here.to_json()))) == 1
        snapshots.built = settings_here if is_common else None  # a pipeline's stages may differ
        snapshots.data_settings, snapshots.sample_lists = loaders.settings(), loaders.sample_lists
        if request.checkpoint is not None:
            began = time.monotonic()
            told = snapshots.restore(
                request.checkpoint, state, remap, request.keep, continues, request.compares
            )
            told = replace(told, new=[*told.new, resized] if resized else told.new)
            restore_seconds += time.monotonic() - began
            if continues:
                warnings += snapshots.data_warnings(request.checkpoint, request.compares, remap)
        # After restore: the trial's on_checkpoint_load_start may change any part of the state.
        own = (state if continues else None) or {}
        loaders.begin(own.get("training_data"))
        self._loaders, self._rng = loaders, own.get("rng")
        self._training = TrainingLoop(
            adapter,
            info,
            loaders.training,
            self._distributed,
            wants_batch_metrics,
            self._stop_barrier,
            progress=self._reporter(messages.BatchesTrained),
            on_first_batch=snapshots.rehearse,
            on_stop_requested=self._request_stop,
        )
        if info.tensorboard_logging:
            info.tensorboard.log_metrics_by_default()  # also for a validation before training
        return messages.ReadyToTrain(
            epoch=loaders.epoch,
            restore_seconds=restore_seconds,
            loads_micro_batches=loaders.loads_micro_batches,
            settings=told,
            warnings=warnings,
        )

    def train(self, request: messages.TrainBatches) -> messages.Trained:
        """Train up to a batch. Collective."""
        adapter, info, loaders = self._trial.adapter, self._trial.info, self._built_loaders
        self._restore_rng()
        info.tensorboard.start()
        self._trial.forward_clock.begin_workload()
        began, waited = time.monotonic(), loaders.waited_seconds
        steps, samples = adapter.scaled_steps(), info.samples_trained
        copied = self._trial.snapshots.waited_seconds
        loop = _require(self._training, messages.BuildLoadersAndRestore)
        may_change = adapter.steps_each_batch and 0.0 not in adapter.learning_rates()
        watch = WeightWatch(adapter.modules) if request.watches_weights else None
        with watch or nullcontext():
            outcome = loop.train(request.until)
        scaled, skipped = (
            now - then for now, then in zip(adapter.scaled_steps(), steps, strict=True)
        )
        metrics = as_reported(outcome.avg_metrics, "train_batch")
        info.tensorboard.report("training", info.batches_trained, metrics)
        self._hook_arguments["on_training_workload_end"] = {
            "avg_metrics": outcome.avg_metrics,
            "batch_metrics": outcome.batch_metrics,
        }
        return messages.Trained(
            batches_trained=info.batches_trained,
            metrics=metrics,
            seconds=time.monotonic() - began,
            # Even if the trial has withdrawn its request: the other ranks have been told.
            stop_requested=info.stop_requested or self._has_requested_stop,
            stop_reason=info.stop_reason,
            data_seconds=loaders.waited_seconds - waited,
            forward_seconds=self._trial.forward_clock.seconds(),
            copy_seconds=self._trial.snapshots.waited_seconds - copied,
            learning_rates=adapter.learning_rates(),
            non_finite=outcome.non_finite,
            scaled_steps=scaled,
            skipped_steps=skipped,
            samples=info.samples_trained - samples,
            work=self._sample_work(),
            device=accelerator_name(),
            peak_memory_bytes=peak_memory_bytes(),
            weights=watch.seen(may_change and not skipped) if watch else None,
        )

    def name_metrics(self, request: messages.NameMetrics) -> messages.MetricsNamed:
        """Find the names of the validation metrics. Collective."""
        adapter, loaders = self._trial.adapter, self._built_loaders
        return messages.MetricsNamed(
            names=metric_names(adapter, loaders, self._distributed),
            may_be_more=any(map(may_change_metrics, adapter.callbacks.values())),
        )

    def validate(self, request: messages.RunValidation) -> messages.Validated:
        """Validate. Collective."""
        adapter, info, loaders = self._trial.adapter, self._trial.info, self._built_loaders
        self._restore_rng()
        began, rng = time.monotonic(), capture_rng()
        progress = self._reporter(messages.BatchesValidated)
        metrics = validate(adapter, loaders, self._distributed, progress, self._stop_barrier)
        reported = as_reported(metrics or {}, "evaluate_batch")
        if metrics is None:
            restore_rng(rng)  # the resumed run repeats this validation
        else:
            self._hook_arguments["on_validation_end"] = {"metrics": metrics}
            if "on_validation_end" not in overridden_hooks(adapter.callbacks):
                info.tensorboard.report("validation", info.batches_trained, reported)
        return messages.Validated(
            metrics=reported,
            seconds=time.monotonic() - began,
            stop_requested=info.stop_requested,
            stop_reason=info.stop_reason,
            is_broken_off=metrics is None,
        )

    def save_checkpoint(self, request: messages.SaveCheckpoint) -> messages.Saved:
        """Stage a checkpoint. Collective."""
        began, info = time.monotonic(), self._trial.info
        position = self._built_loaders.state_dict()
        staging = self._trial.snapshots.stage(request.uuid, info.batches_trained, position)
        for hook in ("on_checkpoint_write_end", "on_checkpoint_end"):
            self._hook_arguments[hook] = {"checkpoint_dir": str(staging)}
        return messages.Saved(
            staging=str(staging),
            seconds=time.monotonic() - began,
            writes_run_files=info.tensorboard.has_files_to_upload,
            stop_requested=info.stop_requested,
            stop_reason=info.stop_reason,
        )

    def persist_checkpoint(self, request: messages.PersistCheckpoint) -> messages.Persisted:
        """Upload a staged checkpoint, and the files for TensorBoard. I/O lane."""
        return self._trial.files.try_persist(request.uuid, request.shared)

    def release_staging(self, request: messages.ReleaseStaging) -> messages.Done:
        """Delete a staged checkpoint and the files fetched before. I/O lane."""
        self._trial.files.release(request.uuid)
        self._trial.files.delete_fetched()
        return messages.Done()

    def run_hook(self, request: messages.RunHook) -> messages.HookDone:
        """Call one hook of every callback, in the order in which the trial names them."""
        finish_copies(request.hook)  # it may change weights, or read the staged files
        adapter, info = self._trial.adapter, self._trial.info
        if request.hook in ("on_trial_startup", "on_trial_shutdown"):
            self._owes_shutdown_hook = request.hook == "on_trial_startup"
        arguments = {**self._hook_arguments.get(request.hook, {}), **request.arguments}
        # By position, in Determined's order: callbacks may use other parameter names.
        positional = [arguments[name] for name in HOOKS[request.hook]]
        is_validating = request.hook == "on_validation_end"
        is_called = self._distributed.get_rank() == 0 or request.hook not in adapter.chief_hooks
        with evaluating(adapter) if is_validating else nullcontext():
            for callback in adapter.callbacks.values() if is_called else ():
                getattr(callback, request.hook)(*positional)
        metrics = None
        if is_validating and self._distributed.get_rank() == 0:
            metrics = as_reported(arguments["metrics"], "on_validation_end")
            if "on_validation_end" in overridden_hooks(adapter.callbacks):
                info.tensorboard.report("validation", info.batches_trained, metrics)
        return messages.HookDone(
            stop_requested=info.stop_requested, stop_reason=info.stop_reason, metrics=metrics
        )

    def finish_run_files(self, request: messages.FinishRunFiles) -> messages.RunFilesStored:
        """Stop the profiler, and upload the remaining files for TensorBoard."""
        return self._trial.files.finish_run_files()

    def end_fit(self, request: messages.EndFit) -> messages.Done:
        """Keep the result of `Trainer.fit`, which returns next."""
        self.fit_result = request.result
        return messages.Done()

    # ---------------------------------------------------------------------------- internals

    def _sample_work(self) -> Work:
        """The work in one sample, as the trial has set it, else as measured."""
        said = self._trial.info.sample_work
        if said.flops:
            return said
        return replace(said, flops=self._trial.adapter.measured_flops_per_sample())

    def _restore_rng(self) -> None:
        # As late as possible: random numbers that hooks draw must not change training's.
        if self._rng is not None:
            restore_rng(self._rng)
            self._rng = None

    def _request_stop(self) -> None:
        """The trial requests a stop on this rank: make the ranks agree on their last batch."""
        if self._has_requested_stop:
            return
        self._has_requested_stop = True
        self._stop_barrier.pause_self()  # first: this rank must not begin another batch meanwhile
        self._on_stop_requested()

    def _reporter(self, message: type[Progressed]) -> BatchReporter:
        def send(batches: int) -> None:
            if self._distributed.get_rank() == 0:
                self._emit(message(batches=batches))

        return BatchReporter(send)

    @property
    def _trial(self) -> _AttachedTrial:
        return _require(self._attached, messages.BuildTrial)

    @property
    def _built_loaders(self) -> Loaders:
        return _require(self._loaders, messages.BuildLoadersAndRestore)


def _require(value: T | None, request: type[messages.Request]) -> T:
    if value is None:
        raise SlotsError(f"this request must come after {request.stage}")
    return value


def library_versions() -> dict[str, str]:
    """The versions of the libraries that a rank uses, for manifests."""
    versions = dict.fromkeys(VERSIONED, "unknown")
    for name in versions:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _has_compiled() -> bool:
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["frames"]["total"] > 0
