"""Watching a run from the process that drives it.

Whoever starts a run may watch it: `with observing(observer): train(config)`. The flow tells the
observer what happens, in the flow's own process; an observer must return at once and never raise.
The command line's progress bar is one. Without one, nothing is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

MetricsKind = Literal["training", "validation"]


class Observer:
    """Does nothing; override what is of interest. Methods may be called from several threads."""

    def run_started(
        self, trial: str, total_batches: int, begins_at: int, batch_samples: int
    ) -> None:
        """The loaders are built, so the length of the run is known.

        Args:
            trial: the trial's id.
            total_batches: where training ends.
            begins_at: batches already trained (not 0 for a resumed run).
            batch_samples: samples in one batch, all ranks together.
        """

    def stage_started(self, stage: str, detail: str) -> None:
        """A stage begins: ``("train-workload", "[100→200]")``."""

    def stage_ended(self, stage: str, detail: str, seconds: float) -> None:
        """That stage has ended well."""

    def batches_trained(self, batches: int) -> None:
        """Training has reached `batches`; told a few times a second."""

    def training_timed(
        self, begin: int, reached: int, seconds: float, data_seconds: Sequence[float]
    ) -> None:
        """A train-workload has taken `seconds`.

        Args:
            begin, reached: batches trained before and after it.
            data_seconds: for how much of that each rank has waited for its data, by rank; empty
                where that is not known. Ranks train in step, so all take the same time; the one
                that waits longest for data is what the others wait for.
        """

    def metrics_reported(self, kind: MetricsKind, batches: int, metrics: Mapping[str, Any]) -> None:
        """Metrics reduced over all ranks, as of `batches` trained."""

    def checkpoint_committed(self, uuid: str, batches: int, total_bytes: int) -> None:
        """A checkpoint has become real."""

    def checkpoint_deleted(self, uuid: str) -> None:
        """The experiment's rules have not kept a checkpoint: it is gone."""

    def rank_logged(self, rank: int, line: str) -> None:
        """A line of a rank's output (rate-capped; whole logs are on disk)."""

    def stopping(self, why: str) -> None:
        """The run was asked to stop, and saves. Called in a signal handler, in the main thread."""

    def restarting(self, reason: str, attempt: int, max_restarts: int) -> None:
        """The slot group failed and is launched again."""


_nobody = Observer()
_current: ContextVar[Observer] = ContextVar("trialflow_observer", default=_nobody)


def current_observer() -> Observer:
    """The observer of the run being driven; one that does nothing when there is none."""
    return _current.get()


@contextmanager
def observing(observer: Observer) -> Iterator[Observer]:
    """Runs started inside the block are shown to `observer`."""
    token = _current.set(observer)
    try:
        yield observer
    finally:
        _current.reset(token)
