"""`trialflow checkpoints pin` and `unpin`: protect checkpoints from pruning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trial_core.common import text_format
from trialflow.deployments.cli import console
from trialflow.deployments.cli.experiment_options import (
    Checkpoints,
    ConfigFile,
    StorageOption,
    open_store,
)
from trialflow.deployments.cli.tables import AsJson
from trialflow.deployments.cli.waiting import waiting

if TYPE_CHECKING:
    from trial_core.checkpoint.retention.protections import Protection
    from trial_core.checkpoint.store import CheckpointStore


def pin(
    *checkpoints: Checkpoints,
    reason: Annotated[
        str, Parameter(help="Why the checkpoints are pinned; shown with the pin. Default: none.")
    ] = "",
    config: ConfigFile = None,
    storage: StorageOption = None,
    json_: AsJson = False,
) -> int:
    """Protect checkpoints from pruning until they are unpinned."""
    from trial_core.checkpoint.retention import protections

    store, uuids = _named(checkpoints, config, storage)
    with waiting(f"writing to {store.url}"):
        pinned = [protections.pin(store, uuid, reason) for uuid in uuids]
    _say(pinned, "pinned", json_)
    return 0


def unpin(
    *checkpoints: Checkpoints,
    config: ConfigFile = None,
    storage: StorageOption = None,
    json_: AsJson = False,
) -> int:
    """Remove the pins of checkpoints. Checkpoints held by the registry stay protected."""
    from trial_core.checkpoint.retention import protections

    store, uuids = _named(checkpoints, config, storage)
    released = protections.WHEN_RELEASED
    with waiting(f"writing to {store.url}"):
        gone = [protections.unpin(store, uuid) for uuid in uuids]
    _say(gone, "unpinned", json_)
    for each in gone:
        if why := protections.protected(store, each.uuid).get(each.uuid):
            console.note(f"{each.uuid} is still kept, {text_format.one_line(why)}: {released}")
    return 0


def _named(
    checkpoints: tuple[str, ...], config: Path | None, storage: str | None
) -> tuple[CheckpointStore, list[str]]:
    """Return the storage, and the uuids of the checkpoints that begin as given."""
    from trial_core.models.checkpoint_reference import referenced_uuid

    store = open_store(config, storage)
    with waiting(f"reading {store.url}"):
        return store, [referenced_uuid(store, checkpoint) for checkpoint in checkpoints]


def _say(pins: list[Protection], done: str, as_json: bool) -> None:
    if as_json:
        shown = [{"uuid": p.uuid, "reason": p.reason, "by": p.by, "at": p.at} for p in pins]
        print(json.dumps(shown, indent=2))
        return
    for each in pins:
        reason = f" ({text_format.one_line(each.reason)})" if each.reason else ""
        print(f"{done} {each.uuid}{reason}")
