"""Journal and states in the trial's storage: for its next run, and for `trialflow runs sync`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.storage.local_files import replace_file
from trial_core.checkpoint.store import CheckpointStore
from trial_core.common.any_logger import AnyLogger
from trial_core.common.decoding import decode
from trial_core.errors import CheckpointDamaged, ConfigError, TrialflowError
from trial_core.observe.report.rank_logs import stored_name
from trial_core.observe.trackers.journal import (
    DRIVER_EVENTS,
    FOLDER,
    JOURNAL,
    ORDER,
    SENDER_LOG,
    State,
    age,
    first_line,
    read_state,
    set_damaged_aside,
)
from trial_core.observe.trackers.sender import SenderOrder, SenderProcess, unsent
from trial_core.observe.trackers.tracker import find_tracker


def adopt_stored(store: CheckpointStore, trial: str, run_dir: Path, logger: AnyLogger) -> None:
    """Take the stored journal and states, if the trial was on another machine since. A damaged
    journal, here or there, is set aside."""
    folder = run_dir / FOLDER
    try:
        _set_damaged_aside(folder, logger)
        if not store.is_process_local and _has_adopted(store, trial, folder):
            _set_damaged_aside(folder, logger)
    except (OSError, TrialflowError, msgspec.MsgspecError) as error:
        logger.warning(
            "what trial %s has told its trackers before is not known, so they may get it twice: %s",
            trial, error,
        )  # fmt: skip


def _set_damaged_aside(folder: Path, logger: AnyLogger) -> None:
    if damage := set_damaged_aside(folder):
        logger.warning("trackers may lack something of earlier runs: %s", damage)


def _has_adopted(store: CheckpointStore, trial: str, folder: Path) -> bool:
    """Take the stored journal if it is not older than the local one; return whether it is newer."""
    local = folder / JOURNAL
    stored = layout.run_file_key(trial, FOLDER)
    journal = store.storage.read(f"{stored}/{JOURNAL}")
    if journal is None:
        return False
    journal = journal[: journal.rfind(b"\n") + 1]
    ours = age(local.read_bytes()) if local.exists() else None
    theirs = age(journal)
    if ours is not None and ours > theirs:
        return False
    states: dict[Path, bytes] = {}
    for key in store.storage.sizes(stored):
        file = folder / key.rpartition("/")[2]
        if file.suffix != ".json" or not (data := store.storage.read(f"{stored}/{file.name}")):
            continue
        # Written again from its fields: in a shared folder, it may be a link to a file of this
        # user's, and `keep` stores what is here.
        with suppress(msgspec.MsgspecError):
            if file.name == ORDER:
                states[file] = _adopted(file, decode(data, SenderOrder))
                continue
            state, is_ours = decode(data, State), ours == theirs and file.exists()
            if not is_ours or read_state(file).sent < state.sent:
                states[file] = msgspec.json.encode(state)
    # The journal first: a state behind the journal sends twice; one ahead of it loses records.
    if ours != theirs:
        _take_segments(store, stored, folder, journal)
        replace_file(local, journal)
    for file, data in states.items():
        replace_file(file, data)
    return ours != theirs


def _take_segments(store: CheckpointStore, stored: str, folder: Path, journal: bytes) -> None:
    """Fetch the segments that this machine lacks, without damaged ones: readers miss those."""
    with suppress(msgspec.MsgspecError):  # readers see that, too
        for segment in first_line(journal)[0].segments:
            file = folder / segment.name
            if file.exists() and segment.matches(file.read_bytes()):
                continue
            file.unlink(missing_ok=True)
            with suppress(CheckpointDamaged):
                data = store.storage.read(f"{stored}/{segment.name}")
                if data is not None and segment.matches(data):
                    replace_file(file, data)


def _adopted(file: Path, stored: SenderOrder) -> bytes:
    """The stored order, marked as adopted; this machine's own if both name the same trackers."""
    with suppress(OSError, msgspec.MsgspecError):
        own = file.read_bytes()
        if decode(own, SenderOrder).trackers == stored.trackers:
            return own
    return msgspec.json.encode(msgspec.structs.replace(stored, is_adopted=True))


def keep(
    store: CheckpointStore, trial: str, run_dir: Path, logger: AnyLogger, is_end: bool = True
) -> None:
    """Store states and journal; at a run's end not if another run, superseding this one, has stored
    a newer journal."""
    if store.is_process_local:
        return
    try:
        _store(store, trial, run_dir, is_end)
    except (OSError, TrialflowError, msgspec.MsgspecError) as error:
        logger.warning("the journal of trial %s is not stored: %s", trial, error)


