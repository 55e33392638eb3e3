"""The background work of a run: one upload at a time, and the pruning that follows it."""

from __future__ import annotations

import threading
from types import TracebackType

from prefect.futures import PrefectFuture

from trial_core.checkpoint.manifest import Manifest
from trialflow.tasks.callbacks import run_callbacks
from trialflow.tasks.prune import Pruning
from trialflow.tasks.trial_run import TrialRun


class Uploads:
    """The upload in progress, if any, and the newest committed checkpoint.

    The end of the block waits for background work, also after an error.
    """

    def __init__(self, run: TrialRun) -> None:
        self._run = run
        self._pending: PrefectFuture[Manifest] | None = None
        self._has_ended = threading.Event()
        self._has_ended.set()
        self._pruning = Pruning(run)
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

    @property
    def is_busy(self) -> bool:
        """Whether an upload is in progress."""
        return not self._has_ended.is_set()

    def start(self, upload: PrefectFuture[Manifest]) -> None:
        """Take charge of an upload that has been submitted."""
        # An event, because the future's own `state` would ask the server, over HTTP.
        self._pending, self._has_ended = upload, (has_ended := threading.Event())
        upload.add_done_callback(lambda _: has_ended.set())

    def poll(self) -> None:
        """If the upload has ended, do as `wait`; otherwise nothing."""
        if not self.is_busy:
            self.wait()

    def wait(self) -> None:
        """Wait for the upload, run its hook, and start pruning.

        Raises:
            CheckpointError: the upload failed.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with self._run.clock.spending("checkpoint_stall"):
            self.newest = pending.result()
        run_callbacks(
            self._run, "on_checkpoint_upload_end", self.newest.progress.batches_trained,
            uuid=self.newest.uuid,
        )  # fmt: skip
        self._pruning.start(self.newest.progress.batches_trained)

    def finish_pruning(self) -> None:
        """Prune once more if that is due, and wait for its end."""
        self._pruning.finish()
