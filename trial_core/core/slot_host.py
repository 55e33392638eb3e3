"""The host of a script in a slot: its driver commits checkpoints, keeps metrics and sends stops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from trial_core.cluster_info import ScriptInfo
from trial_core.config.lengths import named_length
from trial_core.context import RunInfo
from trial_core.controller.checkpoint_files import CheckpointFiles
from trial_core.core.script_host import ScriptHost
from trial_core.core.stored_checkpoints import StoredCheckpoints
from trial_core.distributed import DistributedContext
from trial_core.messages import Activity, CheckpointWritten, MetricsReported
from trial_core.run.observer import MetricsKind
from trial_core.slots.stop_barrier import StopBarrier

ScriptMessage = Activity | CheckpointWritten | MetricsReported


class SlotHost(ScriptHost):
    """`ScriptHost` in a rank process, for one run of the script.

    Args:
        run: the trial's, with its instruments.
        emit: sends to the driver.
        stop_barrier: holds this rank's part of a stop.

    Attributes:
        was_preempted: whether the script was told to save and end.
    """

    def __init__(
        self,
        info: ScriptInfo,
        distributed: DistributedContext,
        run: RunInfo,
        files: CheckpointFiles,
        checkpoints: StoredCheckpoints,
        emit: Callable[[ScriptMessage], None],
        stop_barrier: StopBarrier,
    ) -> None:
        self.info = info
        self.distributed = distributed
        self.checkpoints = checkpoints
        self.max_length = named_length(run.experiment)
        self.was_preempted = False
        self._run = run
        self._files = files
        self._emit = emit
        self._stop_barrier = stop_barrier
        self._released: set[str] = set()
        self._has_released = threading.Condition()

    def report(self, kind: MetricsKind, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        self._run.batches_trained = steps_completed
        self._run.instruments.report(kind, steps_completed, metrics)
        self._emit(
            MetricsReported(kind=kind, steps_completed=steps_completed, metrics=dict(metrics))
        )

    def set_status(self, text: str) -> None:
        self._emit(Activity(text=text))

    def should_preempt(self) -> bool:
        # A call is a step: the ranks agree on the last one without a collective.
        self.was_preempted = self.was_preempted or not self._stop_barrier.may_begin_step()
        return self.was_preempted

    def commit(self, uuid: str, steps_completed: int, shard: bool) -> None:
        if shard:
            self.distributed.allgather(None)  # all ranks have written their parts
        if self.distributed.get_rank() == 0:
            self._run.batches_trained = steps_completed
            self._emit(CheckpointWritten(uuid=uuid, steps_completed=steps_completed))
        with self._has_released:
            # Not collective: an upload may last longer than the deadline of collectives.
            self._has_released.wait_for(lambda: uuid in self._released)

    def released(self, uuid: str) -> None:
        """Note that the driver has committed a checkpoint. Called in the I/O lane."""
        with self._has_released:
            self._released.add(uuid)
            self._has_released.notify_all()
