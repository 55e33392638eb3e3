"""The part of a rank that runs a Core API script, and moves its checkpoints' files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trial_core.checkpoint.manifest import Topology
from trial_core.checkpoint.store import CheckpointStore
from trial_core.cluster_info import ScriptInfo, published
from trial_core.config.command import ScriptCommand, command_of
from trial_core.context import RunInfo
from trial_core.controller.checkpoint_files import CheckpointFiles
from trial_core.controller.controller import library_versions
from trial_core.controller.run_file_upload import RunFileUpload, instruments_in
from trial_core.core.run_script import run_script
from trial_core.core.script_host import hosted
from trial_core.core.slot_host import ScriptMessage, SlotHost
from trial_core.core.stored_checkpoints import StoredCheckpoints
from trial_core.distributed import DistributedContext
from trial_core.errors import SlotsError
from trial_core.messages import (
    AnyRequest,
    AnyResult,
    BuildTrial,
    Done,
    FetchCheckpoint,
    Fetched,
    FinishRunFiles,
    PersistCheckpoint,
    Persisted,
    ReleaseStaging,
    RunFilesStored,
    RunScript,
    ScriptEnded,
    TrialBuilt,
)
from trial_core.rendezvous import host_store
from trial_core.run.run_dirs import rank_run_dir
from trial_core.slots.stop_barrier import StopBarrier


@dataclass
class _PreparedScript:
    command: ScriptCommand
    info: RunInfo
    files: CheckpointFiles
    store: CheckpointStore
    run_files: RunFileUpload
    host: SlotHost | None = None


class ScriptController:
    """Carries out the workloads of a Core API script on this rank, as `Controller` does a trial's.

    The script runs in the compute lane, and the other requests beside it in the I/O lane.

    Args:
        emit: sends to the driver.
        stop_barrier: holds this rank's part of a stop.
    """

    def __init__(self, emit: Callable[[ScriptMessage], None], stop_barrier: StopBarrier) -> None:
        self._emit = emit
        self._stop_barrier = stop_barrier
        self._distributed = DistributedContext.from_environment()
        self._prepared: _PreparedScript | None = None
        self._handlers: dict[type, Callable[[Any], AnyResult]] = {
            BuildTrial: self.prepare,
            FetchCheckpoint: self.fetch_checkpoint,
            RunScript: self.run,
            PersistCheckpoint: self.persist_checkpoint,
            ReleaseStaging: self.release_staging,
            FinishRunFiles: self.finish_run_files,
        }

    def carry_out(self, request: AnyRequest) -> AnyResult:
        """Carry out one request. The caller runs it in the lane that the request names."""
        handler = self._handlers.get(type(request))
        if handler is None:
            raise SlotsError(f"a Core API script has no {request.title}: it drives its own loop")
        return handler(request)

    @property
    def batches_trained(self) -> int | None:
        """How many steps the script has reported on this rank; None before it is prepared."""
        return None if self._prepared is None else self._prepared.info.batches_trained

    def close(self) -> None:
        """Release what an earlier run of a script has left."""
        if self._prepared is not None:
            self._prepared.info.instruments.finish()
            self._prepared.files.close()

    # ------------------------------------------------------------------------ the workloads

    def prepare(self, request: BuildTrial) -> TrialBuilt:
        """Prepare to run the script. The script initialises torch.distributed itself."""
        self.close()
        self._stop_barrier.reset()
        host_store()
        command = command_of(str(request.experiment["entrypoint"]))
        if command is None:
            raise SlotsError(f"no command: {request.experiment['entrypoint']!r}")
        run_dir, ranks = rank_run_dir(request.run_dir), self._distributed
        instruments = instruments_in(run_dir, ranks.get_rank())
        info = RunInfo(request.trial, request.experiment, instruments=instruments)
        instruments.rank = ranks.get_rank()
        store = CheckpointStore.from_spec(request.storage)
        settings = request.experiment.get("checkpointing") or {}
        self._prepared = _PreparedScript(
            command,
            info,
            CheckpointFiles(run_dir, store, ranks, settings),
            store,
            RunFileUpload(info, store, run_dir),
        )
        return TrialBuilt(
            hooks=[],
            topology=Topology(world_size=ranks.get_size(), data_parallel_size=ranks.get_size()),
            batch_samples=0,
            versions=library_versions(),
        )

    def run(self, request: RunScript) -> ScriptEnded:
        """Run the script to its end."""
        script, ranks = self._script, self._distributed
        script.info.batches_trained = request.batches_trained
        checkpoints = StoredCheckpoints(
            script.files,
            script.store,
            ranks,
            sees_storage=not script.store.is_process_local,
            fetched=request.checkpoint,
        )
        info = ScriptInfo.of(script.info.trial, script.info.experiment, request.checkpoint)
        host = SlotHost(
            info, ranks, script.info, script.files, checkpoints, self._emit, self._stop_barrier
        )
        script.host = host
        self._stop_barrier.begin_workload()
        with published(info), hosted(host):
            run_script(script.command)
        writes_run_files = script.info.instruments.has_files_to_upload
        return ScriptEnded(was_preempted=host.was_preempted, writes_run_files=writes_run_files)

    def fetch_checkpoint(self, request: FetchCheckpoint) -> Fetched:
        """Fetch all files of a checkpoint to this machine. I/O lane."""
        return self._script.files.fetched(request.uuid, request.files)

    def persist_checkpoint(self, request: PersistCheckpoint) -> Persisted:
        """Upload what the script has written, and the files for TensorBoard. I/O lane."""
        script = self._script
        # Most checkpoints are rank 0's alone.
        script.files.staging(request.uuid).mkdir(parents=True, exist_ok=True)
        persisted = script.files.persisted(request.uuid)
        if not persisted.problem and not persisted.mistake:
            script.run_files.upload()
        return persisted

    def release_staging(self, request: ReleaseStaging) -> Done:
        """Delete a staged checkpoint, and let the script continue. I/O lane."""
        script = self._script
        script.files.release(request.uuid)
        if script.host is not None:
            script.host.released(request.uuid)
        return Done()

    def finish_run_files(self, request: FinishRunFiles) -> RunFilesStored:
        """Upload the remaining files for TensorBoard."""
        self._script.info.instruments.finish()
        return self._script.run_files.upload()

    @property
    def _script(self) -> _PreparedScript:
        if self._prepared is None:
            raise SlotsError("this request must come after build-trial")
        return self._prepared
