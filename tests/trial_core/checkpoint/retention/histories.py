"""Histories of checkpoints for tests of the retention policy."""

from __future__ import annotations

from typing import Any

from tests.support.manifests import new_manifest
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.retention_policy import RetentionPolicy, decide
from trial_core.schedule.sequencer import Progress


def saved(
    batches: int, loss: Any = None, trial: str = "one", second: int | None = None, **fields: Any
) -> Manifest:
    """A checkpoint, validated if `loss` is given. By default saved in the order of batches."""
    order = batches % 60 if second is None else second
    defaults = {
        "uuid": f"{trial}-{batches}-{'x' if second is None else second}",
        "trial": trial,
        "created_at": f"2031-05-09T17:00:{order:02d}.000000Z",
        "progress": Progress(batches, validated_at=None if loss is None else batches),
        "metrics": {"validation": {} if loss is None else {"loss": loss}},
    }
    return new_manifest(batches, **{**defaults, **fields})


def kept(manifests: list[Manifest], policy: RetentionPolicy, **needs: Any) -> set[str]:
    """The uuids of the checkpoints that stay."""
    return {each.manifest.uuid for each in decide(manifests, policy, **needs) if each.keep}
