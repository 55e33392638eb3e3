"""`SearcherContext`: how long to train, in the form in which Determined's searchers say it."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

from trial_core.errors import TrialError, TrialValueError
from trial_core.rank.core_api.script_host import ScriptHost


class SearcherMode(enum.Enum):
    """Which ranks call `SearcherContext.operations`. No mode makes ranks wait for each other.

    Attributes:
        WorkersAskChief: every rank.
        ChiefOnly: rank 0 alone.
    """

    WorkersAskChief = "WORKERS_ASK_CHIEF"
    ChiefOnly = "CHIEF_ONLY"


class Unit(enum.Enum):
    """The unit of a length. Lengths in records are refused: `RECORDS` is here for comparisons."""

    EPOCHS = "EPOCHS"
    RECORDS = "RECORDS"
    BATCHES = "BATCHES"


class SearcherOperation:
    """Train up to `length`, validate, report. Follows Determined's class.

    Attributes:
        is_completed: True if `report_completed` was called on this rank.
    """

    def __init__(self, length: int, unit: Unit, host: ScriptHost) -> None:
        self._length, self.is_completed = length, False
        self._unit = unit
        self._host = host

    @property
    def length(self) -> int:
        """Where training ends: the number in ``searcher.max_length``, from the trial's start."""
        return self._length

    def report_progress(self, length: float) -> None:
        """Show how far training is, as `TrainContext.set_status` does. Call it on rank 0 alone.

        Args:
            length: in the unit of `length`.

        Raises:
            TrialError: a rank other than 0 calls this, or it is called after `report_completed`, or
                `length` is not a number.
        """
        self._require_rank_0("report_progress")
        if isinstance(length, bool) or not isinstance(length, (int, float)):
            raise TrialError(f"operation.report_progress takes a number, got {length!r}")
        if self.is_completed and length != self.length:
            raise TrialError(
                f"operation.report_progress({length!r}) was called after report_completed"
            )
        self._host.set_status(f"{length:g} of {self.length} {self._unit.value.lower()}")

    def report_completed(self, searcher_metric: Any) -> None:
        """Say that the operation is done. Call it once, on rank 0 alone.

        Args:
            searcher_metric: accepted as in Determined, but not kept: the best checkpoint is chosen
                by the metrics that `TrainContext.report_validation_metrics` reports.

        Raises:
            TrialError: a rank other than 0 calls this, or it is called twice.
        """
        self._require_rank_0("report_completed")
        if self.is_completed:
            raise TrialError("operation.report_completed was called twice; call it once")
        self.is_completed = True

    def _require_rank_0(self, method: str) -> None:
        rank = self._host.distributed.get_rank()
        if rank != 0:
            raise TrialError(
                f"operation.{method} was called on rank {rank}: call it on rank 0 alone "
                "(if context.distributed.rank == 0)"
            )


class SearcherContext:
    """Says how long to train. Follows Determined's class::

        for operation in context.searcher.operations():
            while steps < operation.length:
                steps += 1
                ...
            if context.distributed.rank == 0:
                operation.report_completed(loss)

    There is one operation, whose length is that of the run.
    """

    def __init__(self, host: ScriptHost) -> None:
        self._host = host

    def operations(
        self, searcher_mode: SearcherMode = SearcherMode.WorkersAskChief, auto_ack: bool = True
    ) -> Iterator[SearcherOperation]:
        """The one operation of a run: to train up to ``searcher.max_length``. Not collective.

        A script that continues a trial gets the same operation again: its length counts from the
        trial's start. A script that is told to stop leaves the loop.

        Args:
            searcher_mode: which ranks call this.
            auto_ack: accepted as in Determined, without effect.

        Raises:
            TrialError: the experiment has no ``searcher.max_length``; or with `ChiefOnly`, a rank
                other than 0 calls this; or rank 0 asks for the next operation without
                `SearcherOperation.report_completed`.
        """
        rank, length = self._host.distributed.get_rank(), self._host.max_length
        if SearcherMode(searcher_mode) is SearcherMode.ChiefOnly and rank != 0:
            raise TrialError(
                f"searcher.operations was called on rank {rank} with SearcherMode.ChiefOnly: call "
                "it on rank 0 alone, or on every rank without this mode"
            )
        if length is None or not isinstance(length.value, int):
            raise TrialValueError(
                "searcher.operations: the experiment does not say how long to train; set "
                "searcher.max_length, such as {batches: 1000}, in the experiment file or, without "
                "a driver, in exp_conf; or take the length from the script's arguments"
            )
        operation = SearcherOperation(length.value, Unit(length.unit.upper()), self._host)
        yield operation
        if rank == 0 and not operation.is_completed:
            raise TrialError(
                "searcher.operations: the operation has ended without a call of its "
                "report_completed; call it after the last validation, or leave the loop with break"
            )

    def get_configured_units(self) -> Unit | None:
        """The unit of ``searcher.max_length``, or None without it. A plain number is batches."""
        length = self._host.max_length
        return None if length is None else Unit(length.unit.upper())

    def acknowledge_out_of_ops(self) -> None:
        """Does nothing: there is one operation."""
