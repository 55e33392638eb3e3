"""`init`: a trial's context in a user's own script. Follows Determined's functions.

Start the script with plain ``python`` (one rank), ``torchrun`` or ``deepspeed``, or name it in an
experiment file. Every rank runs the same script. It needs no Prefect and no server; a driver starts
next to rank 0::

    with pytorch.init(exp_conf={"hyperparameters": {"lr": 1e-3}}) as context:
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
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import deepspeed
import torch.distributed as dist

from trial_core.config.script import script_config
from trial_core.config.yaml_file import merged
from trial_core.deepspeed.context import DeepSpeedTrialContext
from trial_core.deepspeed.mpu import forget_model_parallelism
from trial_core.deepspeed.op_builds import prepare_op_builds
from trial_core.processes.machine.run_dirs import run_dir_of, trial_id
from trial_core.pytorch.context import PyTorchTrialContext
from trial_core.rank.checkpoint_files import tensorboard_in
from trial_core.rank.collectives.accelerator import claim_accelerator
from trial_core.rank.collectives.distributed import CHIEF_VARIABLE, DistributedContext, is_launched
from trial_core.rank.collectives.rendezvous import host_single_rank, init_torch_distributed
from trial_core.rank.core_api.script_host import ScriptHost, current_slot
from trial_core.rank.rank_state import seed_everything
from trial_core.rank.script import shown
from trial_core.rank.script.driver_process import early_driver
from trial_core.rank.trial.context import RunInfo
from trial_core.rank.trial.torch_context import TorchTrialContext
from trial_core.trainer.entrypoint import initialises_torch_distributed

logger = logging.getLogger(__name__)

ContextT = TypeVar("ContextT", DeepSpeedTrialContext, PyTorchTrialContext)

_INITIALISED_HERE: list[bool] = []
"""Not empty if `init`, not the script, initialised torch.distributed."""
_RANKS: WeakKeyDictionary[Any, DistributedContext] = WeakKeyDictionary()
"""The ranks of torch's default process group. Later blocks share the groups of its collectives."""


@contextmanager
def deepspeed_init(
    *,
    hparams: Mapping[str, Any] | None = None,
    exp_conf: Mapping[str, Any] | None = None,
    distributed: DistributedContext | None = None,
    enable_tensorboard_logging: bool = True,
) -> Iterator[DeepSpeedTrialContext]:
    """A context for constructing a trial; its `Trainer` fits within the block.

    Collective: every rank calls this. Initialises torch.distributed through DeepSpeed, unless the
    script has done so or ``TRIALFLOW_MANUAL_INIT_DISTRIBUTED`` (or ``DET_MANUAL_INIT_DISTRIBUTED``)
    is 1. Seeds every generator with the experiment's seed, so that all ranks build the same
    weights. Logs to stderr, unless the script has configured logging.

    Args:
        hparams: hyperparameters, which replace the ones in `exp_conf`.
        exp_conf: any part of an experiment file, as plain data: name, hyperparameters, data,
            checkpoint_storage, searcher.metric, reproducibility.experiment_seed, …
        distributed: this rank's place among all; by default from the environment.
        enable_tensorboard_logging: see `TrialContext.set_enable_tensorboard_logging`.

    Raises:
        ConfigError: `exp_conf` or `hparams` is invalid; lists every mistake.
    """
    with _context(
        DeepSpeedTrialContext, hparams, exp_conf, distributed, enable_tensorboard_logging
    ) as context:
        yield context


@contextmanager
def pytorch_init(
    *,
    hparams: Mapping[str, Any] | None = None,
    exp_conf: Mapping[str, Any] | None = None,
    distributed: DistributedContext | None = None,
    aggregation_frequency: int = 1,
    enable_tensorboard_logging: bool = True,
) -> Iterator[PyTorchTrialContext]:
    """A context for constructing a `PyTorchTrial`; its `Trainer` fits within the block.

    Collective: every rank calls this. Works like `trial_core.deepspeed.init`, but without
    DeepSpeed.

    Args:
        hparams, exp_conf, distributed: as for `trial_core.deepspeed.init`.
        aggregation_frequency: optimizers step once in this many batches. 1 takes the value of
            ``optimizations.aggregation_frequency`` in `exp_conf`, if any.
        enable_tensorboard_logging: see `TrialContext.set_enable_tensorboard_logging`.

    Raises:
        ConfigError: an argument is invalid; lists every mistake.
    """
    if aggregation_frequency != 1 and isinstance(exp_conf, Mapping | None):
        frequency = {"aggregation_frequency": aggregation_frequency}
        exp_conf = merged(exp_conf or {}, {"optimizations": frequency})
    with _context(
        PyTorchTrialContext, hparams, exp_conf, distributed, enable_tensorboard_logging
    ) as context:
        yield context


