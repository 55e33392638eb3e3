"""`PyTorchTrial`: the base class of a user's trial. Follows Determined's class.

`TorchTrial` is the base that it shares with `DeepSpeedTrial`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from trial_core.errors import TrialError
from trial_core.pytorch.context import PyTorchTrialContext
from trial_core.rank.data.batch_length import data_length
from trial_core.rank.trial.callback import PyTorchCallback
from trial_core.rank.trial.metric_reduction import Reducer

if TYPE_CHECKING:
    from trial_core.rank.controller import Controller


class ControllerClass:
    """A class attribute that imports the controller on first use: importing a trial stays cheap."""

    def __get__(self, instance: object, owner: type) -> type[Controller]:
        from trial_core.rank.controller import Controller

        return Controller


class TorchTrial(ABC):
    """The base of trials of both kinds."""

    trial_controller_class: ClassVar = ControllerClass()
    """The class that drives the trial on every rank. Overriding it has no effect."""

    @abstractmethod
    def build_validation_data_loader(self) -> Any:
        """The validation data: a `trial_core.pytorch.DataLoader`, as for training."""

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        """Validation metrics of the whole set; define this instead of `evaluate_batch`.

        Called on rank 0 only, while the other ranks wait for at most the deadline of
        `DistributedContext`'s collectives. Not for models whose forward pass needs other ranks.

        Args:
            data_loader: all batches of the validation set (of a DeepSpeedTrial, micro-batches),
                unsharded, not moved to the device.

        Returns:
            Final metrics by name; `evaluation_reducer` does not apply.
        """
        raise TrialError(f"{type(self).__name__} does not define evaluate_full_dataset")

    def evaluation_reducer(self) -> Reducer | dict[str, Reducer]:
        """How to reduce validation metrics over batches: one way, or one for each metric name."""
        return Reducer.AVG

    def get_batch_length(self, batch: Any) -> int:
        """The number of records in `batch`, a batch of the training or validation loader.

        By default the length of the first tensor or array in nested dicts, lists and tuples.
        Override it for batches of other types. A run counts its samples by it where the training
        loader does not tell their number: an iterable data set, a ``batch_sampler``, a loader of
        another type. There, batches without a tensor or array count as the experiment's
        ``global_batch_size`` or DeepSpeed's ``train_batch_size`` says.

        Raises:
            TrialError: there is no tensor or array with a first dimension.
        """
        return data_length(batch)

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        """Callbacks by name. Checkpoints hold their state under these names."""
        return {}


class PyTorchTrial(TorchTrial):
    """Models, optimizers, data, and how to train and validate one batch.

    Follows ``determined.pytorch.PyTorchTrial``. There is one instance on every rank. Unless stated
    otherwise, every rank calls every method, in the same order.
    """

    trial_context_class: ClassVar[type[PyTorchTrialContext]] = PyTorchTrialContext

    @abstractmethod
    def __init__(self, context: PyTorchTrialContext) -> None:
        """Build models, optimizers and LR schedulers, and wrap them::

            self.context = context
            self.model = context.wrap_model(nn.Linear(64, 10))
            self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters()))
            self.scheduler = context.wrap_lr_scheduler(
                torch.optim.lr_scheduler.StepLR(self.optimizer, 5),
                step_mode=LRScheduler.StepMode.STEP_EVERY_EPOCH,
            )

        There may be any number of each. Checkpoints contain the wrapped objects.
        """

    @abstractmethod
    def train_batch(
        self, batch: Any, epoch_idx: int, batch_idx: int
    ) -> torch.Tensor | dict[str, Any]:
        """Train on one batch of this rank's shard::

            images, labels = batch
            loss = nn.functional.cross_entropy(self.model(images), labels)
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            return {"loss": loss}

        Args:
            batch: from the training loader, on this rank's device.
            epoch_idx: the epoch in which this batch begins, from 0.
            batch_idx: number of batches trained before this one, in all runs.

        Returns:
            Metrics: a scalar tensor (reported as ``loss``), or numbers by name. They may stay on
            the device: the controller reads them when the workload ends.
        """

    @abstractmethod
    def build_training_data_loader(self) -> Any:
        """The training data: a `trial_core.pytorch.DataLoader`.

        Give it ``batch_size=self.context.get_per_slot_batch_size()``. After
        ``context.disable_dataset_reproducibility_checks()`` it may be any iterable of this rank's
        batches; when it ends, it is iterated over again. Checkpoints hold the state of an iterable
        with ``state_dict`` and ``load_state_dict``, such as torchdata's ``StatefulDataLoader``; see
        `DeepSpeedTrial.build_training_data_loader`.
        """

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Validation metrics of one batch, by name::

            images, labels = batch
            return {"validation_loss": nn.functional.cross_entropy(self.model(images), labels)}

        Called without gradients, with the models in evaluation mode. Called once before training as
        well, only for the names of the metrics (unless a callback overrides a validation hook).

        Args:
            batch: from this rank's shard of the validation loader, on this rank's device.
            batch_idx: counts the calls of this validation from 0. The parameter is optional.

        Returns:
            Numbers, or arrays of numbers, by name; the same names in every call.
            `evaluation_reducer` says how to reduce them.
        """
        raise TrialError(f"{type(self).__name__} does not define evaluate_batch")
