"""Decides whether ranks that have failed are launched again, when, where and how many.

A number of ranks that has trained a batch works, and so do nodes on which one was trained. If they
fail later, the cause is another one, and a restart may help. A number or a node that has not yet
trained may be the cause itself. The run leaves it out if it can do without, and that costs no
restart. Ranks that fail twice at the same place before they have trained would fail again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trial_core.common.text_format import plural
from trial_core.driver.run import Launch
from trial_core.errors import LaunchError, RankFailed, Stalled, TopologyMismatch
from trial_core.processes.nodes.node_pool import NodePool

MAX_PAUSE_SECONDS = 60
FIRST_BATCHES = 10
"""If memory suffices for so many batches, a later lack of it has another cause."""

SAME_REFUSALS = 3
"""After so many equal refusals, the number of ranks is not the cause: the text would name it."""

CRASHES = frozenset(("SIGSEGV", "SIGABRT", "SIGFPE", "SIGILL", "SIGBUS"))
"""Signals that a process causes itself."""

_LINE = re.compile(r'^ *File ".+", line \d+', re.MULTILINE)

Failure = RankFailed | Stalled | LaunchError | TopologyMismatch
"""Failures of a launch after which another launch may succeed."""


@dataclass(frozen=True)
class Relaunch:
    """The decision to launch the ranks again. The driver carries it out.

    Attributes:
        micro_batch_samples: the new number of samples of a micro-batch; None to keep it.
        leaves_out: a number of ranks that is not launched any more.
        retreats: True to leave the nodes that have not trained.
    """

    pause_seconds: int = 0
    micro_batch_samples: int | None = None
    leaves_out: int | None = None
    retreats: bool = False
    leaves: str | None = None


class FailurePolicy:
    """Decides whether and how failed ranks of a run are launched again. Changes nothing itself."""

    def __init__(self, pool: NodePool | None, limit: int) -> None:
        self._pool = pool
        self._restarts = Restarts(limit)
        self._trained_slots: set[int] = set()
        self._last_refusal = ""
        self._refusals = 0
        self._before_training: set[object] = set()

    def launch_ended(self, launch: Launch) -> None:
        """Note which number of ranks has trained, when a launch has ended or failed."""
        if launch.status.has_trained:
            self._trained_slots.add(launch.world_size)
            self._before_training.clear()

    def grant(self, failure: Failure, launch: Launch) -> Relaunch | None:
        """Decide whether to launch the ranks again; None if the failure ends the run."""
        if launch.run.stopping.request is not None:
            return None
        if (smaller := self._smaller_micro_batch(failure, launch)) is not None:
            return Relaunch(micro_batch_samples=smaller)
        if not launch.status.has_trained:
            if self._has_fewer(failure, launch):
                return Relaunch(leaves_out=launch.world_size)
            if self._comes_again(failure, launch):
                return None
            if self._goes_back(failure, launch):
                return Relaunch(retreats=True)
        return self._restart_after(failure, launch)

    def _comes_again(self, failure: Failure, launch: Launch) -> bool:
        """Return whether an earlier launch failed in this way before it trained a batch."""
        place = _place(failure, launch.status.batches_trained)
        if place is None or place not in self._before_training:
            self._before_training.add(place)
            return False
        launch.run.logger.error(
            "the ranks are not launched again: they failed twice at the same place before they had "
            "trained a batch"
        )
        return True

    def _smaller_micro_batch(self, failure: Failure, launch: Launch) -> int | None:
        """Return the next smaller size if micro-batches do not fit into memory.

        None for a script, which builds its engines itself.
        """
        if not isinstance(failure, RankFailed) or failure.error_type != "OutOfMemoryError":
            return None
        if launch.run.fit is not None or launch.run.config.is_script:
            return None
        topology, answers = launch.answers.topology, launch.answers
        is_first = (failure.batches_trained or 0) - launch.status.began_at < FIRST_BATCHES
        if (
            failure.during != "train-workload"
            or topology is None
            or not (is_first and answers.loads_micro_batches)
            or not launch.run.config.resources.shrink_micro_batches
        ):
            return None
        batch = topology.batch_samples // topology.data_parallel_size
        was = topology.micro_batch_samples
        if launch.micro_batch_samples and was > launch.micro_batch_samples:
            return None  # the engine has not taken the size, and would run out of memory for ever
        now = next((n for n in range(was // 2, 0, -1) if batch % n == 0), None)
        if now is None:
            return None
        what = (
            f"rank {failure.rank} has no memory for micro-batches of {plural(was, 'sample')}, so "
            f"they get {now}, and {batch // now} of them are accumulated; a batch stays "
            f"{plural(topology.batch_samples, 'sample')}. To begin so, set "
            f"train_micro_batch_size_per_gpu to {now}"
        )
        launch.warn([what])
        return now

    def _has_fewer(self, failure: Failure, launch: Launch) -> bool:
        """Return whether the trial refuses the number of ranks, and another one is possible."""
        slots = launch.world_size
        is_refusal = self._is_refusal(failure, launch)
        if not is_refusal or self._pool is None or not self._pool.can_leave_out(slots):
            return False
        what = f"the trial refuses {slots} slots, so it gets fewer: {failure}"
        launch.run.logger.warning("%s", what)
        launch.run.observer.moving(what)
        return True

    def _is_refusal(self, failure: Failure, launch: Launch) -> bool:
        """Return whether the trial may have refused the number of ranks, in a range of slots.

        The number may not divide the global batch, or not be divisible by the pipeline stages. The
        largest number has to be right. The same text for `SAME_REFUSALS` numbers is a mistake.
        """
        may_be = isinstance(failure, TopologyMismatch) or (
            isinstance(failure, RankFailed)
            and failure.error_type is not None
            and failure.during in ("build-trial", "attach-trial")
        )
        if not may_be or launch.world_size in self._trained_slots:
            return False
        what = str(getattr(failure, "error_message", failure))
        self._refusals = self._refusals + 1 if what == self._last_refusal else 1
        self._last_refusal = what
        is_largest = launch.world_size == launch.run.config.resources.max_slots
        return not is_largest and self._refusals < SAME_REFUSALS

    def _goes_back(self, failure: Failure, launch: Launch) -> bool:
        """Return whether there are nodes that have not trained, and enough without them."""
        if self._pool is None or not self._pool.can_retreat():
            return False
        _log(failure, launch)
        launch.run.observer.moving(f"back to the nodes that have trained, because {failure}")
        return True

    def _restart_after(self, failure: Failure, launch: Launch) -> Relaunch | None:
        if isinstance(failure, TopologyMismatch):
            return None
        _log(failure, launch)
        works = launch.status.has_trained or launch.world_size in self._trained_slots
        if isinstance(failure, LaunchError):  # the number of ranks is not the cause
            works = bool(self._trained_slots)
        restarts, stored = self._restarts, launch.run.stored_checkpoints
        if not restarts.grant(failure, launch.status.batches_trained, works, stored):
            return None
        launch.run.observer.restarting(str(failure), restarts.count, restarts.limit)
        node = None if launch.status.has_trained else _failed_node(failure)
        return Relaunch(restarts.pause_seconds, leaves=node)


def _place(failure: Failure, batches_trained: int) -> tuple[object, ...] | None:
    """Identify where a rank has raised, exited or crashed; None if another cause is possible."""
    if not isinstance(failure, RankFailed) or failure.node_lost is not None:
        return None
    how = failure.error_type, failure.exit_code, failure.signal_name
    if how[:2] == (None, None) and failure.signal_name not in CRASHES:
        return None
    line = _LINE.findall(failure.rank_traceback or "")[-1:]
    return (*how, failure.during, *line, failure.batches_trained or batches_trained)


def _log(failure: Failure, launch: Launch) -> None:
    if isinstance(failure, (RankFailed, Stalled)):
        launch.run.logger.error("%s", failure.report())


def _failed_node(failure: Failure) -> str | None:
    if isinstance(failure, RankFailed):
        return failure.host
    return failure.node if isinstance(failure, LaunchError) else None


class Restarts:
    """The restarts of one run, of which `count` were granted.

    The pause before a restart doubles while no checkpoint is stored between them: whatever ends the
    launches may need time. A checkpoint that was stored shows that restarts help.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self._without_progress = 0
        self._stored = 0
        self._last_cause: tuple[object, ...] | None = None

    def grant(
        self, failure: RankFailed | Stalled | LaunchError, batches_trained: int, works: bool,
        stored: int,
    ) -> bool:  # fmt: skip
        """Decide whether to launch the ranks again after `failure`. Counts a granted restart.

        Args:
            batches_trained: where the last workload ended.
            works: True if such ranks have trained a batch.
            stored: how many checkpoints the run has stored so far.
        """
        cause = _cause(failure, batches_trained)
        if self.count == self.limit or cause == self._last_cause:
            return False
        if not _can_help(failure, works):
            return False
        self.count, self._last_cause = self.count + 1, cause
        self._without_progress = 1 if stored > self._stored else self._without_progress + 1
        self._stored = stored
        return True

    @property
    def pause_seconds(self) -> int:
        """The pause before the last granted restart. None before the first without progress."""
        count = self._without_progress
        return 0 if count <= 1 else min(2 ** (count - 1), MAX_PAUSE_SECONDS)


def _can_help(failure: RankFailed | Stalled | LaunchError, works: bool) -> bool:
    """Return whether a restart may succeed. A mistake in the trial would fail again at once."""
    if isinstance(failure, Stalled):
        return True
    if isinstance(failure, LaunchError):  # of a node that has come later, or there are too few
        return works and failure.node is not None
    return not failure.is_trial_mistake and (works or failure.error_type is None)


def _cause(failure: RankFailed | Stalled | LaunchError, batches_trained: int) -> tuple[object, ...]:
    """Identify the cause of a failure. A restart does not help against the same cause twice.

    Two causes are equal if the same type of exception was raised at the same batch. The rank may
    differ, since often all raise, and the text, since torch's has sizes of memory and process ids.
    A killed or hung rank equals no earlier one: its cause (memory, preemption) is usually outside
    the trial.
    """
    if not isinstance(failure, RankFailed) or failure.error_type is None:
        return (failure,)
    trained = failure.batches_trained
    return (
        failure.error_type, failure.during,
        batches_trained if trained is None else trained,
    )  # fmt: skip
