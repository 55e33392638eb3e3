"""Constructs the user's trial from the experiment's ``module:Class``, for every kind of trial."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from types import ModuleType
from typing import Any

from trial_core.deepspeed.config_rejection import CONFIG_ERRORS, rejection
from trial_core.deepspeed.context import DeepSpeedTrialContext, micro_batches_of
from trial_core.deepspeed.deepspeed_adapter import DeepSpeedTrialAdapter
from trial_core.deepspeed.mpu import forget_model_parallelism
from trial_core.deepspeed.op_builds import op_being_built, prepare_op_builds
from trial_core.deepspeed.trial import DeepSpeedTrial
from trial_core.driver.entrypoint_check import entrypoint_problem
from trial_core.errors import TrialError
from trial_core.processes.slots.announcer import Announcer
from trial_core.pytorch.context import PyTorchTrialContext
from trial_core.pytorch.pytorch_adapter import PyTorchTrialAdapter
from trial_core.pytorch.trial import PyTorchTrial
from trial_core.rank.collectives.accelerator import claim_accelerator
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.collectives.rendezvous import host_store, init_distributed
from trial_core.rank.rank_state import seed_everything
from trial_core.rank.trial.context import RunInfo
from trial_core.rank.trial.trial_adapter import TrialAdapter

AnyTrial = DeepSpeedTrial | PyTorchTrial
"""A trial of any kind."""

AnyTrialContext = DeepSpeedTrialContext | PyTorchTrialContext

MANUAL_INIT_VARIABLES = ("TRIALFLOW_MANUAL_INIT_DISTRIBUTED", "DET_MANUAL_INIT_DISTRIBUTED")


def load_trial_class(entrypoint: str) -> type[AnyTrial]:
    """The class that `entrypoint` names; TrialError if it does not exist, or is not a trial."""
    module_name, _, class_name = entrypoint.partition(":")
    module = _import(module_name, entrypoint)
    found: Any = module
    for part in class_name.split("."):
        if not hasattr(found, part):
            problem = entrypoint_problem(entrypoint, os.getcwd())
            raise TrialError(problem or f'entrypoint "{entrypoint}": {found!r} has no "{part}"')
        found = getattr(found, part)
    if not inspect.isclass(found) or not issubclass(found, (DeepSpeedTrial, PyTorchTrial)):
        what = f"{type(found).__name__} {found!r}"
        if inspect.isclass(found):
            bases = ", ".join(base.__name__ for base in found.__bases__)
            what = f"a class derived from {bases}"
        raise TrialError(
            f'entrypoint "{entrypoint}" is not a trial: {class_name} is {what}, but '
            "must be a subclass of trial_core.pytorch.PyTorchTrial or "
            "trial_core.deepspeed.DeepSpeedTrial"
        )
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise TrialError(f'trial "{entrypoint}" does not define {", ".join(missing)}')
    return found


_SILENT = Announcer(lambda message: None, is_silent=True)


def build_adapter(
    info: RunInfo, distributed: DistributedContext, announcer: Announcer = _SILENT
) -> TrialAdapter:
    """Construct the trial that the experiment names. Collective. TrialError if the entrypoint is
    not a trial, or DeepSpeed rejects the trial's configuration."""
    host_store()
    prepare_op_builds()
    # First: a module may use a device when it is imported, and the current one is number 0.
    claim_accelerator(distributed.get_local_rank())
    entrypoint = str(info.experiment["entrypoint"])
    with announcer.activity(f"importing {entrypoint}", op_being_built):
        trial_class = load_trial_class(entrypoint)
    seed = info.experiment_seed
    if not initialises_torch_distributed():
        with announcer.activity("connecting the ranks", op_being_built):
            init_distributed(issubclass(trial_class, DeepSpeedTrial))
            distributed.connect()
    forget_model_parallelism()
    # The same seed on every rank: all must build the same weights.
    seed_everything(seed)
    context: Any = trial_class.trial_context_class(info, distributed)
    try:
        with (
            announcer.activity(f"constructing {entrypoint}", op_being_built),
            micro_batches_of(info.micro_batch_samples),
        ):
            trial = trial_class(context)
    except (*CONFIG_ERRORS, AttributeError, RuntimeError) as error:
        if not _was_raised_by_deepspeed(error) or (why := rejection(error)) is None:
            raise
        raise TrialError(why) from error
    return adapter_of(trial, context, seed)


def adapter_of(trial: AnyTrial, context: Any, seed: int) -> TrialAdapter:
    """The adapter of a constructed trial. Collective. TrialError if the trial wrapped nothing to
    train, or its callbacks have the wrong type."""
    context.distributed.connect()
    adapter: TrialAdapter
    if isinstance(trial, DeepSpeedTrial):
        adapter = DeepSpeedTrialAdapter(trial, context)
    else:
        adapter = PyTorchTrialAdapter(trial, context)
    # A different seed per data shard: shards must not share their dropout masks.
    seed_everything(seed + 1 + adapter.data_parallel_rank)
    return adapter


def initialises_torch_distributed() -> bool:
    """Return whether the environment says that the trial initialises torch.distributed itself."""
    return any(
        os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no")
        for name in MANUAL_INIT_VARIABLES
    )


def _import(module_name: str, entrypoint: str) -> ModuleType:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            if error.name is not None and error.name.partition(".")[0] == "determined":
                raise TrialError(
                    f'entrypoint "{entrypoint}": the module imports {error.name}, which trialflow '
                    "replaces: import trial_core.pytorch for determined.pytorch, and trial_core "
                    "for determined (docs/guides/move-from-determined.md)"
                ) from error
            raise  # the module exists, and imports another one that does not
        raise TrialError(entrypoint_problem(entrypoint, folder) or str(error)) from error


def _was_raised_by_deepspeed(error: BaseException) -> bool:
    """True if the innermost frame of `error` is in DeepSpeed or pydantic."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    name = str(traceback.tb_frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in ("deepspeed", "pydantic", "pydantic_core")
