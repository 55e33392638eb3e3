"""The failures of a slot group's ranks: collects errors, and finds the first cause among them.

When a rank ends, the other ranks raise from the collectives that it has left, and their errors may
arrive before its own. So failures are collected for a moment before one is reported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trial_core.errors import RankFailed, Stalled
from trial_core.messages import Peer, RankError, RunScript
from trial_core.processes.machine.child import signal_name
from trial_core.processes.slots.pending_requests import PendingRequest, PendingRequests
from trial_core.processes.slots.rank_handle import RankHandle
from trial_core.processes.slots.stacks import log_stacks
from trial_core.processes.slots.stall_clock import has_batches

# How long to wait for other ranks' failures after the first one.
FIRST_CAUSE_SECONDS = 1.0
# How long a rank may live after its connection has closed. Usually it has died, and the watcher of
# its process reports that with the signal.
DISCONNECTED_SECONDS = 5.0


class FirstCause:
    """Collects the failures of a group's ranks, and reports the first cause once, in a new thread.

    Ranks, peers and requests are the group's own objects; it adds to them meanwhile.
    """

    def __init__(
        self,
        world_size: int,
        ranks: Sequence[RankHandle],
        peers: Mapping[int, Peer],
        pending: PendingRequests,
        log_dir: Path,
        on_first_cause: Callable[[RankFailed], object],
    ) -> None:
        self._world_size = world_size
        self._ranks = ranks
        self._peers = peers
        self._pending = pending
        self._log_dir = log_dir
        self._on_first_cause = on_first_cause
        self._noted: list[RankFailed] = []
        self._changed = threading.Condition()

    # ------------------------------------------------------------------- failures of one rank

    def note_exit(self, rank: int, code: int) -> None:
        """Note that a rank's process has ended; `code` is as in `subprocess`."""
        if code >= 0:
            self._note(rank, exit_code=code)
        else:
            self._note(rank, signal_name=signal_name(-code))

    def note_raised(self, rank: int, number: int, error: RankError) -> None:
        """Note that a rank has answered request `number` with an error."""
        pending = self._pending.get(number)
        self._note(
            rank,
            during=pending.request.title if pending else "an earlier stage",
            error_type=error.error_type,
            is_ours=error.is_ours,
            error_message=error.message,
            rank_traceback=error.traceback,
            batches_trained=error.batches_trained,
        )

    def note_node_lost(self, ranks: Sequence[int], why: str) -> None:
        for rank in ranks:
            self._note(rank, node_lost=why)

    def note_disconnected(self, rank: int, protocol_error: str | None) -> None:
        """Note that a rank's connection has closed, because of `protocol_error` if not None."""
        if protocol_error is not None:
            self._note(rank, error_type="ProtocolError", error_message=protocol_error)
            return
        if not self._ranks[rank].is_launched:
            self._note(rank)
            return
        timer = threading.Timer(DISCONNECTED_SECONDS, lambda: self._note(rank))
        timer.daemon = True
        timer.start()

    def _note(self, rank: int, during: str | None = None, **fields: Any) -> None:
        peer, process = self._peers.get(rank), self._ranks[rank]
        failure = RankFailed(
            rank=rank,
            host=peer.host if peer else process.host,
            during=during or (self._pending_names() if peer else "its start"),
            log_tail=process.log_tail(),
            log_path=str(process.log_path) if process.is_launched else "",
            **fields,
        )
        with self._changed:
            self._noted.append(failure)
            self._changed.notify_all()
            is_first = len(self._noted) == 1
        if is_first:
            threading.Thread(target=self._report, name="first-cause", daemon=True).start()

    def _report(self) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: len({f.rank for f in self._noted}) == self._world_size, FIRST_CAUSE_SECONDS
            )
            cause = first_cause(self._noted)
        self._on_first_cause(cause)

    def _pending_names(self) -> str:
        pending = self._pending.all()
        if len(pending) > 1:  # a script waits for the others, in its fit or for its checkpoint
            pending = [each for each in pending if not isinstance(each.request, RunScript)]
        return " and ".join(each.request.title for each in pending) or "the wait between stages"

    # ----------------------------------------------------------------- failures of all ranks

    def stalled(self, pending: PendingRequest, seconds: float) -> Stalled:
        """The error for ranks that make no progress. Has the ranks log their stacks."""
        name = pending.request.title
        if has_batches(pending.request):
            seen, what = "no batch has ended", "a batch"
        else:
            seen, what = "no rank has written anything", name
        return Stalled(
            f"{seen} for {seconds:g} s during {name}: the ranks hang and were ended. "
            f"Their stacks are in {self._log_dir}. If {what} may take that long, set "
            f"stopping.stall_timeout_seconds above {seconds:g} (null: no limit)",
            log_stacks(self._ranks),
            name,
            seconds,
        )


def first_cause(failures: Sequence[RankFailed]) -> RankFailed:
    """The failure that has probably led to the others; they are in order of arrival.

    A death precedes any exception. A rank that raised stays alive and breaks no collective, but a
    rank that died makes the others raise. If one rank raised and died, its exception led to its
    death: NCCL's watchdog ends a process whose device has failed.
    """
    raised = {failure.rank for failure in failures if failure.error_type is not None}
    own_causes = [
        failure
        for failure in failures
        if failure.error_type is not None or failure.rank not in raised
    ]
    died = {failure.rank for failure in failures if failure.error_type is None}
    return min(own_causes, key=lambda each: (each.error_type is not None, each.rank not in died))
