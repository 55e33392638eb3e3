"""`TorchTrialContext`: the base of the contexts of all torch trials."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, overload

import torch
from deepspeed.accelerator import get_accelerator

from trial_core.errors import TrialTypeError
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.state_files.frozen_as_built import FrozenAsBuilt
from trial_core.rank.trial.context import RunInfo, TrialContext
from trial_core.rank.trial.custom_reducers import FunctionReducer, MetricReducer, ReducerRegistry
from trial_core.rank.trial.device_transfer import to_device

ReducerT = TypeVar("ReducerT", bound=MetricReducer)


class TorchTrialContext(TrialContext):
    """Base of `PyTorchTrialContext` and `DeepSpeedTrialContext`.

    Attributes:
        device: the device that this rank trains on.
        reducers: the custom reducers that the trial has wrapped.
        reproducible_loaders: True if loaders must be `trial_core.pytorch.DataLoader`s.
        tokenizer_files: on rank 0, the files of the tokenizer that `set_tokenizer` got.
        frozen_as_built: the frozen parameters when the trial was built; None if they do not matter.
        averages: the callback whose averages of the weights validations see, or None.
        left_out: of each model, the names of the parameters that the last checkpoint left out.
    """

    def __init__(self, info: RunInfo, distributed: DistributedContext) -> None:
        super().__init__(info, distributed)
        self.device = torch.device(get_accelerator().current_device_name())
        self.reducers = ReducerRegistry()
        self.reproducible_loaders = True
        self.tokenizer_files: dict[str, bytes] = {}
        self.frozen_as_built: FrozenAsBuilt | None = None
        self.averages: Any = None
        self.left_out: list[set[str]] = []
        self._warned_types: set[type] = set()

    def disable_dataset_reproducibility_checks(self) -> None:
        """Allow data loaders other than `trial_core.pytorch.DataLoader`.

        The trial must then shard and shuffle the data itself. Checkpoints hold the state of a
        training loader with ``state_dict`` and ``load_state_dict``, such as torchdata's
        ``StatefulDataLoader``, for each rank. Any other loader starts from its first micro-batch
        when the run resumes, with a warning.
        """
        self.reproducible_loaders = False

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Keep a tokenizer's files in each checkpoint, for ``trialflow export --format hf``.

        Only useful with a model of ``transformers``, whose config is kept automatically. Later
        additions to the tokenizer are not kept: call this again.

        Args:
            tokenizer: a tokenizer or processor of ``transformers``, or another object with
                ``save_pretrained(folder)``, which rank 0 calls now: training waits for each save.

        Raises:
            TrialTypeError: `tokenizer` lacks this method.
        """
        if not callable(getattr(tokenizer, "save_pretrained", None)):
            raise TrialTypeError(
                "set_tokenizer takes a tokenizer of transformers, or another object with a method "
                f"save_pretrained(folder), got {type(tokenizer).__name__}"
            )
        if self.distributed.get_rank() != 0:
            return
        with TemporaryDirectory(prefix="trialflow-") as folder:
            tokenizer.save_pretrained(folder)
            files = [each for each in Path(folder).rglob("*") if each.is_file()]
            self.tokenizer_files = {
                each.relative_to(folder).as_posix(): each.read_bytes() for each in files
            }

    @overload
    def wrap_reducer(
        self,
        reducer: ReducerT,
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> ReducerT: ...

    @overload
    def wrap_reducer(
        self,
        reducer: Callable[[list[Any]], Any],
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> FunctionReducer: ...

    def wrap_reducer(
        self,
        reducer: Callable[[list[Any]], Any] | MetricReducer,
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> MetricReducer:
        """Register a metric that is computed from the values of all ranks.

        Every rank wraps the same reducers, in the same order.

        Args:
            reducer: a `MetricReducer`, or a function of the list of all values passed to
                ``update``.
            name: the metric's name; None if the reducer returns a dict of metrics.
            for_training: report the metric after training workloads.
            for_validation: report the metric after validations.

        Returns:
            The `MetricReducer`; for a function, an object with ``update(value)``.

        Raises:
            TrialError: `reducer` is neither of these, was wrapped before, or is used for nothing.
        """
        return self.reducers.wrap(reducer, name, for_training, for_validation)

    def to_device(self, data: Any) -> Any:
        """`data` with all tensors and arrays on this rank's device, even in dicts and sequences."""
        return to_device(data, self.device, self._warned_types)
