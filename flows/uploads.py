"""What happens to checkpoints beside training: one upload at a time, and the pruning after it."""

from __future__ import annotations

import threading
from types import TracebackType

from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger

from trial_core.checkpoint.manifest import Manifest
from trialflow.tasks.callbacks import run_callbacks
from trialflow.tasks.prune import Pruning
from trialflow.tasks.run import TrialRun


class Uploads:
    """The upload under way, if any, and the newest checkpoint that has been committed.

    At the end of its block nothing is under way, however the block ends.
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

    def start(self, upload: PrefectFuture[Manifest]) -> None:
        """`upload` is under way."""
        # Known here: the future's own `state` would ask the server, over HTTP.
        self._pending, self._has_ended = upload, (has_ended := threading.Event())
        upload.add_done_callback(lambda _: has_ended.set())

    def have_room(self, is_optional: bool) -> bool:
        """Whether the next checkpoint may be saved: there is one upload at a time, beside training.

        Waits for the one under way, unless `is_optional` and the experiment would rather skip.
        Raises what that upload failed of.
        """
        if not self._has_ended.is_set():
            logger, policy = get_run_logger(), self._run.config.checkpointing.when_busy
            if is_optional and policy == "skip":
                logger.warning(
                    "checkpoint skipped at batch %d: the last one is still being uploaded "
                    "(checkpointing.when_busy: skip)", self._run.batches_trained,
                )  # fmt: skip
                return False
            logger.info("training waits: the last checkpoint is still being uploaded")
        self.wait()
        return True

    def settle(self) -> None:
        """If the upload has ended by now, tell the trial's callbacks; else leave it be."""
        if self._has_ended.is_set():
            self.wait()

    def wait(self) -> None:
        """Wait for the upload under way. Raises what it failed of."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        self.newest = pending.result()
        run_callbacks(
            self._run, "on_checkpoint_upload_end", self.newest.progress.batches_trained,
            uuid=self.newest.uuid,
        )  # fmt: skip
        self._pruning.start(self.newest.progress.batches_trained)

    def finish(self) -> None:
        """No more checkpoints will come: wait for all that is under way. Raises as `wait`."""
        self.wait()
        self._pruning.finish()
