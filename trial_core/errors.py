"""Every error trialflow raises on purpose.

Each message says what was seen, what was expected, and what to do about it::

    TrialflowError
    ├── ConfigError            the experiment YAML cannot be used as written
    ├── TrialError             the user's trial breaks the trial API's rules
    ├── SlotsError             the slot group could not be started or used
    │   ├── LaunchError        a slot group could not be started
    │   ├── RankFailed         a rank died, or its workload raised
    │   ├── DeadlineExceeded   ranks are alive but did not answer in time
    │   ├── Stalled            ranks are alive but get no further
    │   └── Stopped            the ranks were ended because the run was asked to stop
    ├── CheckpointError        anything about stored checkpoints
    │   ├── StorageError       the storage cannot be reached, read or written
    │   ├── CheckpointNotFound no committed checkpoint answers to that name
    │   ├── CheckpointDamaged  a file differs from what its manifest promises
    │   └── CommitConflict     another writer has committed under the same name
    │       └── Superseded     another attempt has taken the trial over
    └── RegistryError          anything about models, their versions and aliases
        ├── ModelNotFound      no model, or no version of it, answers to that name
        ├── PromotionConflict  somebody else has moved the model's aliases meanwhile
        └── PromotionRefused   the model's aliases cannot be moved so

``RankFailed`` carries what a person needs to find the cause: see its attributes. The other
classes carry their message alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any


class TrialflowError(Exception):
    """Base of every error that trialflow raises on purpose."""


class ConfigError(TrialflowError):
    """The experiment configuration cannot be used as written."""


class TrialError(TrialflowError):
    """The user's trial breaks a rule of the trial API. Raised on the ranks, shown by the driver."""


class SlotsError(TrialflowError):
    """The slot group could not be started or used."""

    def report(self) -> str:
        """All that is known of it, for a log."""
        return str(self)


class LaunchError(SlotsError):
    """A slot group could not be started."""


class DeadlineExceeded(SlotsError):
    """Ranks are alive but did not answer within the deadline of a request."""


class Stalled(SlotsError):
    """Ranks are alive but get no further; they were ended.

    Attributes:
        stacks: where each rank's main thread was, as text, by rank.
    """

    def __init__(self, message: str, stacks: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.stacks = tuple(stacks)

    def report(self) -> str:
        """The message, and where each rank's main thread was."""
        return "\n".join(
            [str(self), *(f"rank {rank}:\n{stack}" for rank, stack in enumerate(self.stacks))]
        )


class Stopped(SlotsError):
    """The ranks were ended as they are because the run was asked to stop. What was not saved by
    then is lost; the last committed checkpoint is not."""


class CheckpointError(TrialflowError):
    """Anything about stored checkpoints."""


class StorageError(CheckpointError):
    """The checkpoint storage cannot be reached, read or written."""


class CheckpointNotFound(CheckpointError):
    """No committed checkpoint answers to that name."""


class CheckpointDamaged(CheckpointError):
    """A stored file differs from what its manifest promises."""


class CommitConflict(CheckpointError):
    """Another writer has committed a checkpoint under the same name."""


class Superseded(CommitConflict):
    """Another attempt has taken the trial over: this one was presumed dead, and may not commit."""


class RegistryError(TrialflowError):
    """Anything about models, their versions and aliases."""


class ModelNotFound(RegistryError):
    """No model, or no version of it, answers to that name."""


class PromotionConflict(RegistryError):
    """Somebody else has moved the model's aliases meanwhile: says who, when, to what."""


class PromotionRefused(RegistryError):
    """The model's aliases cannot be moved so, whoever else does what."""


class RankFailed(SlotsError):
    """A rank died, or the workload it was running raised.

    Attributes:
        rank: the rank that failed first.
        host: the machine it ran on.
        during: the workload it was running, in words.
        exit_code: its exit code, when it exited by itself.
        signal_name: the signal that ended it (``"SIGKILL"``), when one did.
        error_type: the class name of the exception it raised, when it raised one.
        is_ours: whether that exception is a `TrialflowError`: the user's classes have names too.
        error_message: that exception's message.
        rank_traceback: that exception's traceback, as text.
        log_tail: the last lines of the rank's log.
        log_path: where the whole log lies on ``host``.
    """

    def __init__(
        self,
        *,
        rank: int,
        host: str,
        during: str,
        exit_code: int | None = None,
        signal_name: str | None = None,
        error_type: str | None = None,
        is_ours: bool = False,
        error_message: str | None = None,
        rank_traceback: str | None = None,
        log_tail: str = "",
        log_path: str = "",
    ) -> None:
        self.rank = rank
        self.host = host
        self.during = during
        self.exit_code = exit_code
        self.signal_name = signal_name
        self.error_type = error_type
        self.is_ours = is_ours
        self.error_message = error_message
        self.rank_traceback = rank_traceback
        self.log_tail = log_tail
        self.log_path = log_path
        super().__init__(self.headline)

    def __reduce__(self) -> tuple[Callable[[], RankFailed], tuple[()], dict[str, Any]]:
        """Pickle by name: an exception's own way would pass the message as the first argument."""
        parameters = inspect.signature(RankFailed).parameters
        fields = {name: getattr(self, name) for name in parameters}
        return partial(type(self), **fields), (), vars(self)

    @property
    def is_trial_mistake(self) -> bool:
        """Whether the rank refused the user's trial: starting again would end the same way."""
        return self.is_ours and self.error_type == TrialError.__name__

    @property
    def headline(self) -> str:
        """One sentence: which rank, where, doing what, and how it ended."""
        if self.error_type is not None:
            how = f"raised {self.error_type}: {self.error_message}"
        elif self.signal_name is not None:
            how = f"was ended by {self.signal_name}"
        elif self.exit_code is not None:
            how = f"exited with code {self.exit_code}"
        else:
            how = "closed its connection"
        return f"rank {self.rank} on {self.host} {how} (during {self.during})"

    def report(self) -> str:
        """The headline, the rank's traceback or its log's last lines, and where the log is."""
        parts = [self.headline]
        if self.rank_traceback:
            parts.append(self.rank_traceback.rstrip())
        elif self.log_tail:
            parts.append("last lines of its log:\n" + self.log_tail.rstrip())
        if self.log_path:
            parts.append(f"whole log: {self.log_path}")
        return "\n".join(parts)
