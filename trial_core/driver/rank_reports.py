"""Lets metrics that a script reports for a step count once, from whichever rank they come."""

from __future__ import annotations

import msgspec

from trial_core.common.text_format import shortened
from trial_core.errors import TrialError
from trial_core.messages import MetricsReported

REMEMBERED = 1000
"""The reports of which another rank's copy is noticed: ranks may be some steps behind others."""

Values = dict[str, int]
"""The hash of each metric's value: values may be large."""


class RankReports:
    """Compares the reports of ranks. A rank may report a step again, and replaces its metrics."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str, int], tuple[int, Values]] = {}

    def counts(self, report: MetricsReported) -> bool:
        """Note a report. Return False if another rank has reported the same of this step.

        Raises:
            TrialError: another rank has reported something else. Which one comes first is chance.
        """
        step = report.kind, report.group, report.steps_completed
        values = {name: hash(msgspec.msgpack.encode(it)) for name, it in report.metrics.items()}
        rank, known = self._first.get(step, (report.rank, values))
        if rank == report.rank:
            self._first[step] = rank, values
            if len(self._first) > REMEMBERED:
                del self._first[next(iter(self._first))]
            return True
        if values == known:
            return False
        name = next(name for name in {**values, **known} if values.get(name) != known.get(name))
        here = shortened(repr(report.metrics[name]), 80) if name in values else "missing"
        raise TrialError(
            f"rank {rank} and rank {report.rank} have both reported {report.title}, and not the "
            f'same: "{name}" is {here} on rank {report.rank}; reduce the metrics over the ranks, '
            "and report them on one rank (if context.distributed.rank == 0)"
        )
