"""`DeepSpeedTrial`: the class a user writes. Follows Determined's class of the same name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from trial_core.deepspeed.context import DeepSpeedTrialContext
from trial_core.deepspeed.controller_class import ControllerClass
from trial_core.deepspeed.weights import load_engine, load_weights
from trial_core.errors import TrialError
from trial_core.pytorch.batch_length import batch_length
from trial_core.pytorch.callback import PyTorchCallback
from trial_core.pytorch.reducer import Reducer


class DeepSpeedTrial(ABC):
    """A model, its data, and how to train and validate one batch of it.

    One instance lives on every rank. Every method is called on every rank, in the same order.
    """

    trial_context_class: ClassVar[type[DeepSpeedTrialContext]] = DeepSpeedTrialContext
    trial_controller_class: ClassVar = ControllerClass()
    """The class that drives the trial on every rank. To be read: overriding it changes nothing."""

    @abstractmethod
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        """Build the engine(s) with ``deepspeed.initialize`` and wrap them::

        self.context = context
        engine, _, _, _ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=ds_config
        )
        self.engine = context.wrap_model_engine(engine)
        """

    @abstractmethod
    def train_batch(
        self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int
    ) -> torch.Tensor | dict[str, Any]:
        """Train on one micro-batch (without pipelines) or one whole batch (with them).

        Without pipelines this is called `gradient_accumulation_steps` times for one batch::

            batch = self.context.to_device(next(dataloader_iter))
            loss = self.engine(batch)
            self.engine.backward(loss)
            self.engine.step()
            return {"loss": loss}

        Args:
            dataloader_iter: micro-batches without end; None on ranks that need no data. What is
                taken from it is counted: a resumed run goes on with the one after the last.
            epoch_idx: the epoch in which this batch begins.
            batch_idx: batches trained before this one, over the whole life of the trial.

        Returns:
            Metrics: a scalar tensor (called ``loss``), or numbers by name. They may stay on the
            device; nothing waits for them before the workload's end.
        """

    @abstractmethod
    def build_training_data_loader(self) -> Any:
        """The training data: a `trial_core.pytorch.DataLoader` of micro-batches.

        May be None on ranks whose `ModelParallelUnit` says that they need no data. After
        ``context.disable_dataset_reproducibility_checks()`` it may be any iterable of this rank's
        micro-batches, which is iterated over again whenever it ends. If it has ``state_dict`` and
        ``load_state_dict``, as torchdata's ``StatefulDataLoader`` has, checkpoints hold its state:

        * ``state_dict()`` is called on every rank between two batches, and must tell what comes
          after the last micro-batch that the loader gave, whatever it has loaded ahead;
        * after ``load_state_dict(state)``, ``iter(loader)`` must go on from there; it may give
          nothing if the pass was over. What `iter` itself draws at random then does not count.
        """

    @abstractmethod
    def build_validation_data_loader(self) -> Any:
        """The validation data: a `trial_core.pytorch.DataLoader` of micro-batches."""

    def evaluate_batch(
        self, dataloader_iter: Iterator[Any] | None, batch_idx: int
    ) -> dict[str, Any]:
        """Validation metrics of one micro-batch, by name::

            batch = self.context.to_device(next(dataloader_iter))
            return {"loss": self.engine(batch)}

        With pipelines, of one group of `gradient_accumulation_steps` micro-batches, which
        ``self.engine.eval_batch(dataloader_iter)`` takes by itself; what does not fill a group on
        every data-parallel rank is left out.

        Called without gradients, with the engines in evaluation mode. Where a forward pass needs
        other ranks (ZeRO-3, model parallelism), all ranks call it equally often, and a rank that
        has come to the end of its shard is given a batch whose metrics do not count.

        Args:
            dataloader_iter: micro-batches of this rank's shard; None on ranks that need no data.
            batch_idx: counts the calls of this validation, from 0. This parameter may be left out.

        Returns:
            Numbers, or arrays of them, by name: the same names in every call. They may stay on the
            device. `evaluation_reducer` says how they become one.
        """
        raise TrialError(f"{type(self).__name__} does not define evaluate_batch")

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        """Validation metrics of the whole set; to be defined instead of `evaluate_batch`.

        Called on rank 0 alone, while the other ranks wait: only for engines whose forward pass
        needs no other rank, and within the deadline of `DistributedContext`'s collectives.

        Args:
            data_loader: all micro-batches of the validation set, unsharded.

        Returns:
            Metrics by name, reduced already: `evaluation_reducer` is not asked.
        """
        raise TrialError(f"{type(self).__name__} does not define evaluate_full_dataset")

    def evaluation_reducer(self) -> Reducer | dict[str, Reducer]:
        """How per-batch validation metrics become one: for all, or by metric name."""
        return Reducer.AVG

    def get_batch_length(self, batch: Any) -> int:
        """The number of records in `batch`, which the training or validation loader gave.

        By default the length of the first tensor or array in it, through dicts, lists and tuples.
        To be overridden for batches of other types. Batches are trained, counted and reported
        without it: it is there for the trial's own code.

        Raises:
            TrialError: there is no tensor or array with a first dimension.
        """
        return batch_length(batch)

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        """Callbacks by name; under that name their state is saved and restored."""
        return {}

    def save(self, context: DeepSpeedTrialContext, path: Path) -> None:
        """Write this rank's part of a checkpoint below `path`. Collective: every rank calls this.

        Each rank has a folder of its own; together they become one checkpoint, so ranks must not
        write the same file name with different content.
        """
        settings = context.get_experiment_config().get("checkpointing") or {}
        for i, engine in enumerate(context.models):
            engine.save_checkpoint(
                str(path),
                tag=f"model{i}",
                exclude_frozen_parameters=bool(settings.get("exclude_frozen_parameters")),
            )

    def load(self, context: DeepSpeedTrialContext, load_path: Path) -> None:
        """Restore from the files of all ranks below `load_path`. Collective: every rank calls this.

        Raises:
            TrialError: DeepSpeed found no checkpoint of an engine there.
        """
        for i, engine in enumerate(context.models):
            load_engine(engine, load_path, tag=f"model{i}")

    def load_weights(self, context: DeepSpeedTrialContext, load_path: Path) -> None:
        """Load the models' weights alone from the files of all ranks below `load_path`.

        For a trial that starts with another's weights (``searcher.source_weights_only``). A trial
        that overrides `save` overrides this too. Collective: every rank calls this.

        Raises:
            TrialError: DeepSpeed found no weights of an engine there.
        """
        for i, engine in enumerate(context.models):
            load_weights(engine, load_path, tag=f"model{i}")
