"""Journal and states in the trial's storage, for its next run on another machine."""

from __future__ import annotations

from logging import Logger, LoggerAdapter
from pathlib import Path
from typing import Any

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError, TrialflowError
from trial_core.storage.parallel import CancelSignal
from trial_core.trackers.journal import FOLDER, JOURNAL, STORED, age

AnyLogger = Logger | LoggerAdapter[Any]


def adopt_stored(store: CheckpointStore, trial: str, run_dir: Path, logger: AnyLogger) -> None:
    """Take the stored journal and states, if the trial was on another machine since."""
    if store.is_process_local:
        return
    folder = run_dir / FOLDER
    local = folder / JOURNAL
    stored = layout.run_file_key(trial, FOLDER)
    try:
        journal = store.storage.read(f"{stored}/{JOURNAL}")
        if journal is None or (local.exists() and age(local.read_bytes()) >= age(journal)):
            return
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("*.json"):
            file.unlink()
        for key in store.storage.sizes(stored):
            name = key.rpartition("/")[2]
            if name.endswith(".json") and (data := store.storage.read(f"{stored}/{name}")):
                (folder / name).write_bytes(data)
        local.write_bytes(journal)
    except (OSError, TrialflowError, msgspec.MsgspecError) as error:
        logger.warning(
            "what trial %s has told its trackers before is not known, so they may get it twice: %s",
            trial, error,
        )  # fmt: skip


def keep(store: CheckpointStore, trial: str, run_dir: Path, logger: AnyLogger) -> None:
    """Store journal and states, for the trial's next run on another machine."""
    if store.is_process_local:
        return
    try:
        for pattern in STORED:
            for file in sorted(run_dir.glob(pattern)):
                key = layout.run_file_key(trial, file.relative_to(run_dir).as_posix())
                store.storage.upload(file, key, CancelSignal())
    except (OSError, StorageError) as error:
        logger.warning("the journal of trial %s is not stored: %s", trial, error)
