"""`init`: a trial's context in a script of the user's own. Follows Determined's function.

The script is started in any way: plain ``python`` (one rank), ``torchrun`` or ``deepspeed``. No
Prefect, no server and no driver take part; every rank runs the same script::

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

import deepspeed
import torch.distributed as dist

from trial_core.config.script import script_config
from trial_core.context import RunInfo
from trial_core.controller.device import claim_accelerator
from trial_core.controller.entrypoint import initialises_by_itself
from trial_core.controller.rank_state import seed_everything
from trial_core.controller.run_file_upload import instruments_in
from trial_core.deepspeed.context import DeepSpeedTrialContext
from trial_core.deepspeed.mpu import forget_model_parallelism
from trial_core.deepspeed.op_builds import clear_interrupted_builds
from trial_core.distributed import SINGLE_RANK_ENVIRONMENT, DistributedContext, is_launched
from trial_core.run.run_dirs import home_folder, trial_id

_HERE: list[bool] = []
"""Not empty when torch.distributed was initialised here, and not by the script."""


@contextmanager
def init(
    *,
    hparams: Mapping[str, Any] | None = None,
    exp_conf: Mapping[str, Any] | None = None,
    distributed: DistributedContext | None = None,
) -> Iterator[DeepSpeedTrialContext]:
    """A context to construct a trial with, and within which its `Trainer` fits.

    Collective: every rank calls this. Initialises torch.distributed through DeepSpeed, unless the
    script has done so or ``TRIALFLOW_MANUAL_INIT_DISTRIBUTED`` (or ``DET_MANUAL_INIT_DISTRIBUTED``)
    is 1; seeds every generator with the experiment's seed, so that all ranks build the same
    weights; shows what the run does on rank 0's stderr, unless the script has set up logging.

    Args:
        hparams: hyperparameters, in place of those of `exp_conf`.
        exp_conf: any part of an experiment file, as plain data: name, hyperparameters, data,
            checkpoint_storage, searcher.metric, reproducibility.experiment_seed, …
        distributed: who this rank is; by default what the environment says.

    Raises:
        ConfigError: `exp_conf` or `hparams` cannot be used: everything that is wrong in them.
    """
    config = script_config(exp_conf, hparams)
    with _shown_progress(), _environment_of_a_rank(), _initialised():
        ranks = distributed or DistributedContext.from_environment()
        unique = uuid.uuid4().hex
        if dist.is_initialized():
            unique = ranks.broadcast(unique)
        experiment = {
            **(exp_conf or {}), "name": config.name, "hyperparameters": config.hyperparameters
        }  # fmt: skip
        trial = trial_id(config.name, unique)
        instruments = instruments_in(home_folder() / trial, ranks.get_rank())
        info = RunInfo(trial=trial, experiment=experiment, instruments=instruments)
        forget_model_parallelism()
        # The same seed everywhere: every rank must build the same weights.
        seed_everything(config.reproducibility.experiment_seed)
        try:
            yield DeepSpeedTrialContext(info, ranks)
        finally:
            info.instruments.finish()


@contextmanager
def _environment_of_a_rank() -> Iterator[None]:
    """What launchers would set, where there is none: DeepSpeed looks for it."""
    missing = {} if is_launched() else SINGLE_RANK_ENVIRONMENT
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


@contextmanager
def _initialised() -> Iterator[None]:
    """torch.distributed, ready.

    It stays so for a later block: ranks that met once cannot meet again at the same port, because
    the quick ones would find the old meeting point. A process that ends well takes its leave.
    """
    atexit.unregister(_take_leave)
    local_rank = DistributedContext.from_environment().get_local_rank()
    claim_accelerator(local_rank)
    if local_rank == 0:
        clear_interrupted_builds()
    if not dist.is_initialized() and not initialises_by_itself():
        deepspeed.init_distributed()
        _HERE.append(True)
    yield
    # Not after a failure: other ranks may be anywhere, and this one's end must not wait for them.
    if _HERE:
        atexit.register(_take_leave)


def _take_leave() -> None:
    if dist.is_initialized():
        deepspeed.comm.destroy_process_group()


@contextmanager
def _shown_progress() -> Iterator[None]:
    """What the library says, on stderr, unless somebody has decided where it goes."""
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
