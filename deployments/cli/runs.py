"""`trialflow runs`: compares a storage's trials; the time of a trial's runs; old runs' folders."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from trial_core.common import text_format
from trial_core.errors import CheckpointDamaged, CheckpointNotFound, ConfigError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.experiment_options import HERE, StoragePlace, TrialId
from trialflow.deployments.cli.json_output import AsJson, print_json, stdout_for_json
from trialflow.deployments.cli.tables import local_time, print_table
from trialflow.deployments.cli.waiting import waiting

if TYPE_CHECKING:
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.observe.ledger.time_ledger import RunTime, TimeLedger
    from trial_core.observe.report.stored_trial import StoredTrial

app = App(
    name="runs",
    help="List and compare trials, show the runs of one, and remove folders of runs. The storage "
    "is that of --config or --storage; by default, of ./experiment.yaml, else "
    "./trialflow-runs/checkpoints.",
)

CELL_CHARACTERS = 60
DAY_SECONDS = 86400.0


@app.command(name="list")
def list_(*, place: StoragePlace = HERE, json_: AsJson = False) -> None:
    """List the trials that have saved, the newest last, with their best searcher metric.

    And with the hyperparameters that tell the trials of one experiment apart.
    """
    from trial_core.observe.report.stored_trial import read_trial

    store = place.open_store()
    found = []
    with waiting(f"reading {store.url}"):
        for trial in store.trials():
            try:
                found.append(read_trial(store, trial))
            except (CheckpointNotFound, CheckpointDamaged):
                continue  # deleted meanwhile; or a warning has said that it cannot be read
    found.sort(key=lambda trial: trial.newest.created_at)
    if json_:
        shown = [
            {
                "trial": each.trial,
                "experiment": each.newest.experiment,
                "saved_at": each.newest.created_at,
                "metric": each.metric,
                "results": _with_json_names(each.results),
                "hyperparameters": each.hyperparameters,
            }
            for each in found
        ]
        print_json("runs list", {"trials": shown})
        return
    rows = [
        (
            each.trial,
            local_time(each.newest.created_at),
            *map(_cell, [each.metric, *each.results.values()]),
        )
        for each in found
    ]
    columns = ("trial", "last checkpoint", "metric", "batches", "ended", "best")
    print_table(columns, [row[: len(columns)] for row in rows])
    told = [
        (each.trial, ", ".join(f"{name}={_cell(own[name])}" for name in own))
        for each, own in zip(found, _told_apart(found), strict=True)
        if own
    ]
    if told:
        print()
        print_table(("trial", "hyperparameters"), told)


def _told_apart(trials: Sequence[StoredTrial]) -> list[dict[str, Any]]:
    """Return each trial's hyperparameters of which another one of its experiment has others."""
    from trial_core.observe.report.stored_trial import differing

    groups: dict[str, list[dict[str, Any]]] = {}
    for each in trials:
        groups.setdefault(each.newest.experiment, []).append(each.hyperparameters)
    differ = {experiment: differing(group) for experiment, group in groups.items()}
    return [
        {
            name: value
            for name, value in each.hyperparameters.items()
            if name in differ[each.newest.experiment]
        }
        for each in trials
    ]


@app.command
def compare(
    *trials: Annotated[str, Parameter(required=True)],
    html: Path | None = None,
    place: StoragePlace = HERE,
    json_: AsJson = False,
) -> None:
    """Compare trials: the fields of their experiments that differ, their code and results.

    Args:
        trials: Ids of trials, or the first characters of them: see `trialflow runs list`.
        html: Also write a page that needs no network: with curves over batches, the lines of code
            that differ, and from ten trials on parallel coordinates. Default: no.
    """
    from trial_core.observe.report.stored_trial import read_trial

    store = place.open_store()
    with waiting(f"reading {store.url}"):
        found = [read_trial(store, store.trial(trial)) for trial in trials]
    ids = [each.trial for each in found]
    rows: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for each in found for name in (*each.settings, *each.results)):
        row = [{**each.settings, **each.results}.get(name) for each in found]
        if any(value != row[0] for value in row) or name not in found[0].settings:
            rows[name] = row
    if html is not None:
        from trial_core.observe.report.comparison import comparison_page

        with waiting(f"reading {store.url}"):
            text = comparison_page(found, store)
        try:
            html.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--html {html}: {error.strerror}") from None
        console.note(f"the page is {html.absolute().as_uri()}")
    if json_:
        of_results = {name for each in found for name in each.results}
        results = _with_json_names({name: row for name, row in rows.items() if name in of_results})
        settings = {name: row for name, row in rows.items() if name not in of_results}
        print_json("runs compare", {"trials": ids, "settings": settings, "results": results})
    else:
        print_table(("", *ids), [(name, *map(_cell, row)) for name, row in rows.items()])


