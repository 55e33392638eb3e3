"""`get_cluster_info`: a script's information about its run. Follows Determined's function."""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trial_core.common.text_format import trial_number as written_number
from trial_core.common.unknown_names import SaysWhatToUse

CHECKPOINT_VARIABLE = "DET_LATEST_CHECKPOINT"

_PUBLISHED: list[ClusterInfo] = []


@dataclass(frozen=True)
class TrialInfo:
    """The trial of a run.

    Attributes:
        trial_id: a number that identifies the trial.
        experiment_id: a number that identifies the experiment: equal for all runs with its name.
        trial_seed: the experiment's seed.
        hparams: the hyperparameters, by name.
        _config: the experiment configuration, which Determined's examples read under this name.
    """

    trial_id: int
    experiment_id: int
    trial_seed: int = 0
    hparams: dict[str, Any] = field(default_factory=dict)
    _config: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class ClusterInfo(SaysWhatToUse):
    """The run of a script, as one of its ranks sees it. Follows Determined's class.

    Attributes:
        trial: the trial.
        latest_checkpoint: uuid of the checkpoint to resume from; None to begin from scratch.
        user_data: the experiment's section `data`.
        slot_ids: a number for each slot of this machine, from 0.
        container_rank: the index of this machine.
        container_slot_counts: the slots of each machine; all are taken to have as many as this one.
        container_addrs: the address of rank 0's machine, then ``node-1``, …: only their number is
            known here.
        task_type: ``"TRIAL"``.
    """

    trial: TrialInfo
    latest_checkpoint: str | None = None
    user_data: dict[str, Any] = field(default_factory=dict)
    slot_ids: list[int] = field(default_factory=lambda: [0])
    container_rank: int = 0
    container_slot_counts: list[int] = field(default_factory=lambda: [1])
    container_addrs: list[str] = field(default_factory=lambda: ["127.0.0.1"])
    task_type: str = "TRIAL"

    @classmethod
    def of(
        cls,
        trial: str,
        experiment: Mapping[str, Any],
        seed: int = 0,
        latest_checkpoint: str | None = None,
        *,
        slots: int = 1,
        machine: int = 0,
        machines: int = 1,
    ) -> ClusterInfo:
        """The information about a run: of a trial's id, and of an experiment as plain data.

        Args:
            slots: the slots of this machine, which is number `machine` of `machines`.
        """
        known = TrialInfo(
            trial_number(trial),
            experiment_number(experiment),
            seed,
            copy.deepcopy(dict(experiment.get("hyperparameters") or {})),
            copy.deepcopy(dict(experiment)),
        )
        first = os.environ.get("MASTER_ADDR", "127.0.0.1")
        return cls(
            known,
            latest_checkpoint,
            copy.deepcopy(dict(experiment.get("data") or {})),
            slot_ids=list(range(slots)),
            container_rank=machine,
            container_slot_counts=[slots] * machines,
            container_addrs=[first, *(f"node-{number}" for number in range(1, machines))],
        )


def get_cluster_info() -> ClusterInfo | None:
    """The run of the script that calls this, on any rank; None outside a run.

    A script that ``trialflow train`` runs is in a run from its first line; one that you start, in
    the block of `trial_core.init`.
    """
    return _PUBLISHED[-1] if _PUBLISHED else None


def checkpoint_to_continue(given: str | None) -> str | None:
    """The checkpoint from which a script that you start continues, if it does: its argument
    `latest_checkpoint`, or if that is None the environment variable ``DET_LATEST_CHECKPOINT``."""
    return os.environ.get(CHECKPOINT_VARIABLE) or None if given is None else given


@contextmanager
def published(info: ClusterInfo) -> Iterator[None]:
    """Make `get_cluster_info` return `info` during the block."""
    _PUBLISHED.append(info)
    try:
        yield
    finally:
        _PUBLISHED.remove(info)


def trial_number(trial: str) -> int:
    """A number that identifies a trial, from the hexadecimal end of its id, if it has one."""
    number = written_number(trial)
    return zlib.crc32(trial.encode()) if number is None else number


def experiment_number(experiment: Mapping[str, Any]) -> int:
    """A number that identifies an experiment: equal for all runs with the same name."""
    return zlib.crc32(str(experiment.get("name")).encode())
