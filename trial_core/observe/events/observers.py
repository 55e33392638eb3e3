"""Observers of a run, in the driver's process.

Within `with observing(observer): train(config)`, the flow reports events to the observer, such as
the command line's progress bar. An observer must return at once and never raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports storages, which would delay the command line's help
    from trial_core.checkpoint.manifest import Topology
    from trial_core.messages import MetricsKind
    from trial_core.observe.events.throughput import Throughput
    from trial_core.observe.ledger.time_ledger import RunTime


@dataclass(frozen=True)
class WorkloadTimes:
    """The time of a train-workload, in seconds."""

    reached: int  # batches trained after it
    seconds: float
    # How long each rank waited for data, by rank; empty if unknown. Ranks train in step, so the
    # others wait for the rank that waits longest.
    data_seconds: Sequence[float]
    forward_seconds: Sequence[float] = ()  # of a forward pass, by rank; empty or 0 if unknown
    samples: int = 0  # trained in it on all ranks; 0 if unknown


class Observer:
    """Does nothing; override the methods of interest. Several threads may call them."""

    def run_started(
        self, trial: str, total_batches: int, begins_at: int, batch_samples: int
    ) -> None:
        """The loaders are built, and the length of the run is known.

        Args:
            trial: the trial's id.
            total_batches: batches when training ends.
            begins_at: batches already trained; not 0 for a resumed run.
            batch_samples: samples in one whole batch on all ranks; 0 if unknown.
        """

    def length_known(self, total_batches: int) -> None:
        """A script has said at how many batches its training ends."""

    def of_trial(self, number: int, trial: str) -> Observer:
        """The observer of a trial of a search, for one of its runs. Several trials may run."""
        return Observer()

    def search_advanced(self, news: str) -> None:
        """A trial of a search has reached a rung, or has failed: a line for people."""

    def search_shown(
        self, lines: Sequence[str], rungs: Sequence[Sequence[str]], progress: float
    ) -> None:
        """What a search has, now that it has begun, a training has begun, or one has ended: lines
        for people; the table of rungs, columns first; the progress from 0 to 1."""

    def samples_trained(self, samples: int) -> None:
        """Just before `run_started`: so many samples have been trained by then; 0 if unknown."""

    def trial_owned(self, attempt: int, earlier: Sequence[RunTime] = ()) -> None:
        """The run has taken its trial, as the first or a later attempt at it; once a run.
        `earlier`: the ledger's records of earlier attempts, oldest first."""

    def trial_built(self, topology: Topology, versions: Mapping[str, str], code: str) -> None:
        """The trial exists on all ranks; again after a restart, and in each `Trainer.fit`.
        `versions` are those of the ranks' libraries; `code` is the digest of the trial's code,
        empty if none is stored."""

    def ranks_placed(self, nodes: Sequence[str]) -> None:
        """All ranks have joined, on these nodes. Called again after a restart."""

    def subject_changed(self, subject: str) -> None:
        """The next stages belong to one of several models, ``challenger``; empty: to the run."""

    def stage_started(self, stage: str, detail: str) -> None:
        """A stage has begun: ``("train-workload", "[100→200]")``."""

    def stage_ended(self, stage: str, detail: str, seconds: float) -> None:
        """A stage has succeeded."""

    def stage_failed(self, stage: str, detail: str) -> None:
        """A stage has failed, and the run may continue without it: one of the user's own, an upload
        that is refused, a fetch of a deleted checkpoint."""

    def stage_takes_long(self, activity: str) -> None:
        """Rank 0's activity in a stage that takes long, and the time that it has taken."""

    def notice(self, text: str) -> None:
        """A person has to know or do this now."""

    def batches_trained(self, batches: int) -> None:
        """Training has reached `batches`; called a few times a second."""

    def training_timed(self, timed: WorkloadTimes) -> None:
        """A train-workload has ended."""

    def throughput_measured(self, batches: int, now: Throughput, whole_run: Throughput) -> None:
        """The speed of a train-workload, or of a script's training since its last report: of that
        one, and of all of this run so far, which has trained `batches` by then."""

    def learning_rates_read(self, batches: int, learning_rates: Sequence[float | None]) -> None:
        """The learning rates after `batches` batches, by optimizer; None if an engine has none."""

    def metrics_reported(self, kind: MetricsKind, batches: int, metrics: Mapping[str, Any]) -> None:
        """Metrics reduced over all ranks, after `batches` batches."""

    def checkpoint_committed(
        self, uuid: str, batches: int, total_bytes: int, digest: str = ""
    ) -> None:
        """A checkpoint has been committed, with so many bytes in all its files; `digest` is its
        manifest's."""

    def checkpoint_deleted(self, uuid: str) -> None:
        """The retention policy has deleted a checkpoint."""

    def rank_logged(self, rank: int, line: str) -> None:
        """A line of a rank's log, at a limited rate; the whole log is on disk."""

    def stopping(self, why: str) -> None:
        """The run was asked to stop, and saves. Called in a signal handler, in the main thread."""

    def moving(self, what: str) -> None:
        """The ranks have ended, and are launched again on other nodes, or fewer of them. `what`
        says whether they have saved, where they continue, and why."""

    def stalled(self, during: str, seconds: float, reason: str) -> None:
        """The ranks have hung for `seconds` in the stage `during`, and were ended."""

    def restarting(self, reason: str, attempt: int, max_restarts: int) -> None:
        """The slot group has failed and is launched again."""

    def run_ended(self, status: str, tensorboard_url: str | None = None) -> None:
        """The ranks have ended: ``completed``, ``completed early: why``, ``stopped: why`` or
        ``failed: why``. Once a run.

        Args:
            tensorboard_url: the place of the trial's TensorBoard files, if it has any.
        """


class Observers(Observer):
    """Passes each call to several observers, in their order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def of_trial(self, number: int, trial: str) -> Observer:
        return Observers(*(each.of_trial(number, trial) for each in self._observers))


def _to_all(name: str) -> Callable[..., None]:
    def call(self: Observers, *arguments: Any, **named: Any) -> None:
        for observer in self._observers:
            getattr(observer, name)(*arguments, **named)

    return call


for _name in [name for name in vars(Observer) if not name.startswith("_") and name != "of_trial"]:
    setattr(Observers, _name, _to_all(_name))

_no_observer = Observer()
_current: ContextVar[Observer] = ContextVar("trialflow_observer", default=_no_observer)


def current_observer() -> Observer:
    """The current run's observer, or an observer that does nothing."""
    return _current.get()


@contextmanager
def observing(observer: Observer) -> Iterator[Observer]:
    """Runs that start inside the block report to `observer`."""
    token = _current.set(observer)
    try:
        yield observer
    finally:
        _current.reset(token)
