"""The part of a rank that runs a Core API script, and moves its checkpoints' files."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trial_core import messages
from trial_core.checkpoint.manifest import Topology
from trial_core.checkpoint.store import CheckpointStore
from trial_core.cluster_info import ClusterInfo, published
from trial_core.deepspeed.op_builds import prepare_op_builds
from trial_core.driver.entrypoint_check import entrypoint_problem
from trial_core.errors import SlotsError, TrialError
from trial_core.processes.machine.run_dirs import rank_run_dir
from trial_core.processes.slots.receipts import Receipts
from trial_core.processes.slots.stop_barrier import StopBarrier
from trial_core.rank.checkpoint_files import CheckpointFiles, tensorboard_in
from trial_core.rank.collectives.accelerator import peak_memory_bytes
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.collectives.rendezvous import host_store
from trial_core.rank.controller import Controller, library_versions
from trial_core.rank.core_api.script_host import ScriptHost, ScriptMessage, in_slot
from trial_core.rank.trial.context import RunInfo
from trial_core.schedule.command import ScriptCommand, command_of


@dataclass
class _PreparedScript:
    command: ScriptCommand
    info: RunInfo
    files: CheckpointFiles
    host: ScriptHost | None = None


def run_in_slot(command: ScriptCommand, host: ScriptHost) -> None:
    """Run a script to its end, as ``__main__``, in this thread."""
    prepare_op_builds()
    with in_slot(host):
        run_script(command)


def run_script(command: ScriptCommand) -> None:
    """Run a script to its end, as ``__main__``. The current folder is the code folder.

    Raises:
        TrialError: the script or module does not exist.
        SystemExit: the script ended with an exit code other than 0; names it.
        Exception: the script raised.
    """
    folder = os.getcwd()
    path = os.path.join(folder, command.target)
    if (problem := entrypoint_problem(command.text, folder)) is not None:
        raise TrialError(problem)
    if not command.is_module:
        folder = os.path.dirname(path)
    with _as_program(command, folder):
        try:
            if command.is_module:
                runpy.run_module(command.target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            _check_exit(end, command)


def _check_exit(end: SystemExit, command: ScriptCommand) -> None:
    """Raise `SystemExit` with a message unless the exit code is 0."""
    if end.code is None or end.code == 0:
        return
    code = f"code {end.code}" if isinstance(end.code, int) else f"code 1: {end.code}"
    failure = SystemExit(f"{command.target} exited with {code}")
    raise failure.with_traceback(end.__traceback__) from None


@contextmanager
def _as_program(command: ScriptCommand, folder: str) -> Iterator[None]:
    """Set the values in `sys` that a separate program would find."""
    argv, path = sys.argv, sys.path
    sys.argv = [command.target, *command.arguments]
    sys.path = [folder, *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path


class ScriptController:
    """Carries out a Core API script's workloads on this rank, as `Controller` does a trial's.

    `run` runs the script to its end in the compute lane; other requests run in the I/O lane.
    """

    def __init__(
        self,
        emit: Callable[[ScriptMessage], None],
        stop_barrier: StopBarrier,
        receipts: Receipts,
        run: Callable[[ScriptCommand, ScriptHost], None],
        serve_fit: Callable[[Controller], None] | None = None,
        distributed: DistributedContext | None = None,
        run_dir_of: Callable[[messages.BuildTrial], Path] = lambda of: rank_run_dir(of.run_dir),
        on_first_question: Callable[[], None] = lambda: None,
    ) -> None:
        self._emit = emit
        self._run = run
        self._serve_fit = serve_fit
        self._run_dir_of = run_dir_of
        self._on_first_question = on_first_question
        self._stop_barrier = stop_barrier
        self._receipts = receipts
        self._distributed = distributed or DistributedContext.from_environment()
        self._prepared: _PreparedScript | None = None
        self._handlers: dict[type, Callable[[Any], messages.AnyResult]] = {
            messages.BuildTrial: self.prepare,
            messages.FetchCheckpoint: self.fetch_checkpoint,
            messages.RunScript: self.run,
            messages.PersistCheckpoint: self.persist_checkpoint,
            messages.ReleaseStaging: self.release_staging,
            messages.FinishRunFiles: self.finish_run_files,
            messages.AttachTrial: self.refuse_fit,
        }

    def carry_out(self, request: messages.AnyRequest) -> messages.AnyResult:
        """Carry out one request. The caller runs it in the lane that the request names."""
        handler = self._handlers.get(type(request))
        if handler is None:
            raise SlotsError(f"a Core API script has no {request.title}: it drives its own loop")
        return handler(request)

    @property
    def batches_trained(self) -> int | None:
        """The number of steps that the script has reported on this rank; None before `prepare`."""
        return None if self._prepared is None else self._prepared.info.batches_trained

    def close(self) -> None:
        if self._prepared is not None:
            self._prepared.info.tensorboard.finish()
            self._prepared.files.close()

    # ------------------------------------------------------------------------ the workloads

    def prepare(self, request: messages.BuildTrial) -> messages.TrialBuilt:
        """Prepare to run the script. The script initialises torch.distributed itself."""
        self.close()
        self._stop_barrier.reset()
        host_store()
        command = command_of(str(request.experiment["entrypoint"]))
        if command is None:
            raise SlotsError(f"no command: {request.experiment['entrypoint']!r}")
        run_dir, ranks = self._run_dir_of(request), self._distributed
        tensorboard = tensorboard_in(run_dir, ranks.get_rank())
        info = RunInfo(request.trial, request.experiment, tensorboard=tensorboard)
        tensorboard.rank = ranks.get_rank()
        store = CheckpointStore.from_spec(request.storage)
        files = CheckpointFiles(run_dir, store, ranks, info)
        self._prepared = _PreparedScript(command, info, files)
        return messages.TrialBuilt(
            hooks=[],
            topology=Topology(world_size=ranks.get_size(), data_parallel_size=ranks.get_size()),
            batch_samples=0,
            versions=library_versions(),
        )

    def run(self, request: messages.RunScript) -> messages.ScriptEnded:
        script, ranks = self._script, self._distributed
        run = script.info
        run.batches_trained = request.batches_trained
        info = ClusterInfo.of(
            run.trial, run.experiment, run.experiment_seed, request.checkpoint,
            slots=ranks.local_size, machine=ranks.cross_rank, machines=ranks.cross_size,
        )  # fmt: skip
        script.host = host = ScriptHost(
            info, ranks, run, script.files, self._emit, self._stop_barrier, self._receipts,
            self._serve_fit, self._on_first_question, request.best_metric, request.pause_at,
        )  # fmt: skip
        self._stop_barrier.begin_workload()
        with published(info):
            self._run(script.command, host)
        return messages.ScriptEnded(
            was_preempted=host.was_preempted,
            writes_run_files=run.tensorboard.has_files_to_upload,
            peak_memory_bytes=peak_memory_bytes(),
        )

    def fetch_checkpoint(self, request: messages.FetchCheckpoint) -> messages.Fetched:
        """Fetch all files of a checkpoint to this machine. I/O lane."""
        return self._script.files.try_fetch(request.uuid, request.files)

    def persist_checkpoint(self, request: messages.PersistCheckpoint) -> messages.Persisted:
        """Upload the files that the script has written, and its TensorBoard files. I/O lane."""
        files = self._script.files
        # Most checkpoints are rank 0's alone.
        files.staging(request.uuid).mkdir(parents=True, exist_ok=True)
        return files.try_persist(request.uuid, request.shared)

    def release_staging(self, request: messages.ReleaseStaging) -> messages.Done:
        """Delete a staged checkpoint, and let the script continue. I/O lane."""
        script = self._script
        script.files.release(request.uuid)
        if script.host is not None:
            script.host.released(request.uuid, request.refusal)
        return messages.Done()

    def refuse_fit(self, request: messages.AttachTrial) -> NoReturn:
        """Raise an error: rank 0 is in `Trainer.fit`, and this rank's script has ended."""
        raise TrialError(
            "rank 0 has called Trainer.fit, and this rank's script has ended without it: every "
            "rank calls fit"
        )

    def finish_run_files(self, request: messages.FinishRunFiles) -> messages.RunFilesStored:
        """Upload the remaining files for TensorBoard."""
        return self._script.files.finish_run_files()

    @property
    def _script(self) -> _PreparedScript:
        if self._prepared is None:
            raise SlotsError("this request must come after build-trial")
        return self._prepared
