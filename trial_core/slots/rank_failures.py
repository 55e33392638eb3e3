"""The failures of a group's ranks: what is said of each, and which of several is the first cause.

One rank's end is soon everybody's: its peers raise from the collectives that it has left, and may
be heard before it. So failures are collected for a moment before the group ends with one of them.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trial_core.errors import DeadlineExceeded, RankFailed, Stalled
from trial_core.messages import Answer, Peer
from trial_core.slots.launcher import RankProcess
from trial_core.slots.pending import Pending, PendingRequests
from trial_core.slots.progress_monitor import has_batches
from trial_core.slots.stacks import log_stacks

# How long, after a failure is noticed, others may report theirs.
CAUSE_SECONDS = 1.0


class FirstCause:
    """Collects failures, and settles on one of them once.

    Args:
        world_size: when so many ranks have failed, nobody else is waited for.
        settle: called in a thread of its own, with the first cause.
    """

    def __init__(self, world_size: int, settle: Callable[[RankFailed], None]) -> None:
        self._world_size = world_size
        self._settle = settle
        self._noted: list[RankFailed] = []
        self._changed = threading.Condition()

    def note(self, failure: RankFailed) -> None:
        """A rank has failed. Returns at once."""
        with self._changed:
            self._noted.append(failure)
            self._changed.notify_all()
            first = len(self._noted) == 1
        if first:
            threading.Thread(target=self._decide, name="first-cause", daemon=True).start()

    def _decide(self) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: len({f.rank for f in self._noted}) == self._world_size, CAUSE_SECONDS
            )
            # A death comes before any exception: a rank that raised stays alive until it is told
            # to end, so it breaks no collective, but a rank that died makes its peers raise.
            cause = min(self._noted, key=lambda failure: failure.error_type is not None)
        self._settle(cause)


def exit_status(code: int) -> tuple[int | None, str | None]:
    """A process's return code as (exit code, None) or (None, name of the signal)."""
    if code >= 0:
        return code, None
    try:
        return None, signal.Signals(-code).name
    except ValueError:
        return None, f"signal {-code}"  # real-time signals have no names


class Failures:
    """Puts into words how a group's ranks have failed: who, where, doing what, how it ended.

    Args:
        ranks, peers, pending: the group's own, as they grow.
    """

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        peers: Mapping[int, Peer],
        pending: PendingRequests,
        log_dir: Path,
    ) -> None:
        self._ranks = ranks
        self._peers = peers
        self._pending = pending
        self._log_dir = log_dir

    def failed(self, rank: int, during: str | None = None, **how: Any) -> RankFailed:
        """A rank has failed; `how` are fields of `RankFailed`."""
        peer, process = self._peers.get(rank), self._ranks[rank]
        return RankFailed(
            rank=rank,
            host=peer.host if peer else socket.gethostname(),
            during=during or (self._during() if peer else "starting up"),
            log_tail=process.log_tail(),
            log_path=str(process.log_path),
            **how,
        )

    def raised(self, rank: int, answer: Answer) -> RankFailed:
        """A rank has answered a request with an error."""
        pending = self._pending.get(answer.number)
        error = answer.error
        return self.failed(
            rank,
            during=pending.name if pending else "an earlier workload",
            error_type=error.error_type if error else None,
            is_ours=error.is_ours if error else False,
            error_message=error.message if error else None,
            rank_traceback=error.traceback if error else None,
        )

    def late(self, pending: Pending, seconds: float) -> DeadlineExceeded:
        """Ranks have not answered in time."""
        silent = ", ".join(map(str, self._pending.silent_on(pending)))
        return DeadlineExceeded(
            f"no answer to {pending.name} within {seconds:g} s from rank {silent}; the slot group "
            f"was killed. Logs: {self._log_dir}"
        )

    def stalled(self, pending: Pending, seconds: float) -> Stalled:
        """Ranks get no further. Has them log their stacks, while they are alive still."""
        if has_batches(pending.request):
            seen, what = "no batch has ended", "a batch"
        else:
            seen, what = "no rank has written anything", "that"
        return Stalled(
            f"{seen} for {seconds:g} s during {pending.name}: the ranks hang, and are ended. Their "
            f"stacks are in {self._log_dir}; if {what} may take that long, raise "
            "stopping.stall_timeout_seconds (null: they may take for ever)",
            log_stacks(self._ranks),
        )

    def _during(self) -> str:
        return " and ".join(each.name for each in self._pending.all()) or "no workload"
