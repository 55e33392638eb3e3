"""The part of `trialflow checkpoints prune` that sweeps what killed runs have left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trial_core import text_format
from trialflow.deployments.cli import console
from trialflow.deployments.cli.tables import local_time, print_table, shortest_unique

if TYPE_CHECKING:
    from trial_core.checkpoint.intents import SweptUpload
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.retention.leftovers import Leftover, SweptLeftovers

AFTER_DAYS = 7.0
"""As `trial_core.retention.leftovers.LEFTOVER_AGE_DAYS`, which is not imported to show a help."""

Only = Annotated[
    bool,
    Parameter(
        negative=(),
        help="Delete no checkpoint, only what killed runs have begun to upload; needs no rules.",
    ),
]
AfterDays = Annotated[
    float,
    Parameter(help="Of a killed run: after so many days without a sign of life of its trial."),
]


def find(
    store: CheckpointStore, after_days: float, trial: str | None, experiment: str | None
) -> list[Leftover]:
    """What was begun to upload and is not committed; see `find_leftovers`."""
    from trial_core.retention.leftovers import find_leftovers

    return find_leftovers(store, after_days=after_days, trial=trial, experiment=experiment)


def show(left: list[Leftover]) -> None:
    """As a table, after that of the checkpoints."""
    print("uploads that were never committed:\n")
    length = shortest_unique([each.uuid for each in left])
    columns = ("action", "uuid", "trial", "begun", "files", "size", "why")
    print_table(columns, (_cells(each, length) for each in left))
    gone = [each for each in left if not each.keep]
    size = text_format.size(sum(each.size_bytes for each in gone))
    print(f"\nto delete: {len(gone)} of {text_format.plural(len(left), 'leftover')}, {size}")


def delete(
    store: CheckpointStore, left: list[Leftover], after_days: float, is_silent: bool
) -> SweptLeftovers:
    """Delete those that need not be kept; see `sweep_leftovers`."""
    from trial_core.retention.leftovers import sweep_leftovers

    def say(swept: SweptUpload) -> None:
        if not is_silent:
            print(f"deleted {swept}", flush=True)

    done = sweep_leftovers(store, left, after_days=after_days, on_swept=say)
    for trial, why in done.spared.items():
        console.warning(f"what is left of trial {trial} stays: {why}")
    return done


def _cells(leftover: Leftover, length: int) -> tuple[str, ...]:
    return (
        "keep" if leftover.keep else "delete",
        leftover.uuid[:length],
        leftover.trial,
        local_time(leftover.begun_at) if leftover.begun_at else "?",
        str(leftover.files),
        text_format.size(leftover.size_bytes),
        leftover.why,
    )
