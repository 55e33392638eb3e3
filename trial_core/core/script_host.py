"""What a Core API script talks to: the driver of its slot, or, without one, the storage itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from trial_core.cluster_info import ScriptInfo
from trial_core.distributed import DistributedContext
from trial_core.run.observer import MetricsKind

logger = logging.getLogger(__name__)


class ScriptHost(Protocol):
    """Carries out what a script asks of its context. Every rank has one.

    Attributes:
        info: what the script may know of its run.
        distributed: this rank's place among all.
    """

    info: ScriptInfo
    distributed: DistributedContext

    def report(self, kind: MetricsKind, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report metrics. Rank 0 alone calls this. Does not wait."""

    def set_status(self, text: str) -> None:
        """Tell people what the script is doing. Rank 0 alone calls this."""

    def should_preempt(self) -> bool:
        """Whether to save and end. Ranks that ask equally often get the same answers."""

    def staging(self, uuid: str) -> Path:
        """This rank's folder for the files of a checkpoint."""

    def commit(self, uuid: str, steps_completed: int, shard: bool) -> None:
        """Upload what was written into `staging` and commit it; waits for the end.

        Args:
            shard: whether every rank calls this. If not, rank 0 does.
        """

    def fetch(self, uuid: str, alone: bool = False) -> Path:
        """Fetch a checkpoint, unless it was fetched; its folder.

        Args:
            alone: whether this rank alone calls this. If not, it is collective: every rank does.

        Raises:
            CheckpointNotFound: there is none with that uuid.
            CheckpointDamaged: a file is missing or differs.
            StorageError: the storage failed.
        """

    def metadata(self, uuid: str) -> dict[str, Any]:
        """The metadata that was stored with a checkpoint. Not collective."""

    def delete(self, uuid: str) -> None:
        """Delete a checkpoint from the storage. One rank calls this."""

    def tensorboard_path(self) -> Path:
        """This rank's folder for TensorBoard."""


_HOSTS: list[ScriptHost] = []


def current_host() -> ScriptHost | None:
    """The host of the script that this process runs; None outside a slot."""
    return _HOSTS[-1] if _HOSTS else None


@contextmanager
def hosted(host: ScriptHost) -> Iterator[None]:
    """Make `current_host` return `host` during the block."""
    _HOSTS.append(host)
    try:
        yield
    finally:
        _HOSTS.remove(host)