def _with_json_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by the names that programs read: ``best_loss``."""
    return {name.replace(" ", "_"): value for name, value in values.items()}


def _cell(value: Any) -> str:
    """A value for a table. On a terminal it is cut: why a run ended may be a long text."""
    text = "" if value is None else text_format.number(value)
    return text_format.shortened(text, *([CELL_CHARACTERS] if sys.stdout.isatty() else []))


@app.command
def sync(
    trial: TrialId,
    /,
    *,
    wait_seconds: float = 60.0,
    place: StoragePlace = HERE,
    json_: AsJson = False,
) -> int:
    """Send a trial's missing records to trackers that could not be reached.

    The trial's next run does the same.

    Args:
        wait_seconds: How long a tracker may take.
    """
    from logging import getLogger

    from trial_core.observe.trackers.stored_journal import sync_trackers
    from trial_core.processes.machine.run_dirs import locked_run_dir

    store = place.open_store()
    trial = store.trial(trial)
    with locked_run_dir(trial) as run_dir:
        before, after = sync_trackers(
            store,
            trial,
            run_dir,
            wait_seconds,
            console.note if json_ else print,
            getLogger(__name__),
            place.trackers(),
        )
    if json_:
        sent = {name: count - after.get(name, 0) for name, count in before.items()}
        print_json("runs sync", {"trial": trial, "sent": sent, "unsent": after})
        return 1 if after else 0
    if not before:
        print(f"the trackers of {trial} have got everything")
    for name, count in before.items():
        left = after.get(name, 0)
        kept = f"; {text_format.plural(left, 'record')} could not be sent" if left else ""
        print(f"{name}: {text_format.plural(count - left, 'record')} sent{kept}")
    return 1 if after else 0


@app.command
def show(trial: TrialId, /, *, place: StoragePlace = HERE, json_: AsJson = False) -> None:
    """Show a trial: its results, its hyperparameters, its page, and its ledger of time.

    The ledger has the use of its slots in all runs, goodput and cost.
    """
    from trial_core.observe.ledger.stored_ledger import read_ledger
    from trial_core.observe.ledger.time_ledger import TimeLedger
    from trial_core.observe.report.stored_trial import read_trial
    from trial_core.observe.trackers.stored_journal import lacking

    store = place.open_store()
    with waiting(f"reading {store.url}"):
        trial = store.trial(trial)
        ledger, unsent = read_ledger(store, trial), lacking(store, trial)
        saved = None
        with suppress(CheckpointNotFound, CheckpointDamaged):
            saved = read_trial(store, trial)
    if not ledger.runs and saved is None:
        raise ConfigError(
            f"no run of trial {trial} has a ledger of time in {store.url}; trials with checkpoints "
            f"there: {', '.join(store.trials()) or 'none'}"
        )
    if json_:
        results = {} if saved is None else _with_json_names(saved.results)
        values = {} if saved is None else saved.hyperparameters
        links: list[str] = [] if saved is None else [*saved.history.links.values()]
        own = {"results": results, "hyperparameters": values, "links": links}
        print_json("runs show", {**ledger.to_json(), **own, "unsent_records": unsent})
        return
    for name, count in unsent.items():
        print(
            f"tracker {name} has not got {text_format.plural(count, 'record')}: trialflow runs "
            f"sync {trial}{place.options}, unless the trial is being trained\n"
        )
    if saved is not None:
        ended = saved.results["ended"] or "not yet, or it was killed"
        facts = [*{**saved.results, "ended": ended}.items(), *saved.hyperparameters.items()]
        rows = [(name, _cell(value)) for name, value in facts]
        print_table((trial, ""), [*rows, *saved.history.links.items()])
        print()
    if not ledger.runs:  # as of an imported trial
        return
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


@app.command
def clean(
    *,
    older_than: float = 7.0,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"])] = False,
    place: StoragePlace = HERE,
    json_: AsJson = False,
) -> None:
    """Remove the local folders of ended runs that are wholly stored. Shows them and asks first.

    Reports, logs and TensorBoard files stay in the storage, and `--resume` continues the trials as
    before. Folders of live runs are kept, and folders with a file that the storage does not have.

    Args:
        older_than: Remove folders in which nothing was written for N days.
        yes: Remove without asking.
    """
    from trial_core.processes.machine.run_dirs import LOCK, home_folder

    if json_ and not yes:
        raise ConfigError("--json cannot ask for confirmation: give --yes as well")
    store, home = place.open_store(), home_folder()
    with waiting(f"comparing {home} with {store.url}"):
        folders = {lock.parent: _size(lock.parent) for lock in sorted(home.glob(f"*/{LOCK}"))}
        kept = {path: _why_kept(path, store, older_than) for path in folders}
    removable = [path for path, why in kept.items() if not why]
    count = text_format.plural(len(removable), "folder")
    size = text_format.size(sum(folders[path] for path in removable))
    removed = []
    with stdout_for_json(json_):
        print_table(
            ("action", "trial", "size", "why"),
            (
                ("keep" if why else "remove", path.name, text_format.size(folders[path]), why)
                for path, why in kept.items()
            ),
        )
        print(f"\nto remove: {count} of {len(folders)} in {home}, {size}")
        if removable and (yes or console.is_confirmed(f"remove {count}", "removed")):
            removed = [
                path for path in removable if _remove(path, folders[path], store, older_than)
            ]
    if json_:
        shown = [{"trial": path.name, "size_bytes": folders[path]} for path in removed]
        left = [{"trial": path.name, "why": why} for path, why in kept.items() if why]
        print_json("runs clean", {"folder": str(home), "removed": shown, "kept": left})


def _remove(path: Path, size_bytes: int, store: CheckpointStore, older_than: float) -> bool:
    """Remove a run's folder, unless a run has begun while a question waited for its answer."""
    from trial_core.processes.machine.run_dirs import locked_if_ended

    if why := _why_kept(path, store, older_than):
        console.warning(f"{path} was not removed: {why}")
        return False
    with locked_if_ended(path) as has_ended:
        if has_ended:
            shutil.rmtree(path)
            print(f"removed {path}, {text_format.size(size_bytes)}", flush=True)
    return has_ended


