"""The sums of a ledger of time."""

from __future__ import annotations

from typing import Any

import pytest

from trial_core.observe.ledger.time_ledger import RunTime, TimeLedger


def run_time(number: int = 1, **changes: Any) -> RunTime:
    """A run of two slots that has ended."""
    fields: dict[str, Any] = {
        "number": number,
        "by": "ann@node-1",
        "began_at": "2031-05-09T17:00:00.000000Z",
        "until": "2031-05-09T18:00:00.000000Z",
        "is_over": True,
        "slots": 2,
        "trained_to": 13,
        "slot_milliseconds": {"train": 6_300_000, "queue": 900_000},
    }
    return RunTime(**{**fields, **changes})


def test_runs_are_summed() -> None:
    """By bucket; goodput is the share of training for the first time."""
    second = run_time(2, slot_milliseconds={"redone": 700_000, "train": 100_000})
    ledger = TimeLedger("gpt-7", (run_time(), second))
    assert {name: ms for name, ms in ledger.slot_milliseconds.items() if ms} == {
        "queue": 900_000, "train": 6_400_000, "redone": 700_000,
    }  # fmt: skip
    assert ledger.total_seconds == 8000
    assert ledger.goodput == 0.8
    assert ledger.headline == "goodput 80.0 % of 2 h 13 min slot time in 2 runs"
    assert ledger.notes() == []


def test_the_cost_is_that_of_the_slots_held() -> None:
    """Time in the queue costs nothing. Each run has its price; runs without one are named."""
    ledger = TimeLedger("gpt-7", (run_time(per_slot_hour=4.0), run_time(2), run_time(3)))
    assert ledger.cost == pytest.approx(6300 / 3600 * 4)
    assert ledger.headline.endswith(", cost 7.00")
    assert ledger.notes() == ["the cost leaves out 2 runs without a price (cost.per_slot_hour)"]
    assert TimeLedger("gpt-7", (run_time(),)).cost is None


@pytest.mark.parametrize("amounts", [(1, 1, 1), (1, 1, 1, 1, 1, 1, 1), (999_999, 1), (7, 7, 13)])
def test_shares_add_up_to_a_hundred_per_cent(amounts: tuple[int, ...]) -> None:
    """As they are printed. Buckets of later versions are among them."""
    names = ("train", "idle", "build", "drain", "queue", "launch", "redone")
    spent = dict(zip(names, amounts, strict=False))
    rows = TimeLedger("gpt-7", (run_time(slot_milliseconds=spent),)).rows
    assert {row.bucket for row in rows} == set(spent)
    tenths = [round(10 * float(row.share.removesuffix(" %"))) for row in rows]
    assert sum(tenths) == 1000


def test_a_run_without_an_end_is_named() -> None:
    """With the time up to which it counts; in its own report the last run lives."""
    open_run = run_time(2, is_over=False)
    ledger = TimeLedger("gpt-7", (open_run, run_time(3, is_over=False)))
    first, second = ledger.notes()
    assert first == (
        "run 2 has no recorded end, because it still runs or was killed: its time counts until "
        "2031-05-09 18:00:00 UTC"
    )
    assert second.startswith("run 3 ")
    assert ledger.notes(is_live=True) == [first]


def test_as_json() -> None:
    """All buckets, the sum, and the same for each run."""
    shown = TimeLedger("gpt-7", (run_time(per_slot_hour=4.0), run_time(2))).to_json()
    assert shown["slot_seconds"]["train"] == 12600
    assert shown["slot_seconds"]["redone"] == 0
    assert sum(shown["slot_seconds"].values()) == shown["total_slot_seconds"] == 14400
    first, second = shown["runs"]
    assert (first["number"], first["cost"], first["goodput"]) == (1, 7.0, 0.875)
    assert (second["cost"], second["total_slot_seconds"]) == (None, 7200)


def test_nothing_was_spent() -> None:
    """A ledger without runs has no goodput and no rows."""
    ledger = TimeLedger("gpt-7", ())
    assert (ledger.goodput, ledger.cost, ledger.rows) == (None, None, [])
