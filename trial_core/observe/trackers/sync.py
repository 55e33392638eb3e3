"""Sends the records that a trial's trackers lack, without a run: `trialflow runs sync`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from trial_core.checkpoint.store import CheckpointStore
from trial_core.common.any_logger import AnyLogger
from trial_core.common.decoding import decode
from trial_core.errors import ConfigError
from trial_core.observe.trackers.journal import FOLDER, ORDER
from trial_core.observe.trackers.sender import SenderOrder, unsent
from trial_core.observe.trackers.sender_process import SenderProcess
from trial_core.observe.trackers.stored_journal import adopt_stored, keep
from trial_core.observe.trackers.tracker import find_tracker


def sync_trackers(
    store: CheckpointStore, trial: str, run_dir: Path, patience_seconds: float,
    hear: Callable[[str], None], logger: AnyLogger,
) -> tuple[dict[str, int], dict[str, int]]:  # fmt: skip
    """Send the unsent records.

    Args:
        run_dir: the trial's folder on this machine, locked.
        hear: called with news for people.

    Returns:
        The numbers of records that each tracker lacked before and lacks still, without zeros.

    Raises:
        ConfigError: no run of the trial had trackers; or their list is unreadable; or one that
            lacks records is not installed, or does not have an option that the run gave it.
    """
    adopt_stored(store, trial, run_dir, logger)
    file = run_dir / FOLDER / ORDER
    if not file.exists():
        raise ConfigError(
            f"no run of trial {trial} had trackers, neither on this machine nor in {store.url}"
        )
    try:
        earlier = decode(file.read_bytes(), SenderOrder)
    except (msgspec.MsgspecError, RecursionError) as damage:
        raise ConfigError(
            f"{file} does not say which trackers trial {trial} had: {damage}; its next run does"
        ) from None
    if odd := [name for name in earlier.trackers if Path(name).name != name]:
        raise ConfigError(f"{file} names a tracker {odd[0]!r}; the trial's next run mends it")
    before = unsent(run_dir, [*earlier.trackers])
    trackers = {}
    for name in before:
        kind, options = find_tracker(name), earlier.trackers[name]
        kind.check(options)
        trackers[name] = kind.without_paths(options) if earlier.is_adopted else options
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