def _store(store: CheckpointStore, trial: str, run_dir: Path, is_end: bool) -> None:
    journal = run_dir / FOLDER / JOURNAL
    if is_end:
        stored = store.storage.read(layout.run_file_key(trial, f"{FOLDER}/{JOURNAL}"))
        if stored is not None and age(stored) > age(journal.read_bytes()):
            return
    files = sorted((run_dir / FOLDER).glob("*.json"))
    if is_end:  # the sender's writes after the report's last upload
        files += [*sorted((run_dir / DRIVER_EVENTS).glob("*")), run_dir / SENDER_LOG]
    for file in filter(Path.exists, files):
        name = stored_name(run_dir, file.relative_to(run_dir))
        if name and (data := file.read_bytes()):  # at once: it is being written
            store.storage.write(layout.run_file_key(trial, name), data)
    # The journal after the states: a state must not be ahead of it. Before it its segments, which
    # never change.
    if journal.exists() and (data := journal.read_bytes()):
        folder = layout.run_file_key(trial, FOLDER)
        segments = [journal.with_name(each.name) for each in first_line(data)[0].segments]
        there = store.storage.sizes(folder) if segments else {}
        for file in filter(Path.exists, segments):
            if there.get(key := f"{folder}/{file.name}") != file.stat().st_size:
                store.storage.write(key, file.read_bytes())
        store.storage.write(f"{folder}/{JOURNAL}", data)


def lacking(store: CheckpointStore, trial: str) -> dict[str, int]:
    """The number of records that each tracker lacks, as the trial's storage shows; without zeros.
    Raises StorageError."""

    def read(name: str) -> bytes:
        return store.storage.read(layout.run_file_key(trial, f"{FOLDER}/{name}")) or b""

    found: dict[str, int] = {}
    with suppress(msgspec.MsgspecError):  # the next run or `runs sync` tells
        _, count = age(read(JOURNAL))
        for name in filter(layout.is_name, decode(read(ORDER), SenderOrder).trackers):
            state = read(f"{name}.json")
            found[name] = count - (decode(state, State).sent if state else 0)
    return {name: left for name, left in found.items() if left > 0}


def sync_trackers(
    store: CheckpointStore, trial: str, run_dir: Path, patience_seconds: float,
    hear: Callable[[str], None], logger: AnyLogger,
    own: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[dict[str, int], dict[str, int]]:  # fmt: skip
    """Send the records that the trackers lack, without a run: `trialflow runs sync`.

    Args:
        run_dir: the trial's folder on this machine, locked.
        hear: called with news for people.
        own: the trackers of the caller's experiment, with their options.

    Returns:
        The numbers of records that each tracker lacked before and lacks still, without zeros.

    Raises:
        ConfigError: no run of the trial had trackers; or their list is unreadable; or one that
            lacks records is not installed, or does not have an option that the run gave it; or
            only the storage names its place.
    """
    adopt_stored(store, trial, run_dir, logger)
    file = run_dir / FOLDER / ORDER
    if not file.exists():
        raise ConfigError(
            f"no run of trial {trial} had trackers, neither on this machine nor in {store.url}"
        )
    try:
        earlier = decode(file.read_bytes(), SenderOrder)
    except msgspec.MsgspecError as damage:
        raise ConfigError(
            f"{file} does not say which trackers trial {trial} had: {damage}; its next run does"
        ) from None
    if odd := [name for name in earlier.trackers if not layout.is_name(name)]:
        raise ConfigError(f"{file} names a tracker {odd[0]!r}; the trial's next run mends it")
    before = unsent(run_dir, [*earlier.trackers])
    trackers = {}
    for name in before:
        kind, options = find_tracker(name), earlier.trackers[name]
        kind.check(options)
        if earlier.is_adopted:
            options = kind.without_paths(options)
            kind.require_own_place(name, options, (own or {}).get(name, {}))
        trackers[name] = options
    if before:
        # Only these: a run that is opened again is shown as running, or as ended well.
        order = msgspec.structs.replace(
            earlier, trial=trial, trackers=trackers, run_dir=str(run_dir),
            patience_seconds=patience_seconds, measures=False,
        )  # fmt: skip
        sender = SenderProcess(order, {}, hear)
        sender.end(lambda has_ended: has_ended(patience_seconds + 1))
        keep(store, trial, run_dir, logger)
    return before, unsent(run_dir, [*before])