@contextmanager
def _context(
    context_class: type[ContextT],
    hparams: Mapping[str, Any] | None,
    exp_conf: Mapping[str, Any] | None,
    distributed: DistributedContext | None,
    enable_tensorboard_logging: bool,
) -> Iterator[ContextT]:
    host = current_slot()
    if host is not None:
        with _initialised(context_class):
            context = _context_in_slot(context_class, host, exp_conf, hparams, distributed)
            if not enable_tensorboard_logging:
                context.set_enable_tensorboard_logging(False)
            yield context
        return
    shown.install()
    with shown.visible_logs(), _rank_environment(), _initialised(context_class):
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
        tensorboard = tensorboard_in(run_dir_of(trial), ranks.get_rank())
        info = RunInfo(trial=trial, experiment=experiment, tensorboard=tensorboard)
        forget_model_parallelism()
        # The same seed on every rank: all must build the same weights.
        seed_everything(config.reproducibility.experiment_seed)
        context = context_class(info, ranks)
        if not enable_tensorboard_logging:
            context.set_enable_tensorboard_logging(False)
        try:
            with early_driver(ranks):
                yield context
        finally:
            info.tensorboard.finish()


def _context_in_slot(
    context_class: type[ContextT],
    host: ScriptHost,
    exp_conf: Mapping[str, Any] | None,
    hparams: Mapping[str, Any] | None,
    distributed: DistributedContext | None,
) -> ContextT:
    """The context of a script that ``trialflow train`` runs: the experiment file decides."""
    ranks = distributed or host.distributed
    if ranks.get_rank() == 0 and (
        given := [name for name, value in (("hparams", hparams), ("exp_conf", exp_conf)) if value]
    ):
        logger.info(
            "init: %s not used: in a slot of `trialflow train`, the experiment file decides",
            " and ".join(given) + (" are" if len(given) > 1 else " is"),
        )  # fmt: skip
    ranks.connect()
    forget_model_parallelism()
    seed_everything(host.run.experiment_seed)
    host.run.stop_requested = False  # by the trial of an earlier block
    return context_class(host.run, ranks)


@contextmanager
def _rank_environment() -> Iterator[None]:
    """Without a launcher, set the variables that a launcher would: DeepSpeed needs them.

    A launcher of Determined's kind may give rank 0's address as ``DET_CHIEF_IP`` alone.
    """
    missing = {} if is_launched() else host_single_rank()
    chief = os.environ.get(CHIEF_VARIABLE)
    if is_launched() and chief and "MASTER_ADDR" not in os.environ:
        missing = {"MASTER_ADDR": chief}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


@contextmanager
def _initialised(context_class: type[TorchTrialContext]) -> Iterator[None]:
    """Initialise torch.distributed; the process group stays for a later block.

    Ranks cannot initialise it twice at the same port: a fast rank would connect to the old store.
    """
    atexit.unregister(_destroy_process_group)
    local_rank = DistributedContext.from_environment().get_local_rank()
    claim_accelerator(local_rank)
    prepare_op_builds()
    if not dist.is_initialized() and not initialises_torch_distributed():
        if issubclass(context_class, DeepSpeedTrialContext):
            deepspeed.init_distributed()
        else:
            init_torch_distributed()
        _INITIALISED_HERE.append(True)
    yield
    # Not after a failure: a failed rank must end at once, without waiting for the others.
    if _INITIALISED_HERE:
        atexit.register(_destroy_process_group)


def _ranks() -> DistributedContext:
    ranks = DistributedContext.from_environment()
    return _RANKS.setdefault(dist.group.WORLD, ranks) if dist.is_initialized() else ranks


def _destroy_process_group() -> None:
    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    elif dist.is_initialized():
        dist.destroy_process_group()
