"""The errors of trialflow. Each message says what was seen, what was expected, and what to do.

``RankFailed`` and ``Stalled`` have attributes; the other classes only have a message.
Scripts written for Determined catch some mistakes as Python's own errors, so ``ConfigError`` is
also a ValueError and a TypeError, ``TrialError`` and ``CheckpointError`` a RuntimeError,
``TrialTypeError`` also a TypeError and an AssertionError, and ``TrialValueError`` also a
ValueError and an AssertionError.
``InvalidExperimentException``, Determined's name, is ``TrialError``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any


class TrialflowError(Exception):
    """Base of every error of trialflow."""


class TrialBusy(TrialflowError):
    """Another process of this machine is training the trial."""


class ConfigError(TrialflowError, ValueError, TypeError):
    """The experiment configuration cannot be used as written."""


class TrialError(TrialflowError, RuntimeError):
    """The user's trial breaks a rule of the trial API. Raised on a rank, reported by the driver."""


class TrialTypeError(TrialError, TypeError, AssertionError):
    """An argument, or the result of a method of the trial, has a wrong type."""


class TrialValueError(TrialError, ValueError, AssertionError):
    """An argument, or the result or effect of a method of the trial, has a wrong value."""


class NonFiniteLoss(TrialError):
    """The loss of a trial is not finite, and stays so (`stopping.fail_on_non_finite_loss`)."""


class InvalidHP(TrialValueError):
    """Raised by a trial or script that cannot be trained with its hyperparameters: no restart."""


InvalidExperimentException = TrialError
"""Determined's name, for trials that catch it."""

_TRIAL_MISTAKES = frozenset(
    each.__name__ for each in (TrialError, TrialTypeError, TrialValueError, InvalidHP)
) | {"CheckpointRefused", "CheckpointUnrestorable"}


class SlotsError(TrialflowError):
    """The slot group could not be started or used."""

    def report(self) -> str:
        """The message and all details, for a log."""
        return str(self)


class LaunchError(SlotsError):
    """A slot group could not be started.

    Attributes:
        node: the node that cannot start its ranks, if any.
    """

    def __init__(self, message: str = "", node: str | None = None) -> None:
        super().__init__(message)
        self.node = node


class DeadlineExceeded(SlotsError):
    """A rank did not come to a collective of trialflow in time."""


class Stalled(SlotsError):
    """Ranks are alive but make no progress; they were killed.

    Attributes:
        stacks: the stack of each rank's main thread, as text.
        during: the name of the stage that the ranks were in; empty if unknown.
        seconds: how long they had made no progress; 0 if unknown.
    """

    def __init__(
        self, message: str, stacks: Sequence[str] = (), during: str = "", seconds: float = 0.0
    ) -> None:
        super().__init__(message)
        self.stacks = tuple(stacks)
        self.during = during
        self.seconds = seconds

    def report(self) -> str:
        """The message, and the stack of each rank's main thread."""
        return "\n".join(
            [str(self), *(f"rank {rank}:\n{stack}" for rank, stack in enumerate(self.stacks))]
        )


class Stopped(SlotsError):
    """The ranks were killed because the run was asked to stop.

    Progress since the last committed checkpoint is lost.
    """


class CheckpointError(TrialflowError, RuntimeError):
    """An error of stored checkpoints."""


class StorageError(CheckpointError):
    """The checkpoint storage cannot be reached, read or written."""


class CheckpointRefused(CheckpointError):
    """The files that ranks have written cannot be one checkpoint; it is not committed."""


class WeightsChanged(CheckpointRefused):
    """Weights were not copied as they were at a save: the trial has changed them, or the copy
    has failed. The ranks can save again."""


class CheckpointUnrestorable(CheckpointError):
    """The ranks cannot restore the first checkpoint that they have saved; it is not committed."""


class CheckpointNotFound(CheckpointError):
    """No committed checkpoint has that name."""


class CheckpointDamaged(CheckpointError):
    """A stored file does not match its manifest, or an object is too large to be one of ours."""


class TopologyMismatch(CheckpointError):
    """These ranks cannot restore a checkpoint; others, or another number of them, can."""


class CommitConflict(CheckpointError):
    """Another writer has committed a checkpoint under the same name."""


class Superseded(CommitConflict):
    """Another attempt has taken over the trial; this one was presumed dead and cannot commit."""


class RegistryError(TrialflowError):
    """An error of models, their versions and aliases."""


class SearchError(TrialflowError):
    """An error of a hyperparameter search: its log, its sampler, or too many failed trials."""


class ModelNotFound(RegistryError):
    """No model, or no version of it, has that name."""


class PromotionConflict(RegistryError):
    """Another process has moved the model's aliases meanwhile; the message has the details."""


class PromotionRefused(RegistryError):
    """The model's aliases cannot be moved like this, even without a conflict."""


@dataclass(kw_only=True, eq=False, repr=False)
class RankFailed(SlotsError):
    """A rank died, or the workload it was running raised.

    Attributes:
        rank: the rank that failed first.
        host: the machine it ran on.
        during: the stage it was in, as its Prefect task is called.
        exit_code: its exit code, if it exited by itself.
        signal_name: the signal that killed it (``"SIGKILL"``), if one did.
        node_lost: how its machine was lost, if it was.
        error_type: the class name of the exception it raised, if any.
        is_ours: True if that exception is a `TrialflowError`; users may reuse the name.
        error_message: that exception's message.
        rank_traceback: that exception's traceback, as text.
        batches_trained: how many batches the rank had trained when it raised.
        log_tail: the last lines of the rank's log.
        log_path: the path of the whole log on ``host``.
    """

    rank: int
    host: str
    during: str
    exit_code: int | None = None
    signal_name: str | None = None
    node_lost: str | None = None
    error_type: str | None = None
    is_ours: bool = False
    error_message: str | None = None
    rank_traceback: str | None = None
    batches_trained: int | None = None
    log_tail: str = ""
    log_path: str = ""

    def __post_init__(self) -> None:
        super().__init__(self.headline)

    def __reduce__(self) -> tuple[Callable[[], RankFailed], tuple[()], dict[str, Any]]:
        """Pickle by keyword: an exception's default passes the message as the first argument."""
        return partial(type(self), **asdict(self)), (), vars(self)

    @property
    def is_trial_mistake(self) -> bool:
        """True if the rank refused the user's trial, so that a restart would fail the same way."""
        return self.is_ours and self.error_type in _TRIAL_MISTAKES

    @property
    def headline(self) -> str:
        """One sentence: which rank failed, on which host, how, and during which stage."""
        if self.node_lost is not None:
            how = f"was lost with its node: {self.node_lost}"
        elif self.error_type is not None:
            how = f"raised {self.error_type}: {self.error_message}"
        elif self.signal_name is not None:
            how = f"was killed by {self.signal_name}"
        elif self.exit_code is not None:
            how = f"exited with code {self.exit_code}"
        else:
            how = "closed its connection"
        return f"rank {self.rank} on {self.host} {how} (during {self.during})"

    def report(self) -> str:
        """The headline, the rank's traceback or its log's last lines, and the log's path."""
        parts = [self.headline]
        if self.rank_traceback:
            parts.append(self.rank_traceback.rstrip())
        elif self.log_tail:
            parts.append("last lines of its log:\n" + self.log_tail.rstrip())
        if self.log_path:
            parts.append(f"whole log: {self.log_path}")
        return "\n".join(parts)
