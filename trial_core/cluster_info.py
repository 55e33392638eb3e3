"""`get_cluster_info`: what a script may continue from. Follows Determined's function."""

from __future__ import annotations

import os
from typing import NoReturn

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


class ClusterInfo:
    """The part of Determined's class that does not need its server."""

    @property
    def latest_checkpoint(self) -> str | None:
        """What `Trainer.fit` continues from, as its argument `latest_checkpoint`.

        The environment variable ``DET_LATEST_CHECKPOINT`` if it is set; empty means None. Else
        ``"latest"``: the newest checkpoint of the experiment's newest trial, or a new trial.
        """
        return os.environ.get(CHECKPOINT_VARIABLE, LATEST) or None

    def __getattr__(self, name: str) -> NoReturn:
        instead = f"use {_INSTEAD[name]}" if name in _INSTEAD else "there is no Determined cluster"
        raise AttributeError(f"get_cluster_info() has no {name!r} in trialflow; {instead}")


def get_cluster_info() -> ClusterInfo:
    """Information for a script. Unlike Determined's function it never returns None."""
    return ClusterInfo()
