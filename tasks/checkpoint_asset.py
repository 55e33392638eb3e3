"""The assets that a checkpoint-upload reports: a trial's checkpoints are made from its data.

Prefect's own server keeps this as events; the graph of assets is a page of Prefect Cloud.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prefect.assets import Asset, AssetProperties
from prefect.context import AssetContext
from pydantic import ValidationError

from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.storage.credentials import without_credentials
from trial_core.driver.run import Launch, Run

_URL = re.compile(r"[a-z0-9]+://")


def begins_asset(launch: Launch) -> Asset | None:
    """Declare that the task of this thread materializes the checkpoints of the launch's trial.

    The declaration is the task run's: `materialize` would need a task for each trial.
    """
    run, context = launch.run, AssetContext.get()
    folder = layout.trial_folder(run.trial)
    asset = _asset(f"{run.store.url}/{folder}", f"Checkpoints of trial {run.trial}")
    if context is None or asset is None:
        return None
    context.downstream_assets.add(asset)
    found = map(_asset, _sources(run))
    context.direct_asset_dependencies.update(each for each in found if each is not None)
    return asset


def describe_asset(asset: Asset, launch: Launch, manifest: Manifest) -> None:
    """Say which checkpoint the task has committed."""
    asset.add_metadata({
        "checkpoint": manifest.uuid,
        "config_digest": manifest.config_digest,
        "batches": manifest.progress.batches_trained,
        "files": launch.run.store.files_url(manifest.uuid),
    })  # fmt: skip


def _sources(run: Run) -> Iterator[str]:
    """The URLs of the sources of a trial's training: a checkpoint, and data."""
    searcher = run.config.searcher
    if searcher.source_checkpoint is not None:
        yield from _urls(searcher.source_checkpoint)
    if searcher.source_checkpoint_uuid is not None:
        yield f"{run.store.url}/{layout.CHECKPOINTS}/{searcher.source_checkpoint_uuid}"
    yield from _urls(run.config.data)


def _urls(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if _URL.match(value):
            yield without_credentials(value)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _urls(each)
    elif isinstance(value, Sequence):
        for each in value:
            yield from _urls(each)


def _asset(key: str, name: str | None = None) -> Asset | None:
    """Return an asset; None if Prefect refuses such a key, which has a space or is too long."""
    try:
        if name is None:
            return Asset(key=key)
        return Asset(key=key, properties=AssetProperties(name=name))
    except ValidationError:
        return None
