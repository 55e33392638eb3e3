"""What runs in every slot: one controller for every kind of trial.

It owns the trial, its engines, loaders, callbacks and progress, and carries out requests one by
one: those of a driver, which has it build the trial, or those of a `Trainer` in a script of the
user's own, which hands it a trial that exists. It decides nothing about what comes next: that is
the sequencer's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.store import CheckpointStore
from trial_core.context import RunInfo
from trial_core.controller.data.loaders import Loaders, build_loaders
from trial_core.controller.entrypoint import build_engine
from trial_core.controller.evaluation import validate
from trial_core.controller.rank_state import capture_rng, restore_rng
from trial_core.controller.resharded_state import RankRemap
from trial_core.controller.run_file_upload import RunFileUpload, instruments_in
from trial_core.controller.snapshot import Snapshots
from trial_core.controller.training import Ticker, train_batches
from trial_core.controller.trial_engine import TrialEngine
from trial_core.distributed import DistributedContext
from trial_core.errors import CheckpointDamaged, CheckpointError, SlotsError, StorageError
from trial_core.messages import (
    AnyRequest,
    AnyResult,
    BatchesTrained,
    BatchesValidated,
    BuildLoaders,
    BuildTrial,
    Done,
    FetchCheckpoint,
    Fetched,
    FinishRunFiles,
    HookDone,
    LoadersBuilt,
    PersistCheckpoint,
    Persisted,
    ReleaseStaging,
    RunFilesStored,
    RunHook,
    RunValidation,
    SaveCheckpoint,
    Saved,
    TrainBatches,
    Trained,
    TrialBuilt,
    Validated,
)
from trial_core.pytorch.callback import HOOKS, overridden_hooks
from trial_core.slots.stop_barrier import StopBarrier

T = TypeVar("T")

logger = logging.getLogger(__name__)

VERSIONED = ("trialflow", "torch", "deepspeed", "numpy")


class Controller:
    """Carries out workloads on this rank.

    Args:
        emit: is told now and then, on rank 0, how far training has come.
        distributed: who this rank is; by default what the environment says.
        stop_barrier: asked before each batch whether it may begin.
        ask_to_stop: told when the trial asks to stop while it trains; has all ranks pause. None:
            there is nobody to tell, and the train-workload is finished.
    """

    def __init__(
        self,
        emit: Callable[[BatchesTrained | BatchesValidated], None],
        distributed: DistributedContext | None = None,
        stop_barrier: StopBarrier | None = None,
        ask_to_stop: Callable[[], None] | None = None,
    ) -> None:
        self._emit = emit
        self._ask_to_stop = ask_to_stop
        self._has_asked_to_stop = False
        self._stop_barrier = stop_barrier or StopBarrier()
        self._distributed = distributed or DistributedContext.from_environment()
        self._info: RunInfo | None = None
        self._engine: TrialEngine | None = None
        self._loaders: Loaders | None = None
        self._snapshots: Snapshots | None = None
        self._measured: RunFileUpload | None = None
        self._rng: dict[str, Any] | None = None
        # What only this rank knows about the workloads behind it, for the hooks that follow them.
        self._hook_arguments: dict[str, dict[str, Any]] = {}
        self._handlers: dict[type, Callable[[Any], AnyResult]] = {
            BuildTrial: self.build_trial,
            FetchCheckpoint: self.fetch_checkpoint,
            BuildLoaders: self.build_loaders,
            TrainBatches: self.train,
            RunValidation: self.validate,
            SaveCheckpoint: self.save_checkpoint,
            PersistCheckpoint: self.persist_checkpoint,
            ReleaseStaging: self.release_staging,
            RunHook: self.run_hook,
            FinishRunFiles: self.finish_run_files,
        }

    def carry_out(self, request: AnyRequest) -> AnyResult:
        """Carry out one request, in the lane that it names."""
        return self._handlers[type(request)](request)

    def close(self) -> None:
        """Let go of what outlives a workload: loader workers end with their iterators."""
        self._loaders = None
        if self._info is not None:
            self._info.instruments.finish()
        if self._snapshots is not None:
            self._snapshots.close()

    # ------------------------------------------------------------------------ the workloads

    def build_trial(self, request: BuildTrial) -> TrialBuilt:
        """Construct the user's trial, in place of any earlier one. Collective."""
        self._stop_barrier.reset()
        self._engine = self._loaders = self._rng = None  # frees the earlier one before the next
        if self._info is not None:
            self._info.instruments.finish()
        instruments = instruments_in(Path(request.run_dir), self._distributed.get_rank())
        info = RunInfo(request.trial, request.experiment, instruments=instruments)
        engine = build_engine(info, self._distributed)
        return self.attach(
            engine, info, Path(request.run_dir), CheckpointStore.from_spec(request.storage)
        )

    def attach(
        self, engine: TrialEngine, info: RunInfo, run_dir: Path, store: CheckpointStore
    ) -> TrialBuilt:
        """Take a trial that has been constructed, in place of any earlier one.

        Args:
            info: where the trial's context has its answers from; kept up to date from here on.
            run_dir: a folder on this machine for staged and fetched checkpoints.
        """
        self._engine, self._info, self._has_asked_to_stop = engine, info, False
        self._loaders = self._rng = None
        self._hook_arguments = {}
        if self._snapshots is not None:
            self._snapshots.close()
        settings = info.experiment.get("checkpointing") or {}
        self._snapshots = Snapshots(run_dir, store, self._distributed, settings)
        self._measured = RunFileUpload(info, store, run_dir)
        return TrialBuilt(
            hooks=sorted(overridden_hooks(engine.callbacks)),
            topology=engine.topology(),
            batch_samples=engine.batch_samples,
            versions={name: _version(name) for name in VERSIONED},
        )

    def fetch_checkpoint(self, request: FetchCheckpoint) -> Fetched:
        """Bring a checkpoint's files to this machine. I/O lane."""
        files = request.files
        if request.saved_by is not None:
            here = self._distributed.local_ranks
            files = self._the_engine.files_read(files, request.saved_by, request.restore, here)
        try:
            self._the_snapshots.fetch(request.uuid, files)
        except CheckpointDamaged as damage:
            # No failure of this rank: the driver may choose an older checkpoint.
            return Fetched(damage=str(damage))
        except StorageError as error:
            return Fetched(problem=str(error))
        return Fetched()

    def build_loaders(self, request: BuildLoaders) -> LoadersBuilt:
        """Build the loaders, and restore from a fetched checkpoint. Collective."""
        engine, info = self._the_engine, self._the_info
        info.batches_trained = request.batches_trained
        move = RankRemap.of(request.saved_by, engine, info.experiment_seed, request.batches_trained)
        if move is not None and self._distributed.get_rank() == 0:
            logger.info("%s", move)
        state = self._the_snapshots.read_state(request.checkpoint, request.restore, move)
        loaders = build_loaders(engine, self._distributed, info.experiment_seed)
        loaders.validation.limit = request.validation_limit
        info.epoch = loaders.epoch
        if request.checkpoint is not None:
            self._the_snapshots.restore(request.checkpoint, engine, state, move)
        # Not before: the trial's on_checkpoint_load_start may change any part of the state.
        own = (state if request.restore == "everything" else None) or {}
        # Checkpoints of earlier releases do not have training_data.
        loaders.begin(request.batches_trained, own.get("training_data"))
        self._loaders, self._rng = loaders, own.get("rng")
        return LoadersBuilt(epoch=loaders.epoch)

    def train(self, request: TrainBatches) -> Trained:
        """Train up to a batch. Collective."""
        self._restore_rng()
        info, loaders = self._the_info, self._the_loaders
        info.instruments.start()
        began, waited = time.monotonic(), loaders.waited_seconds
        outcome = train_batches(
            self._the_engine,
            info,
            loaders.training,
            request.until,
            self._distributed,
            self._ticker(BatchesTrained),
            self._stop_barrier,
            self._heed_the_trial,
        )
        info.instruments.report("training", info.batches_trained, outcome.avg_metrics)
        self._hook_arguments["on_training_workload_end"] = {
            "avg_metrics": outcome.avg_metrics,
            "batch_metrics": outcome.batch_metrics,
        }
        return Trained(
            batches_trained=info.batches_trained,
            metrics=outcome.avg_metrics,
            seconds=time.monotonic() - began,
            # Also where the trial has thought better of it: the others have been told.
            stop_requested=info.stop_requested or self._has_asked_to_stop,
            data_seconds=loaders.waited_seconds - waited,
        )

    def validate(self, request: RunValidation) -> Validated:
        """Validate. Collective."""
        self._restore_rng()
        began, rng = time.monotonic(), capture_rng()
        info, ticker = self._the_info, self._ticker(BatchesValidated)
        metrics = validate(
            self._the_engine, self._the_loaders, self._distributed, ticker, self._stop_barrier
        )
        if metrics is None:
            restore_rng(rng)  # it will be validated anew: as if this had not been
        else:
            info.instruments.report("validation", info.batches_trained, metrics)
            self._hook_arguments["on_validation_end"] = {"metrics": metrics}
        return Validated(
            metrics=metrics or {},
            seconds=time.monotonic() - began,
            stop_requested=info.stop_requested,
            is_broken_off=metrics is None,
        )

    def save_checkpoint(self, request: SaveCheckpoint) -> Saved:
        """Stage a checkpoint. Collective."""
        began = time.monotonic()
        info = self._the_info
        snapshots, data = self._the_snapshots, self._the_loaders.state_dict()
        staging = snapshots.stage(request.uuid, self._the_engine, info.batches_trained, data)
        for hook in ("on_checkpoint_write_end", "on_checkpoint_end"):
            self._hook_arguments[hook] = {"checkpoint_dir": str(staging)}
        return Saved(
            staging=str(staging),
            seconds=time.monotonic() - began,
            writes_run_files=info.instruments.has_files_to_upload,
            stop_requested=info.stop_requested,
        )

    def persist_checkpoint(self, request: PersistCheckpoint) -> Persisted:
        """Upload a staged checkpoint, and what was written for TensorBoard. I/O lane."""
        began = time.monotonic()
        files: list[FileEntry] = []
        problem = mistake = None
        # No failure of this rank, whose peers may be training: what follows is the driver's to say.
        try:
            files = self._the_snapshots.persist(request.uuid)
        except StorageError as error:
            problem = str(error)
        except CheckpointError as error:
            mistake = str(error)
        else:
            self._the_measured.upload()
        seconds = time.monotonic() - began
        return Persisted(files=files, seconds=seconds, problem=problem, mistake=mistake)

    def release_staging(self, request: ReleaseStaging) -> Done:
        """Drop a staged checkpoint. I/O lane."""
        self._the_snapshots.release(request.uuid)
        return Done()

    def run_hook(self, request: RunHook) -> HookDone:
        """Call one hook of every callback, in the order in which the trial names them."""
        arguments = {**self._hook_arguments.get(request.hook, {}), **request.arguments}
        # By position, in the reference's order: a callback may call its parameters what it likes.
        positional = [arguments[name] for name in HOOKS[request.hook]]
        for callback in self._the_engine.callbacks.values():
            getattr(callback, request.hook)(*positional)
        return HookDone(stop_requested=self._the_info.stop_requested)

    def finish_run_files(self, request: FinishRunFiles) -> RunFilesStored:
        """Stop the profiler, and upload what is left of the files for TensorBoard."""
        self._the_info.instruments.finish()
        return self._the_measured.upload()

    # ---------------------------------------------------------------------------- internals

    def _restore_rng(self) -> None:
        # As late as can be: what hooks draw on the way here must not shift what training draws.
        if self._rng is not None:
            restore_rng(self._rng)
            self._rng = None

    def _heed_the_trial(self) -> None:
        """The trial asks to stop, on this rank, in a batch: the ranks agree on their last one."""
        if self._ask_to_stop is None or self._has_asked_to_stop:
            return
        self._has_asked_to_stop = True
        self._stop_barrier.pause_self()  # before anybody is told: what is agreed on then must stay
        self._ask_to_stop()

    def _ticker(self, event: type[BatchesTrained] | type[BatchesValidated]) -> Ticker:
        def tell(batches: int) -> None:
            if self._distributed.get_rank() == 0:
                self._emit(event(batches=batches))

        return Ticker(tell)

    @property
    def _the_info(self) -> RunInfo:
        return _made(self._info, BuildTrial)

    @property
    def _the_engine(self) -> TrialEngine:
        return _made(self._engine, BuildTrial)

    @property
    def _the_snapshots(self) -> Snapshots:
        return _made(self._snapshots, BuildTrial)

    @property
    def _the_measured(self) -> RunFileUpload:
        return _made(self._measured, BuildTrial)

    @property
    def _the_loaders(self) -> Loaders:
        return _made(self._loaders, BuildLoaders)


def _made(thing: T | None, by: type) -> T:
    if thing is None:
        raise SlotsError(f"this request needs {by.__name__} to have been carried out before it")
    return thing


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
