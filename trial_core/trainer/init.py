"""`init`: a trial's context in a user's own script. Follows Determined's function.

Start the script with plain ``python`` (one rank), ``torchrun`` or ``deepspeed``. It needs no
Prefect, server or driver; every rank runs the same script::

    with init(exp_conf={"hyperparameters": {"lr": 1e-3}}) as context:
        trial = MyTrial(context)
        Trainer(trial, context).fit(max_length=Epoch(3), validation_period=Batch(100))
"""

from __future__ import annotations

import atexit
import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import deepspeed
import torch.distributed as dist

from trial_core.config.script import script_config
from trial_core.context import RunInfo
from trial_core.controller.rank_state import seed_everything
from trial_core.controller.run_file_upload import instruments_in
from trial_core.deepspeed.accelerator import claim_accelerator
from trial_core.deepspeed.context import DeepSpeedTrialContext
from trial_core.deepspeed.mpu import forget_model_parallelism
from trial_core.deepspeed.op_builds import prepare_op_builds
from trial_core.distributed import DistributedContext, is_launched
from trial_core.entrypoint import initialises_torch_distributed
from trial_core.rendezvous import host_single_rank
from trial_core.run.run_dirs import run_dir_of, trial_id
from trial_core.trainer import uncaught_errors

_INITIALISED_HERE: list[bool] = []
"""Not empty if `init`, not the script, initialised torch.distributed."""
_RANKS: WeakKeyDictionary[Any, DistributedContext] = WeakKeyDictionary()
"""The ranks of torch's default process group. Later blocks share the groups of its collectives."""


@contextmanager
def init(
    *,
    hparams: Mapping[str, Any] | None = None,
    exp_conf: Mapping[str, Any] | None = None,
    distributed: DistributedContext | None = None,
) -> Iterator[DeepSpeedTrialContext]:
    """A context for constructing a trial; its `Trainer` fits within the block.

    Collective: every rank calls this. Initialises torch.distributed through DeepSpeed, unless the
    script has done so or ``TRIALFLOW_MANUAL_INIT_DISTRIBUTED`` (or ``DET_MANUAL_INIT_DISTRIBUTED``)
    is 1. Seeds every generator with the experiment's seed, so that all ranks build the same
    weights. Logs to stderr, unless the script has configured logging.

    Args:
        hparams: hyperparameters, in place of those of `exp_conf`.
        exp_conf: any part of an experiment file, as plain data: name, hyperparameters, data,
            checkpoint_storage, searcher.metric, reproducibility.experiment_seed, …
        distributed: this rank's place among all; by default from the environment.

    Raises:
        ConfigError: `exp_conf` or `hparams` is invalid; lists every mistake.
    """
    uncaught_errors.install()
    with _visible_logs(), _rank_environment(), _initialised():
        # Within, so that the ranks can agree on who shows a mistake.
        config = script_config(exp_conf, hparams)
        ranks = distributed or _ranks()
        unique = uuid.uuid4().hex
        if dist.is_initialized():
            unique = ranks.broadcast(unique)
        experiment = {
            **(exp_conf or {}), "name": config.name, "hyperparameters": config.hyperparameters
        }  # fmt: skip
        trial = trial_id(config.name, unique)
        instruments = instruments_in(run_dir_of(trial), ranks.get_rank())
        info = RunInfo(trial=trial, experiment=experiment, instruments=instruments)
        forget_model_parallelism()
        # The same seed on every rank: all must build the same weights.
        seed_everything(config.reproducibility.experiment_seed)
        try:
            yield DeepSpeedTrialContext(info, ranks)
        finally:
            info.instruments.finish()


@contextmanager
def _rank_environment() -> Iterator[None]:
    """Without a launcher, set the variables that a launcher would: DeepSpeed needs them."""
    missing = {} if is_launched() else host_single_rank()
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


@contextmanager
def _initialised() -> Iterator[None]:
    """Initialise torch.distributed; the process group stays for a later block.

    Ranks cannot initialise it twice at the same port: a fast rank would connect to the old store.
    """
    atexit.unregister(_destroy_process_group)
    local_rank = DistributedContext.from_environment().get_local_rank()
    claim_accelerator(local_rank)
    prepare_op_builds(local_rank)
    if not dist.is_initialized() and not initialises_torch_distributed():
        deepspeed.init_distributed()
        _INITIALISED_HERE.append(True)
    yield
    # Not after a failure: a failed rank must end at once, without waiting for the others.
    if _INITIALISED_HERE:
        atexit.register(_destroy_process_group)


def _ranks() -> DistributedContext:
    ranks = DistributedContext.from_environment()
    return _RANKS.setdefault(dist.group.WORLD, ranks) if dist.is_initialized() else ranks


def _destroy_process_group() -> None:
    if dist.is_initialized():
        deepspeed.comm.destroy_process_group()


@contextmanager
def _visible_logs() -> Iterator[None]:
    """Log to stderr during the block, unless the script has configured logging."""
    logger = logging.getLogger("trial_core")
    if logger.hasHandlers():
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
