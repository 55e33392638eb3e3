"""`trialflow runs clean`: removes the folders of old runs from this machine."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trial_core.common import text_format
from trialflow.deployments.cli import console
from trialflow.deployments.cli.experiment_options import ConfigFile, StorageOption, open_store
from trialflow.deployments.cli.tables import print_table
from trialflow.deployments.cli.waiting import waiting

if TYPE_CHECKING:
    from trial_core.checkpoint.store import CheckpointStore

DAY_SECONDS = 86400.0


def clean(
    *,
    older_than: Annotated[
        float, Parameter(help="Remove folders in which nothing was written for N days.")
    ] = 7.0,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], help="Remove without asking.")] = False,
    config: ConfigFile = None,
    storage: StorageOption = None,
) -> int:
    """Remove the local folders of ended runs that are wholly stored. Shows them and asks first.

    Reports, logs and TensorBoard files stay in the storage, and `--resume` continues the trials as
    before. Folders of live runs are kept, and folders with a file that the storage does not have.
    """
    from trial_core.processes.machine.run_dirs import LOCK, home_folder, locked_if_ended

    store, home = open_store(config, storage), home_folder()
    with waiting(f"comparing {home} with {store.url}"):
        folders = {lock.parent: _size(lock.parent) for lock in sorted(home.glob(f"*/{LOCK}"))}
        kept = {path: _why_kept(path, store, older_than) for path in folders}
    print_table(
        ("action", "trial", "size", "why"),
        (
            ("keep" if why else "remove", path.name, text_format.size(folders[path]), why)
            for path, why in kept.items()
        ),
    )
    removable = [path for path, why in kept.items() if not why]
    count = text_format.plural(len(removable), "folder")
    size = text_format.size(sum(folders[path] for path in removable))
    print(f"\nto remove: {count} of {len(folders)} in {home}, {size}")
    if not removable or not (yes or console.is_confirmed(f"remove {count}", "removed")):
        return 0
    for path in removable:
        # Once more: a run may have begun while the question waited for its answer.
        if why := _why_kept(path, store, older_than):
            console.warning(f"{path} was not removed: {why}")
            continue
        with locked_if_ended(path) as has_ended:
            if has_ended:
                shutil.rmtree(path)
                print(f"removed {path}, {text_format.size(folders[path])}", flush=True)
    return 0


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
    days = (time.time() - max(status.st_mtime for status in files.values())) / DAY_SECONDS
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
