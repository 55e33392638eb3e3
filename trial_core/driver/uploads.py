"""The work of a launch beside training: one upload at a time, the prunes that follow it, and the
stages of the user's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from trial_core.checkpoint.manifest import Manifest
from trial_core.driver.own_stages import OwnStages
from trial_core.driver.run import Launch
from trial_core.driver.stages import Pending, Stages
from trial_core.transfer.staged_checkpoint import StagedCheckpoint


class Uploads:
    """The upload in progress, if any, and the newest committed checkpoint.

    The end of the block waits for background work, also after an error.
    """

    def __init__(self, launch: Launch, stages: Stages) -> None:
        self._launch = launch
        self._stages = stages
        self._pending: Pending[Manifest] | None = None
        self._has_ended = threading.Event()
        self._has_ended.set()
        self._pruning = Pruning(launch, stages)
        self.own = OwnStages(launch, stages)
        self.newest: Manifest | None = None

    def __enter__(self) -> Uploads:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._has_ended.wait()
        self._pruning.wait()
        self._launch.has_failed = kind is not None
        self.own.wait()

    @property
    def is_busy(self) -> bool:
        """Whether an upload is in progress."""
        return not self._has_ended.is_set()

    def start(self, staged: StagedCheckpoint) -> None:
        """Upload and commit a staged checkpoint beside training."""
        self._pending = self._stages.checkpoint_upload(self._launch, staged)
        # An event, because the state of a future of Prefect's would ask the server, over HTTP.
        self._has_ended = has_ended = threading.Event()
        self._pending.add_done_callback(lambda _: has_ended.set())

    def call_at_end(self, call: Callable[[], None]) -> None:
        """Call `call` once `is_busy` is False, in any thread; now without an upload."""
        if self._pending is None:
            call()
        else:
            self._pending.add_done_callback(lambda _: call())

    def take_ended(self) -> Manifest | None:
        """If the upload has ended, do as `wait`; otherwise nothing."""
        return None if self.is_busy else self.wait()

    def wait(self) -> Manifest | None:
        """Wait for the upload, if there is one, and start pruning. Return what was committed.

        Raises:
            CheckpointError: the upload failed.
        """
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        with self._launch.run.clock.spending("checkpoint_stall"):
            self.newest = pending.result()
        return self.newest

    def prune(self, batches_trained: int) -> None:
        """Prune beside training, after a commit; later, if a stage may read what is pruned."""
        if self.own.is_busy:
            self._pruning.postpone(batches_trained)
        else:
            self._pruning.start(batches_trained)

    def finish_pruning(self) -> None:
        """Prune once more if that is due, and wait for its end."""
        self._pruning.finish()


class Pruning:
    """The prunes of a run, one at a time. Commits during a prune cause one more prune after it."""

    def __init__(self, launch: Launch, stages: Stages) -> None:
        self._launch = launch
        self._stages = stages
        self._policy = launch.run.config.retention(launch.run.has_metric)
        # Kept because Prefect complains about a future that is dropped before it has ended.
        self._pending: Pending[None] | None = None
        self._has_ended = threading.Event()
        self._has_ended.set()
        self._due_at: int | None = None

    def start(self, batches_trained: int) -> None:
        """Prune after a commit, or once more after the prune in progress. Returns at once.

        Does nothing if the experiment keeps all checkpoints.
        """
        if self._policy is None:
            return
        if not self._has_ended.is_set():
            self._due_at = batches_trained
            return
        self._due_at = None
        self._pending = self._stages.checkpoint_prune(self._launch, self._policy, batches_trained)
        self._has_ended = has_ended = threading.Event()
        self._pending.add_done_callback(lambda _: has_ended.set())

    def postpone(self, batches_trained: int) -> None:
        """Prune after the next commit, or at the end."""
        self._due_at = batches_trained

    def finish(self) -> None:
        """Prune once more if due, and wait for the end. A failed prune raises nothing."""
        self.wait()
        if self._due_at is not None:
            self.start(self._due_at)
            self.wait()

    def wait(self) -> None:
        """Wait for the prune in progress, without starting another: for a run that has failed."""
        self._has_ended.wait()
