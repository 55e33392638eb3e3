"""`PyTorchCallback`: user code that runs at fixed places of a run.

Follows ``determined.pytorch.PyTorchCallback``.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from trial_core.common.python_source import without_collections
from trial_core.errors import TrialError


class PyTorchCallback:
    """Base class of callbacks. Override hooks, and return instances from `build_callbacks`.

    Where every hook runs::

        on_trial_startup(first_batch_idx, checkpoint_uuid)
        build the data loaders
        if the trial starts from a checkpoint, unless only with its weights:
            on_checkpoint_load_start(checkpoint)
            restore the trial
            load_state_dict(state_dict)
        on_training_start()
        evaluate_batch(...)                         once, for the names of the metrics, if needed
        restore the random generators               if the trial resumes

        until max_length is reached or a stop is requested:

            a train-workload of at most `scheduling_unit` batches:
                for each batch:
                    on_training_epoch_start(epoch_idx)      if an epoch begins with it
                    train_batch(...)                        for each micro-batch
                    on_training_epoch_end(epoch_idx)        if an epoch ends with it
                on_training_workload_end(avg_metrics, batch_metrics)

            a validation, if one is due and no stop is requested; optionally before all training;
            its hooks run in evaluation mode without gradients:
                on_validation_start()
                on_validation_epoch_start()
                for each batch:
                    evaluate_batch(...)                     or evaluate_full_dataset, on rank 0
                on_validation_epoch_end(outputs)
                on_validation_end(metrics)

            a checkpoint, if one is due, and after a stop:
                state_dict()
                on_checkpoint_save_start(checkpoint)
                save the trial to checkpoint_dir
                on_checkpoint_write_end(checkpoint_dir)
                on_checkpoint_end(checkpoint_dir)           deprecated
                upload it while the run continues; after the upload, between two of the above, and
                before the next checkpoint or the end:
                    on_checkpoint_upload_end(uuid)

        on_trial_shutdown()

    One hook is called on all callbacks, in the order of `build_callbacks`, before the next hook.
    Every rank has its own instances and calls every hook, even if it loads no data or reports no
    metrics. In a PyTorchTrial, rank 0 alone calls `on_checkpoint_write_end` and
    `on_checkpoint_end`. To act on one rank only, check ``context.distributed.get_rank()``. A hook
    may use collectives if all ranks do.

    A callback with state must override `state_dict` and `load_state_dict`. Each checkpoint holds
    the state on every rank, under the callback's name in `build_callbacks`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.on_checkpoint_end is not PyTorchCallback.on_checkpoint_end:
            # Python shows a FutureWarning by default, a DeprecationWarning only in scripts.
            warnings.warn(
                f"{cls.__name__} overrides on_checkpoint_end, which is deprecated; override "
                "on_checkpoint_write_end instead, which has the same argument",
                FutureWarning,
                stacklevel=2,
            )

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Called before data loaders are built, and before any training or validation.

        Args:
            first_batch_idx: index of the next batch; not 0 for a resumed trial.
            checkpoint_uuid: the checkpoint that will be restored, or None.
        """

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is restored.

        Args:
            checkpoint: this rank's saved state. The trial is restored from it as the hook leaves
                it, including the position in the training data.
        """

    def on_training_start(self) -> None:
        """Called after a checkpoint was restored, if any, and before training begins."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Called before the first batch of an epoch. `epoch_idx` counts from 0.

        An override may leave the parameter out.
        """

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """Called after the last batch of an epoch. `epoch_idx` counts from 0."""

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: Any) -> None:
        """Called after each train-workload, which has at most `scheduling_unit` batches.

        Args:
            avg_metrics: metrics averaged over all its batches and ranks, and custom reducers'. Like
                all metrics here, they are NumPy's numbers and arrays; an array of one element is a
                number.
            batch_metrics: a list with a dict for each call of train_batch (each micro-batch, or
                with pipelines each batch): its metrics averaged over all ranks. Arrays keep their
                shape, also (1,).
        """

    def on_validation_start(self) -> None:
        """Called before each validation, in evaluation mode without gradients.

        Custom reducers are reset before it, so values that validation hooks add to them count.
        """

    def on_validation_epoch_start(self) -> None:
        """Called before the first batch of a validation."""

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        """Called after the last batch of a validation.

        If a forward pass needs other ranks, values that this hook adds to custom reducers do not
        count on a rank whose shard was shorter than another's.

        Args:
            outputs: this rank's metrics, a dict for each batch, without custom reducers', of the
                types in `batch_metrics`. Empty on a rank that reports none, and on all ranks but 0
                with `evaluate_full_dataset`.
        """

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """Called after each validation, in evaluation mode without gradients.

        Args:
            metrics: metrics reduced over all batches and ranks, and custom reducers', of the types
                in `avg_metrics`. They are reported after the hook, as rank 0's callbacks leave
                them.
        """

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written.

        Args:
            checkpoint: this rank's state that will be saved; the hook may add to it.
        """

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        """Called after a checkpoint was written to `checkpoint_dir`, before it is uploaded.

        Args:
            checkpoint_dir: local folder of this rank's part. Files that the hook adds are uploaded
                too; two ranks must not use one name for different files.
        """

    def on_checkpoint_end(self, checkpoint_dir: str) -> None:
        """Deprecated: override `on_checkpoint_write_end`. Called after it."""

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        """Called after a checkpoint was uploaded and committed."""

    def on_trial_shutdown(self) -> None:
        """Called before the trial's processes end; the trial may be resumed later.

        Also called after a failure, on each rank that raised or is idle, once `on_trial_startup`
        has been called. The hook then has 10 seconds. Not called on a rank that hangs or is killed.
        """

    def state_dict(self) -> dict[str, Any]:
        """The callback's state to save: plain data, tensors and arrays, in lists and dicts.

        Other mappings and sequences are stored as dicts, lists and tuples. Objects of other classes
        are refused, unless the experiment sets ``checkpointing.trusted``.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned. Its tensors are on the CPU."""


HOOKS: Mapping[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(hook).parameters)[1:]
    for name, hook in vars(PyTorchCallback).items()
    if name.startswith("on_")
}
"""Every hook with its arguments, in the order of a run."""


class TrialCallback(PyTorchCallback):
    """A callback that finds its trial's context: the base of all in `trial_core.callbacks`.

    Attributes:
        context: the trial's context, once the trial is constructed.
    """

    context: Any

    def attach(self, context: Any) -> None:
        """Called once on every rank, before all hooks, with the trial's context."""
        self.context = context

    def batch_ended(self) -> None:
        """Called after each trained batch. Must not wait for the accelerator."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Surrounds each validation and its hooks, also one that a stop ends early."""
        return nullcontext()


