"""The ledger of a trial: the time of all its runs, summed up for people and programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec

from trial_core.checkpoint.manifest import Timestamp
from trial_core.common import text_format
from trial_core.observe.ledger.run_clock import BUCKETS

_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
MAX_PRICE = 1e9
_MILLISECONDS_AN_HOUR = 3_600_000
SHOWN_OF_A_RUN = ("number", "by", "began_at", "until", "is_over", "slots", "per_slot_hour")


class RunTime(msgspec.Struct, frozen=True, kw_only=True):
    """The time of one run, as it is stored."""

    number: int  # of the run's attempt; later runs have greater ones
    by: str  # the driver's user and machine: ``user@host``
    began_at: Timestamp
    until: Timestamp  # the time up to which it is counted
    is_over: bool  # True if the run ended then. If not, the run lives, or it was killed.
    slots: _Natural  # of its last launch
    trained_to: _Natural  # how many batches it and earlier runs have trained, saved or not
    slot_milliseconds: dict[str, _Natural]  # by bucket. A later version may have further buckets.
    # The price of an hour of one slot; None if the experiment has none.
    per_slot_hour: Annotated[float, msgspec.Meta(ge=0, le=MAX_PRICE)] | None = None


class Row(NamedTuple):
    """One bucket for people: its share is ``12.5 %``, and all shares add up to 100 %."""

    bucket: str
    seconds: float
    share: str


@dataclass(frozen=True)
class TimeLedger:
    """The time of a trial's runs, oldest first."""

    trial: str
    runs: Sequence[RunTime]

    @property
    def slot_milliseconds(self) -> dict[str, int]:
        """The sum over all runs, by bucket: `BUCKETS`, then the buckets of later versions."""
        spent: Counter[str] = Counter()
        for run in self.runs:
            spent.update(run.slot_milliseconds)
        return {bucket: spent[bucket] for bucket in (*BUCKETS, *sorted({*spent} - {*BUCKETS}))}

    @property
    def total_seconds(self) -> float:
        return sum(self.slot_milliseconds.values()) / 1000

    @property
    def goodput(self) -> float | None:
        """The share of time in which batches were first trained; None without any time."""
        spent = self.slot_milliseconds
        total = sum(spent.values())
        return spent["train"] / total if total else None

    @property
    def stall_share(self) -> float | None:
        """The share of the loop's time spent waiting for checkpoints; None without any time."""
        spent = self.slot_milliseconds
        loop = sum(spent[each] for each in ("train", "redone", "validate", "checkpoint_stall"))
        return spent["checkpoint_stall"] / loop if loop else None

    @property
    def cost(self) -> float | None:
        """The cost of the slots; None if no run has a price. Runs without a price count nothing,
        nor does time in the queue, where no slot is held."""
        prices = [
            sum(ms for bucket, ms in run.slot_milliseconds.items() if bucket != "queue")
            * run.per_slot_hour
            / _MILLISECONDS_AN_HOUR
            for run in self.runs
            if run.per_slot_hour is not None
        ]
        return sum(prices) if prices else None

    @property
    def rows(self) -> list[Row]:
        """The buckets that are not empty."""
        spent = {bucket: ms for bucket, ms in self.slot_milliseconds.items() if ms}
        return [
            Row(bucket.replace("_", " "), ms / 1000, f"{tenths // 10}.{tenths % 10} %")
            for (bucket, ms), tenths in zip(
                spent.items(), _parts_of_thousand(list(spent.values())), strict=True
            )
        ]

    @property
    def headline(self) -> str:
        """``goodput 61.3 % of 3 h 20 min slot time in 2 runs, cost 8.35``."""
        share = next((row.share for row in self.rows if row.bucket == "train"), "0.0 %")
        runs = text_format.plural(len(self.runs), "run")
        cost = "" if self.cost is None else f", cost {self.cost:.2f}"
        return (
            f"goodput {share} of {text_format.duration(self.total_seconds)} slot time in {runs}"
            f"{cost}"
        )

    def notes(self, is_live: bool = False) -> list[str]:
        """What the figures leave out; `is_live` if the last run is this process's."""
        others = self.runs[:-1] if is_live else self.runs
        notes = [
            f"run {run.number} has no recorded end, because it still runs or was killed: its time "
            f"counts until {run.until[:19].replace('T', ' ')} UTC"
            for run in others
            if not run.is_over
        ]
        unpriced = sum(run.per_slot_hour is None for run in self.runs)
        if unpriced and self.cost is not None:
            runs = text_format.plural(unpriced, "run")
            notes.append(f"the cost leaves out {runs} without a price (cost.per_slot_hour)")
        return notes

    def to_json(self) -> dict[str, Any]:
        """The ledger as plain data, with one entry for each run."""
        return {
            "trial": self.trial,
            **_summary(self),
            "runs": [
                {name: getattr(run, name) for name in SHOWN_OF_A_RUN}
                | _summary(TimeLedger(self.trial, (run,)))
                for run in self.runs
            ],
        }


def _summary(ledger: TimeLedger) -> dict[str, Any]:
    return {
        "slot_seconds": {name: ms / 1000 for name, ms in ledger.slot_milliseconds.items()},
        "total_slot_seconds": ledger.total_seconds,
        "goodput": ledger.goodput,
        "cost": ledger.cost,
    }


def _parts_of_thousand(amounts: Sequence[int]) -> Iterable[int]:
    """The shares in tenths of a percent, rounded so that they add up to 1000."""
    total = sum(amounts)
    shares = [1000 * amount // total for amount in amounts]
    by_rest = sorted(range(len(amounts)), key=lambda i: 1000 * amounts[i] % total, reverse=True)
    for i in by_rest[: 1000 - sum(shares)]:
        shares[i] += 1
    return shares
