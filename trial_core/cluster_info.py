"""`get_cluster_info`: what a script knows of its run. Follows Determined's function."""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

LATEST = "latest"
CHECKPOINT_VARIABLE = "DET_LATEST_CHECKPOINT"

_INSTEAD = {
    "trial": "context.get_trial_id(), get_experiment_id(), get_trial_seed() and get_hparams()",
    "user_data": "context.get_data_config()",
    "container_addrs": "context.distributed",
    "container_rank": "context.distributed.cross_rank",
    "container_slot_counts": "context.distributed.local_size",
    "gpu_uuids": "CUDA_VISIBLE_DEVICES in os.environ",
    "slot_ids": "context.distributed.local_ranks",
}

_PUBLISHED: list[ScriptInfo] = []


class _Info:
    """Says what to use in place of attributes of Determined's class that do not exist here."""

    def __getattr__(self, name: str) -> NoReturn:
        instead = f"use {_INSTEAD[name]}" if name in _INSTEAD else "there is no Determined cluster"
        raise AttributeError(
            f"get_cluster_info() has no {name!r} in trialflow; {instead}", name=name
        )


class ClusterInfo(_Info):
    """The part of Determined's class that a script without `trial_core.init` can know."""

    @property
    def latest_checkpoint(self) -> str | None:
        """What `Trainer.fit` continues from, as its argument `latest_checkpoint`.

        The environment variable ``DET_LATEST_CHECKPOINT`` if it is set; empty means None. Else
        ``"latest"``: the newest checkpoint of the experiment's newest trial, or a new trial.
        """
        return os.environ.get(CHECKPOINT_VARIABLE, LATEST) or None


@dataclass(frozen=True)
class TrialInfo:
    """The trial of a run.

    Attributes:
        trial_id: a number that identifies the trial.
        experiment_id: a number that identifies the experiment: equal for all runs with its name.
        trial_seed: the experiment's seed.
        hparams: the hyperparameters, by name.
    """

    trial_id: int
    experiment_id: int
    trial_seed: int = 0
    hparams: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScriptInfo(_Info):
    """The run of a Core API script, as one of its ranks sees it.

    Attributes:
        trial: the trial.
        latest_checkpoint: uuid of the checkpoint to resume from; None: begin from scratch.
        user_data: the experiment's section `data`.
    """

    trial: TrialInfo
    latest_checkpoint: str | None = None
    user_data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        trial: str,
        experiment: Mapping[str, Any],
        seed: int = 0,
        latest_checkpoint: str | None = None,
    ) -> ScriptInfo:
        """The information about a run.

        Args:
            trial: the trial's id, ``name-1a2b3c4d5e6f``.
            experiment: the experiment configuration, as plain data.
            seed: the experiment's.
        """
        known = TrialInfo(
            trial_number(trial),
            experiment_number(experiment),
            seed,
            copy.deepcopy(dict(experiment.get("hyperparameters") or {})),
        )
        data = copy.deepcopy(dict(experiment.get("data") or {}))
        return cls(known, latest_checkpoint, data)


def get_cluster_info() -> ClusterInfo | ScriptInfo:
    """Information for a script. Unlike Determined's function it never returns None.

    In the slots of a Core API script and within `trial_core.init`: the run. Elsewhere only
    `latest_checkpoint`.
    """
    return _PUBLISHED[-1] if _PUBLISHED else ClusterInfo()


@contextmanager
def published(info: ScriptInfo) -> Iterator[None]:
    """Make `get_cluster_info` return `info` during the block."""
    _PUBLISHED.append(info)
    try:
        yield
    finally:
        _PUBLISHED.remove(info)


def trial_number(trial: str) -> int:
    """A number that identifies a trial, from the hexadecimal end of its id, if it has one."""
    end = trial.rpartition("-")[2]
    is_hexadecimal = bool(end) and set(end) <= set("0123456789abcdef")
    return int(end, 16) if is_hexadecimal else zlib.crc32(trial.encode())


def experiment_number(experiment: Mapping[str, Any]) -> int:
    """A number that identifies an experiment: equal for all runs with the same name."""
    return zlib.crc32(str(experiment.get("name")).encode())
