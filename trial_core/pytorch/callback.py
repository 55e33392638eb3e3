"""`PyTorchCallback`: code of the user's that runs at fixed places of a run.

Follows ``determined.pytorch.PyTorchCallback``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from trial_core.errors import TrialError

# Every hook, in the order of a run, with what it is given, in the order of its parameters.
HOOKS: Mapping[str, tuple[str, ...]] = {
    "on_trial_startup": ("first_batch_idx", "checkpoint_uuid"),
    "on_checkpoint_load_start": ("checkpoint",),
    "on_training_start": (),
    "on_training_epoch_start": ("epoch_idx",),
    "on_training_epoch_end": ("epoch_idx",),
    "on_training_workload_end": ("avg_metrics", "batch_metrics"),
    "on_validation_start": (),
    "on_validation_epoch_start": (),
    "on_validation_epoch_end": ("outputs",),
    "on_validation_end": ("metrics",),
    "on_checkpoint_save_start": ("checkpoint",),
    "on_checkpoint_write_end": ("checkpoint_dir",),
    "on_checkpoint_end": ("checkpoint_dir",),
    "on_checkpoint_upload_end": ("uuid",),
    "on_trial_shutdown": (),
}


class PyTorchCallback:
    """Does nothing; override the hooks of interest, and return it from `build_callbacks`.

    Where every hook runs::

        on_trial_startup(first_batch_idx, checkpoint_uuid)
        build the data loaders
        if there is a checkpoint to start from, and not for its weights alone:
            on_checkpoint_load_start(checkpoint)
            restore the trial
            load_state_dict(state_dict)
        on_training_start()
        restore the random generators               if the trial goes on

        until max_length is reached or a stop is asked for:

            a train-workload, at most `scheduling_unit` batches:
                for each batch:
                    on_training_epoch_start(epoch_idx)      if an epoch begins with it
                    train_batch(...)                        for each micro-batch
                    on_training_epoch_end(epoch_idx)        if an epoch ends with it
                on_training_workload_end(avg_metrics, batch_metrics)

            a validation, when one is due and no stop is asked for; maybe also before all training:
                on_validation_start()
                on_validation_epoch_start()
                for each batch:
                    evaluate_batch(...)                     or evaluate_full_dataset, on rank 0
                on_validation_epoch_end(outputs)
                on_validation_end(metrics)

            a checkpoint, when one is due, and after a stop:
                state_dict()
                on_checkpoint_save_start(checkpoint)
                save the trial to checkpoint_dir
                on_checkpoint_write_end(checkpoint_dir)
                on_checkpoint_end(checkpoint_dir)           deprecated
                upload it, beside what follows; when that has ended, between two of the above, at
                the latest before the next checkpoint or the end:
                    on_checkpoint_upload_end(uuid)

        on_trial_shutdown()

    A hook is called of every callback, in the order in which `build_callbacks` names them, before
    the next hook is. Every rank has its own instances and calls every hook, those ranks too that
    load no data or report no metrics (in a PyTorchTrial, only the chief calls
    `on_checkpoint_write_end` and `on_checkpoint_end`). To act on one rank only, ask
    ``context.distributed.get_rank()``. A hook may use collectives if all ranks do.

    A callback that remembers anything must override `state_dict` and `load_state_dict`: its state
    is saved with every checkpoint, on every rank, under its name in `build_callbacks`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.on_checkpoint_end is not PyTorchCallback.on_checkpoint_end:
            # A FutureWarning is shown by default, a DeprecationWarning only in scripts.
            warnings.warn(
                f"{cls.__name__} overrides on_checkpoint_end, which is deprecated; override "
                "on_checkpoint_write_end instead, which is called with the same argument",
                FutureWarning,
                stacklevel=2,
            )

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Before data loaders are built, and before any training or validation.

        Args:
            first_batch_idx: the batch that training goes on with; not 0 for a resumed trial.
            checkpoint_uuid: the checkpoint that will be restored, None for a fresh start.
        """

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        """Before a checkpoint is restored.

        Args:
            checkpoint: this rank's own state as it was saved. What is changed in it, is restored
                as changed, the place in the training data too.
        """

    def on_training_start(self) -> None:
        """After a checkpoint was restored, if any, and before training begins."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Before the first batch of an epoch. `epoch_idx` counts from 0."""

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """After the last batch of an epoch. `epoch_idx` counts from 0."""

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: Any) -> None:
        """After each train-workload, which has at most `scheduling_unit` batches.

        Args:
            avg_metrics: averaged over all its batches and ranks; and the reducers' metrics.
            batch_metrics: this rank's, a list with a dict for each batch; empty on a rank that
                reports no metrics.
        """

    def on_validation_start(self) -> None:
        """Before each validation."""

    def on_validation_epoch_start(self) -> None:
        """Before the first batch of a validation."""

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        """After the last batch of a validation.

        Args:
            outputs: this rank's metrics, a dict for each batch; no reducers' metrics. Empty on a
                rank that reports none, or where another validates the whole set.
        """

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """After each validation.

        Args:
            metrics: reduced over all batches and ranks; and the reducers' metrics.
        """

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        """Before a checkpoint is written.

        Args:
            checkpoint: this rank's own state, about to be saved; may be added to.
        """

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        """After a checkpoint was written to `checkpoint_dir`, before it is uploaded.

        Args:
            checkpoint_dir: this rank's own part of it, on its machine; files put there are
                uploaded with it. Ranks must not give different files the same name.
        """

    def on_checkpoint_end(self, checkpoint_dir: str) -> None:
        """Deprecated: override `on_checkpoint_write_end`, after which this is called."""

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        """After a checkpoint was uploaded and committed."""

    def on_trial_shutdown(self) -> None:
        """Before the trial's processes end; the trial may be resumed later.

        Not called when a run fails, is cancelled or is killed.
        """

    def state_dict(self) -> dict[str, Any]:
        """What to remember across checkpoints; picklable."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""


def overridden_hooks(callbacks: Mapping[str, PyTorchCallback]) -> frozenset[str]:
    """The names of the hooks that any callback overrides; no others need be called.

    Raises:
        TrialError: `callbacks` is no mapping of names to instances of `PyTorchCallback`.
    """
    _check(callbacks)
    return frozenset(
        hook for hook in HOOKS for callback in callbacks.values() if _overrides(callback, hook)
    )


def _overrides(callback: PyTorchCallback, hook: str) -> bool:
    method = getattr(callback, hook)
    return getattr(method, "__func__", method) is not getattr(PyTorchCallback, hook)


def _check(callbacks: Any) -> None:
    if not isinstance(callbacks, Mapping):
        raise TrialError(
            "build_callbacks must return a dict of callbacks by name, it returned "
            f"{callbacks!r} (of type {type(callbacks).__name__})"
        )
    for name, callback in callbacks.items():
        if not isinstance(name, str):
            raise TrialError(f"the names of callbacks must be strings, got {name!r}")
        if isinstance(callback, type):
            raise TrialError(
                f'build_callbacks gives the class {callback.__name__} for "{name}"; give an '
                f"instance: {callback.__name__}()"
            )
        if not isinstance(callback, PyTorchCallback):
            raise TrialError(
                f'build_callbacks gives an object of type {type(callback).__name__} for "{name}"; '
                "derive it from trial_core.pytorch.PyTorchCallback"
            )
