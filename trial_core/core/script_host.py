"""What a Core API script talks to: the driver of its slot, or, without one, the storage itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trial_core.cluster_info import ScriptInfo
from trial_core.context import RunInfo
from trial_core.controller.checkpoint_files import CheckpointFiles
from trial_core.core.stored_checkpoints import StoredCheckpoints
from trial_core.distributed import DistributedContext
from trial_core.run.observer import MetricsKind
from trial_core.units import TrainUnit


class ScriptHost(ABC):
    """Carries out what a script asks of its context. Every rank has one.

    Attributes:
        info: what the script may know of its run.
        distributed: this rank's place among all.
        checkpoints: the stored ones.
        max_length: where the experiment says that training ends; None: it does not say.
    """

    info: ScriptInfo
    distributed: DistributedContext
    checkpoints: StoredCheckpoints
    max_length: TrainUnit | None
    _files: CheckpointFiles
    _run: RunInfo

    @abstractmethod
    def report(self, kind: MetricsKind, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report metrics. Rank 0 alone calls this. Does not wait."""

    @abstractmethod
    def set_status(self, text: str) -> None:
        """Tell people what the script is doing. Rank 0 alone calls this."""

    @abstractmethod
    def should_preempt(self) -> bool:
        """Whether to save and end. Ranks that ask equally often get the same answers."""

    @abstractmethod
    def commit(self, uuid: str, steps_completed: int, shard: bool) -> None:
        """Upload what was written into `staging` and commit it; waits for the end.

        Args:
            shard: whether every rank calls this. If not, rank 0 does.
        """

    def staging(self, uuid: str) -> Path:
        """This rank's folder for the files of a checkpoint."""
        return self._files.staging(uuid)

    def tensorboard_path(self) -> Path:
        """This rank's folder for TensorBoard."""
        return self._run.instruments.folder()


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
