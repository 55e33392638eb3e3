"""A launch's work in parallel with training: one upload at a time, prunes, and own stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.transfer.upload import StagedCheckpoint
from trial_core.driver.own_stages_due import OwnStages
from trial_core.driver.run import Launch
from trial_core.driver.stages.callbacks import call_hook
from trial_core.driver.stages.checkpoint import checkpoint_prune, checkpoint_upload
from trial_core.driver.stages.declared_stage import Running
from trial_core.messages import Done, ReleaseStaging


class Uploads(AbstractContextManager["Uploads"]):
    """The upload in progress, if any, and the newest committed checkpoint.

    The end of the block waits for background work, also after an error.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._upload: Running[Manifest] | None = None
        self.pruning = Pruning(launch)
        self.own = OwnStages(launch)
        self.newest: Manifest | None = None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._upload is not None:
            self._upload.ended.wait()
        self.pruning.wait()
        self._launch.has_failed = kind is not None
        self.own.wait()

    @property
    def is_busy(self) -> bool:
        """True while an upload is in progress."""
        return self._upload is not None and not self._upload.ended.is_set()

    def start(self, staged: StagedCheckpoint) -> None:
        """Upload and commit a staged checkpoint, in parallel with training."""
        if self._launch.run.test_mode == "keep nothing":
            self._launch.ask(ReleaseStaging(uuid=staged.uuid), Done)
            return
        self._upload = Running(checkpoint_upload(self._launch, staged))

    def call_at_end(self, call: Callable[[], None]) -> None:
        """Call `call` when the upload ends, in any thread; at once without an upload."""
        if self._upload is None:
            call()
        else:
            self._upload.pending.add_done_callback(lambda _: call())

    def poll(self) -> None:
        """Finish the upload if it has ended, and poll the own stages. Called between workloads."""
        if not self.is_busy:
            self.finish()
        self.own.poll()

    def finish(self) -> None:
        """Wait for the upload, if there is one; then run its hook and own stages, and prune.

        Raises CheckpointError if the upload failed.
        """
        if self._upload is None:
            return
        with self._launch.run.clock.spending("checkpoint_stall"):
            self._upload.ended.wait()
        upload, self._upload = self._upload, None
        self.newest = committed = upload.pending.result()
        at = committed.progress.batches_trained
        call_hook(self._launch, "on_checkpoint_upload_end", at, uuid=committed.uuid)
        self.own.run_blocking("checkpoint-upload", at, committed)
        if self.own.is_busy:  # it may read the pruned files
            self.pruning.postpone(at)
        else:
            self.pruning.start(at)
        self.own.start_beside("checkpoint-upload", at, committed)


class Pruning:
    """The prunes of a run, one at a time. Commits during a prune cause one more prune after it."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._policy = launch.run.config.retention(launch.run.has_metric)
        self._prune: Running[None] | None = None
        self._due_at: int | None = None

    def start(self, batches_trained: int) -> None:
        """Prune after a commit, or once more after the prune in progress. Returns at once.

        Does nothing if the experiment keeps all checkpoints.
        """
        if self._policy is None:
            return
        if self._prune is not None and not self._prune.ended.is_set():
            self._due_at = batches_trained
            return
        self._due_at = None
        self._prune = Running(checkpoint_prune(self._launch, self._policy, batches_trained))

    def postpone(self, batches_trained: int) -> None:
        """Prune after the next commit, or at the end."""
        self._due_at = batches_trained

    def finish(self) -> None:
        """Prune once more if due, and wait for the end. Raises nothing if a prune fails."""
        self.wait()
        if self._due_at is not None:
            self.start(self._due_at)
            self.wait()

    def wait(self) -> None:
        """Wait for the prune in progress, without starting another: for a run that has failed."""
        if self._prune is not None:
            self._prune.ended.wait()