def _size(folder: Path) -> int:
    """Return the size of the folder's files. A live run may delete some meanwhile."""
    paths = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
    return sum(path.lstat().st_size for path in paths if path.is_symlink() or path.exists())


def _why_kept(path: Path, store: CheckpointStore, older_than_days: float) -> str:
    """Return why a run's folder must stay; empty if it is over, old, and its files are stored."""
    from trial_core.checkpoint import layout
    from trial_core.observe.report.rank_logs import stored_name
    from trial_core.processes.machine.run_dirs import CODE, KEPT, LOCK, RANK_FILE_FOLDERS, holder_of

    if holder := holder_of(path):
        return f"used by {holder}, or its file system has no locks"
    files = {each: each.lstat() for each in sorted(path.rglob("*")) if not each.is_dir()}
    # Not of the lock, whose file filelock 4.1 changes when it is looked at.
    written = (status.st_mtime for each, status in files.items() if each.name != LOCK)
    days = (time.time() - max(written, default=path.stat().st_mtime)) / DAY_SECONDS
    if days < older_than_days:
        return f"written {days:.1f} days ago"
    folder = layout.run_folder(path.name)
    stored = store.storage.sizes(folder)
    copies = {*RANK_FILE_FOLDERS, CODE, KEPT, LOCK}  # a checkpoint's files, or of no use
    for file, status in files.items():
        inner = file.relative_to(path)
        name = None if inner.parts[0] in copies or _is_trackers(inner) else stored_name(path, inner)
        # An empty file is not uploaded.
        if name and status.st_size and stored.get(f"{folder}/{name}") != status.st_size:
            return f"{inner} is not in {store.url}, or not all of it"
    return ""


def _is_trackers(inner: Path) -> bool:
    """Return whether a tracker's file is also stored elsewhere; W&B's offline files are not."""
    from trial_core.observe.trackers.journal import FOLDER

    is_own = inner.parts[0] == FOLDER and len(inner.parts) > 2
    return is_own and not any(part.startswith("offline-run") for part in inner.parts)
