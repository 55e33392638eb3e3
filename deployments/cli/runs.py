"""`trialflow runs`: what the runs of a trial have done with their time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from cyclopts import App

from trial_core import text_format
from trial_core.errors import ConfigError
from trialflow.deployments.cli.clean_runs import clean
from trialflow.deployments.cli.experiment_options import ConfigFile, Storage, open_store
from trialflow.deployments.cli.tables import AsJson, local_time, print_table

if TYPE_CHECKING:
    from trial_core.ledger.time_ledger import RunTime, TimeLedger

app = App(
    name="runs",
    help="Show the runs of a trial, and remove their folders. The storage is that of --config or "
    "--storage; by default, of ./experiment.yaml, else ./trialflow-runs/checkpoints.",
)
app.command(clean)


@app.command
def show(
    trial: str, /, *, config: ConfigFile = None, storage: Storage = None, json_: AsJson = False
) -> int:
    """Show the ledger of time of a trial: what its slots did in all runs, goodput and cost.

    Parameters
    ----------
    trial
        The trial's id: `trialflow checkpoints list` shows those that have saved.
    """
    from trial_core.ledger.stored_ledger import read_ledger
    from trial_core.ledger.time_ledger import TimeLedger

    store = open_store(config, storage)
    ledger = read_ledger(store, trial)
    if not ledger.runs:
        raise ConfigError(
            f"no run of trial {trial} has a ledger of time in {store.url}; trials with checkpoints "
            f"there: {', '.join(store.trials()) or 'none'}"
        )
    if json_:
        print(json.dumps(ledger.to_json(), indent=2))
        return 0
    print(f"{trial}: {ledger.headline}\n")
    print_table(
        ("slots", "time", "share"),
        [(row.bucket, text_format.duration(row.seconds), row.share) for row in ledger.rows],
    )
    print()
    print_table(
        ("run", "by", "began", "counted until", "slots", "slot time", "goodput", "cost"),
        [_row(run, TimeLedger(trial, (run,))) for run in ledger.runs],
    )
    for note in ledger.notes():
        print(f"\n{note}")
    return 0


def _row(run: RunTime, ledger: TimeLedger) -> tuple[str, ...]:
    return (
        str(run.number),
        run.by,
        local_time(run.began_at),
        local_time(run.until),
        str(run.slots),
        text_format.duration(ledger.total_seconds),
        "" if ledger.goodput is None else f"{100 * ledger.goodput:.1f} %",
        "" if ledger.cost is None else f"{ledger.cost:.2f}",
    )
