"""`LRScheduler`: a learning rate scheduler, and when it steps. Follows Determined's class."""

from __future__ import annotations

from enum import Enum
from typing import Any

from torch.optim.lr_scheduler import LRScheduler as TorchScheduler, ReduceLROnPlateau

from trial_core.errors import TrialError, TrialTypeError
from trial_core.schedule.units import EpochLength


class LRScheduler:
    """A scheduler of ``torch.optim.lr_scheduler`` that the controller steps.

    Checkpoints hold its state. `PyTorchTrialContext.wrap_lr_scheduler` makes one.

    Args:
        scheduler: the scheduler of an optimizer.
        step_mode: when the controller steps it.
        frequency: it steps at every `frequency`-th such time.

    Attributes:
        scheduler: torch's scheduler.

    Raises:
        TrialError: an argument has the wrong type or value.
    """

    class StepMode(Enum):
        """When a scheduler steps."""

        STEP_EVERY_EPOCH = 1
        """After an epoch's last batch."""
        STEP_EVERY_BATCH = 2
        """After every batch."""
        MANUAL_STEP = 3
        """Never: the trial calls ``scheduler.step()``."""
        STEP_EVERY_OPTIMIZER_STEP = 4
        """After every batch in which optimizers step (see ``aggregation_frequency``)."""

    def __init__(
        self, scheduler: TorchScheduler, step_mode: LRScheduler.StepMode, frequency: int = 1
    ) -> None:
        if not isinstance(scheduler, (TorchScheduler, ReduceLROnPlateau)):
            raise TrialTypeError(
                "an LR scheduler is one of torch.optim.lr_scheduler, got "
                f"{type(scheduler).__name__}"
            )
        if not isinstance(step_mode, LRScheduler.StepMode):
            raise TrialTypeError(
                f"step_mode is one of LRScheduler.StepMode's "
                f"{', '.join(LRScheduler.StepMode.__members__)}; got {step_mode!r}"
            )
        if type(frequency) is not int or frequency < 1:
            raise TrialError(f"an LR scheduler's frequency is a positive int, got {frequency!r}")
        if (
            isinstance(scheduler, ReduceLROnPlateau)
            and step_mode is not LRScheduler.StepMode.MANUAL_STEP
        ):
            raise TrialError(
                "ReduceLROnPlateau needs a metric, which only the trial knows: wrap it with "
                "LRScheduler.StepMode.MANUAL_STEP and call its step(metric)"
            )
        self.scheduler = scheduler
        self._step_mode = step_mode
        self._frequency = frequency

    def batch_ended(self, batch_idx: int, aggregation: int, epoch: EpochLength | None) -> None:
        """Step after a batch, as often as the step mode says.

        Args:
            aggregation: optimizers step once in this many batches.
            epoch: the length of an epoch; None if it is unknown.

        Raises:
            TrialError: the scheduler steps every epoch, and the length of an epoch is unknown.
        """
        before, after = (self._times(batches, aggregation, epoch) for batches in
                         (batch_idx, batch_idx + 1))  # fmt: skip
        for _ in range(before // self._frequency, after // self._frequency):
            self.scheduler.step()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step by hand, with the arguments of the scheduler's ``step``."""
        self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[Any]:
        """The learning rate of each parameter group, as the scheduler set it last."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.scheduler.load_state_dict(state_dict)

    def _times(self, batches: int, aggregation: int, epoch: EpochLength | None) -> int:
        """How often the time to step has come, after this many batches."""
        modes = LRScheduler.StepMode
        if self._step_mode is modes.MANUAL_STEP:
            return 0
        if self._step_mode is modes.STEP_EVERY_BATCH:
            return batches
        if self._step_mode is modes.STEP_EVERY_OPTIMIZER_STEP:
            return batches // aggregation
        if epoch is None:
            raise TrialError(
                "LRScheduler.StepMode.STEP_EVERY_EPOCH needs the length of an epoch, but the "
                "training loader has no len(); choose STEP_EVERY_BATCH, or return a loader with one"
            )
        return epoch.epochs_completed(batches)
