"""The Core API as a module: `init` once, then `train`, `checkpoint` and the others are names here.

Follows ``determined.experimental.core_v2``. `trial_core.init` is the same as a block, which also
knows how the script ends::

    core_v2.init(config=core_v2.Config(name="mnist", hparams={"lr": 0.1}))
    for step in range(100):
        core_v2.train.report_training_metrics(step, {"loss": 0.5})
    core_v2.close()
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, NoReturn

from trial_core import core
from trial_core.common.lazy_names import lazy_names
from trial_core.errors import TrialError, TrialValueError
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.core_api.context import Context, PreemptMode, TensorboardMode
from trial_core.rank.core_api.init import init as enter

__all__ = [
    "Config",
    "DefaultConfig",
    "DistributedContext",
    "PreemptMode",
    "TensorboardMode",
    "UnmanagedConfig",
    "checkpoint",
    "close",
    "core",
    "distributed",
    "info",
    "init",
    "init_context",
    "preempt",
    "searcher",
    "train",
]


@dataclass
class Config:
    """The experiment of a script that you start. In a slot, the experiment file decides.

    Attributes:
        name, hparams, data, description, labels, checkpoint_storage, searcher: as in an experiment
            file.
        external_experiment_id, external_trial_id: with both, a script that is started again
            continues the trial that it began under these names.
        workspace, project: accepted as in Determined, without effect.
    """

    name: str | None = None
    hparams: Mapping[str, Any] | None = None
    data: Mapping[str, Any] | None = None
    description: str | None = None
    labels: Sequence[str] | None = None
    workspace: str | None = None
    project: str | None = None
    checkpoint_storage: str | Mapping[str, Any] | None = None
    searcher: Mapping[str, Any] | None = None
    external_experiment_id: str | None = None
    external_trial_id: str | None = None

    def exp_conf(self) -> dict[str, Any]:
        """The fields of an experiment file that are given.

        Raises:
            TrialValueError: a trial's id is given without the experiment's.
        """
        names = ("data", "description", "labels", "checkpoint_storage", "searcher")
        given = {"name": self.name, "hyperparameters": self.hparams}
        given |= {name: getattr(self, name) for name in names}
        if self.external_trial_id is not None:
            if self.external_experiment_id is None:
                raise TrialValueError(
                    f"core_v2: external_trial_id is {self.external_trial_id!r}, and "
                    "external_experiment_id is missing; give both"
                )
            # The newest trial of an experiment is continued, so this one has its own.
            given["name"] = f"{self.external_experiment_id}-{self.external_trial_id}"
        return {name: value for name, value in given.items() if value is not None}


DefaultConfig = UnmanagedConfig = Config


class _BeforeInit:
    """Stands for a part of the context until `init` is called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TrialError(
            f"core_v2.{self._name}.{name} is used outside a run: call core_v2.init before, and "
            "core_v2.close after"
        )


_PARTS = ("train", "checkpoint", "distributed", "preempt", "searcher", "info")

train: Any = _BeforeInit("train")
checkpoint: Any = _BeforeInit("checkpoint")
distributed: Any = _BeforeInit("distributed")
preempt: Any = _BeforeInit("preempt")
searcher: Any = _BeforeInit("searcher")
info: Any = _BeforeInit("info")


@contextmanager
def init_context(
    *,
    config: Config | None = None,
    defaults: Config | None = None,
    unmanaged: Config | None = None,
    client: Any = None,
    distributed: DistributedContext | None = None,
    checkpoint_storage: str | Mapping[str, Any] | None = None,
    preempt_mode: PreemptMode = PreemptMode.WorkersAskChief,
    tensorboard_mode: TensorboardMode = TensorboardMode.AUTO,
) -> Iterator[Context]:
    """The context of a Core API script, as a block: `trial_core.init` with Determined's arguments.

    Args:
        config: the experiment of a script that you start.
        defaults, unmanaged: the older names of `config`; each gives the fields that the others
            leave out.
        client: accepted as in Determined, without effect.
        distributed, checkpoint_storage, preempt_mode, tensorboard_mode: as in `trial_core.init`.

    Raises:
        TrialflowError: as `trial_core.init`.
    """
    fields: dict[str, Any] = {}
    for each in filter(None, (unmanaged, defaults, config)):
        fields |= {name: value for name, value in asdict(each).items() if value is not None}
    merged = Config(**fields)
    with enter(
        distributed=distributed,
        checkpoint_storage=checkpoint_storage,
        preempt_mode=preempt_mode,
        tensorboard_mode=tensorboard_mode,
        exp_conf=merged.exp_conf(),
        latest_checkpoint=None if merged.external_trial_id is None else "latest",
    ) as context:
        yield context


class _BegunRun(NamedTuple):
    """The run that `init` has begun, and the error that last ended a program of this process before
    it, such as a notebook's cell."""

    block: ExitStack
    seen: BaseException | None


_run: _BegunRun | None = None


def init(**arguments: Any) -> None:
    """Begin a run: `train`, `checkpoint`, `distributed`, `preempt`, `searcher`, `info` are its own.

    A run that an earlier call has begun ends. The end of the program closes the run, too: as failed
    if an exception ends it. Use `trial_core.init` if the script ends with ``sys.exit(1)``.

    Args:
        arguments: those of `init_context`.

    Raises:
        TrialflowError: as `trial_core.init`.
    """
    global _run
    close()
    block = ExitStack()
    context = block.enter_context(init_context(**arguments))
    _run = _BegunRun(block, _last_error())
    globals().update({name: getattr(context, name) for name in _PARTS})
    atexit.register(_close_at_exit)


def close() -> None:
    """End the run: the last checkpoint is committed. Does nothing without a run.

    Raises:
        TrialflowError: as the end of a block of `trial_core.init`.
    """
    _end(None)


def _end(error: BaseException | None) -> None:
    global _run
    ending, _run = _run, None
    if ending is None:
        return
    atexit.unregister(_close_at_exit)
    globals().update({name: _BeforeInit(name) for name in _PARTS})
    if error is None:
        ending.block.close()
    else:
        ending.block.__exit__(type(error), error, error.__traceback__)


def _close_at_exit() -> None:
    error = _last_error()
    _end(error if _run is not None and error is not _run.seen else None)


def _last_error() -> BaseException | None:
    return getattr(sys, "last_value", None)


__getattr__, __dir__ = lazy_names(__name__, __all__, {})