def built_callbacks(trial: Any, context: Any) -> Mapping[str, PyTorchCallback]:
    """The trial's callbacks.

    Raises TrialError if they are not a mapping of names to `PyTorchCallback` instances.
    """
    callbacks = trial.build_callbacks()
    if not isinstance(callbacks, Mapping):
        raise TrialError(
            "build_callbacks must return a dict of callbacks by name, got "
            f"{callbacks!r} (of type {type(callbacks).__name__})"
        )
    for name, each in callbacks.items():
        if not isinstance(name, str):
            raise TrialError(f"the names of callbacks must be strings, got {name!r}")
        if isinstance(each, type):
            raise TrialError(
                f'build_callbacks returned the class {each.__name__} for "{name}"; return an '
                f"instance: {each.__name__}()"
            )
        if not isinstance(each, PyTorchCallback):
            raise TrialError(
                f"build_callbacks returned an object of type {type(each).__name__} for "
                f'"{name}"; derive its class from trial_core.pytorch.PyTorchCallback'
            )
    for callback in trial_callbacks(callbacks):
        callback.attach(context)
    return callbacks


def trial_callbacks(callbacks: Mapping[str, PyTorchCallback]) -> list[TrialCallback]:
    return [each for each in callbacks.values() if isinstance(each, TrialCallback)]


def overridden_hooks(callbacks: Mapping[str, PyTorchCallback]) -> frozenset[str]:
    """The names of the hooks that at least one callback overrides."""
    return frozenset(
        hook for hook in HOOKS for callback in callbacks.values() if _overrides(callback, hook)
    )


def may_change_metrics(callback: PyTorchCallback) -> bool:
    """True if `on_validation_end` may change the metrics it gets, as far as its source tells.

    A callback does not if it only looks into them: ``metrics["loss"]``, ``metrics.get("loss")``.
    """
    if not _overrides(callback, "on_validation_end"):
        return False
    try:
        with without_collections():
            tree = ast.parse(textwrap.dedent(inspect.getsource(callback.on_validation_end)))
    except (OSError, TypeError, SyntaxError):
        return True  # no source
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or len(function.args.args) < 2:
        return True
    metrics, nodes = function.args.args[1].arg, list(ast.walk(function))
    only_read = {id(child) for node in nodes for child in _only_read(node)}
    named = [each for each in nodes if isinstance(each, ast.Name) and each.id == metrics]
    return any(id(each) not in only_read for each in named)


def _only_read(node: ast.AST) -> Sequence[ast.AST]:
    """The parts of an expression or statement that it does not change."""
    match node:
        case ast.Subscript(value=value, ctx=ast.Load()):
            return [value]
        case ast.Attribute(value=value, attr="get" | "items" | "keys" | "values"):
            return [value]
        case ast.Call(func=ast.Name(id=name), args=arguments) if name in _READERS:
            return arguments
        case ast.Compare(comparators=operands):
            return operands
        case ast.FormattedValue(value=part) | ast.For(iter=part):
            return [part]
    return []


_READERS = frozenset({"dict", "float", "len", "list", "print", "repr", "sorted", "str"})


def _overrides(callback: PyTorchCallback, hook: str) -> bool:
    method = getattr(callback, hook)
    return getattr(method, "__func__", method) is not getattr(PyTorchCallback, hook)
