"""`PyTorchTrialContext`: a `PyTorchTrial`'s interface to its run. Follows Determined's class."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from trial_core.errors import TrialError
from trial_core.pytorch.distributed_model import broadcast_model, replica_of, unwrapped
from trial_core.pytorch.gradient_averaging import (
    GradientAveraging,
    parameters_of,
    trained_parameters,
)
from trial_core.pytorch.lr_scheduler import LRScheduler
from trial_core.pytorch.mixed_precision import MixedPrecision, apex_scaler, share_overflow
from trial_core.pytorch.sharded_model import SHARDINGS, check_sharded_by_trial, is_sharded, shard
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.trial.context import RunInfo
from trial_core.rank.trial.custom_reducers import MetricReducer
from trial_core.rank.trial.torch_context import TorchTrialContext

logger = logging.getLogger(__name__)

SchedulerT = TypeVar("SchedulerT")


class PyTorchTrialContext(TorchTrialContext):
    """Passed to a `PyTorchTrial`'s ``__init__`` on every rank.

    Follows ``determined.pytorch.PyTorchTrialContext``.

    Attributes:
        models, optimizers, lr_schedulers: the wrapped ones, in the order of wrapping.
        scaler: the loss scaler that checkpoints hold, or None.
        aggregation_frequency: optimizers step once in this many batches
            (``optimizations.aggregation_frequency``).
        experimental: less common settings.
    """

    def __init__(self, info: RunInfo, distributed: DistributedContext) -> None:
        super().__init__(info, distributed)
        self._settings = info.optimizations
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.lr_schedulers: list[LRScheduler] = []
        self.scaler: Any = None
        self.aggregation_frequency = self._settings.aggregation_frequency
        self.experimental = PyTorchExperimentalContext(self)
        self.moves_batches = True
        self.precision = MixedPrecision(self.device)
        self._divides: dict[int, bool] = {}
        self._has_warned_of_remainder = False
        self._averaging = GradientAveraging(distributed.get_size())

    # ------------------------------------------------------------------------------ wrapping

    def wrap_model(
        self,
        model: nn.Module,
        find_unused_parameters: bool = False,
        sharding: Literal["none", "fsdp2"] | None = None,
    ) -> nn.Module:
        """Move a model to this rank's device, and have checkpoints contain it.

        With several ranks the result is a replica whose gradients are averaged; the model's
        attributes and methods can be reached through it, and so can the parts of a container such
        as nn.Sequential. Every rank calls this, in the same order, which is the model's index in
        checkpoints.

        With ``sharding="fsdp2"`` the ranks divide the model and its optimizer state among them. The
        result is `model`; construct its optimizer afterwards. FSDP2 gathers weights only when the
        model is called, so call no other method that computes with them (or first pass it to
        ``torch.distributed.fsdp.register_fsdp_forward_method``). All ranks call it equally often.
        A model that the trial has passed to ``fully_shard``, over all ranks, is left as it is.

        Args:
            find_unused_parameters: say True if not every parameter gets a gradient in every batch.
            sharding: "none" or "fsdp2"; default: the experiment's ``optimizations.sharding``.
                Models that are trained are sharded all, or none of them.

        Raises:
            TrialError: `model` is not a model, or is wrapped already, or cannot be sharded.
        """
        if not isinstance(model, nn.Module):
            raise TrialError(f"wrap_model takes a torch.nn.Module, got {kind_of(model)}")
        itself = unwrapped(model)
        if any(unwrapped(wrapped) is itself for wrapped in self.models):
            raise TrialError("wrap_model was called twice with the same model; wrap each one once")
        chosen = sharding or self._settings.sharding
        if chosen not in SHARDINGS:
            raise TrialError(f'wrap_model: sharding is "none" or "fsdp2", got {chosen!r}')
        has_peers = self.distributed.get_size() > 1
        if is_sharded(model):
            check_sharded_by_trial(model, self.distributed.get_size())
        else:
            model = model.to(self.device)
            if has_peers and chosen == "fsdp2" and any(True for _ in model.parameters()):
                shard(model, self._device_mesh, self._settings.gradient_compression)
            elif has_peers and _is_trained(model):
                replica = replica_of(model, self.device)
                self._averaging.add_model(replica, in_backward=not find_unused_parameters)
                model = replica
            elif has_peers:
                broadcast_model(model)
        self.models.append(model)
        if len({is_sharded(each) for each in self.models if _is_trained(each)}) > 1:
            raise TrialError(
                "some of the trial's models are sharded with FSDP2 and others are not: their "
                "gradients have different forms, which cannot be clipped or saved together. Shard "
                "all models that are trained, or none: optimizations.sharding applies to all"
            )
        return model

    def wrap_optimizer(
        self,
        optimizer: Optimizer,
        backward_passes_per_step: int = 1,
        fp16_compression: bool | None = None,
        average_aggregated_gradients: bool | None = None,
    ) -> Optimizer:
        """Register an optimizer of wrapped models, so that checkpoints contain it, and return it.

        Every rank calls this, in the same order, after the models are wrapped.

        Args:
            backward_passes_per_step: calls of `backward` for each call of `step_optimizer`.
            fp16_compression: send gradients between ranks as float16; default: the experiment's
                ``optimizations.gradient_compression``.
            average_aggregated_gradients: divide gradients that were added up over several batches
                by their number; default: the experiment's
                ``optimizations.average_aggregated_gradients``.

        Raises:
            TrialError: an argument has the wrong type, or the optimizer is wrapped already, or was
                constructed before its model was sharded.
        """
        if not isinstance(optimizer, Optimizer):
            raise TrialError(
                f"wrap_optimizer takes a torch.optim.Optimizer, got {kind_of(optimizer)}"
            )
        if any(wrapped is optimizer for wrapped in self.optimizers):
            raise TrialError(
                "wrap_optimizer was called twice with the same optimizer; wrap each one once"
            )
        if type(backward_passes_per_step) is not int or backward_passes_per_step < 1:
            raise TrialError(
                "wrap_optimizer: backward_passes_per_step is a positive int, got "
                f"{backward_passes_per_step!r}"
            )
        known = {
            id(each): name
            for model in self.models
            for name, each in unwrapped(model).named_parameters()
        }
        foreign = sum(id(each) not in known for each in parameters_of(optimizer))
        shards = any(is_sharded(model) for model in self.models)
        if foreign and shards:
            raise TrialError(
                f"{foreign} parameter tensor(s) of optimizer {len(self.optimizers)} belong to no "
                "wrapped model. FSDP2 replaces a model's parameters: construct the optimizer after "
                "context.wrap_model, from its result's parameters"
            )
        if foreign:
            logger.warning(
                f"{foreign} parameter tensor(s) of optimizer {len(self.optimizers)} belong to no "
                "wrapped model: checkpoints do not contain them; call context.wrap_model first, "
                "and pass its result's parameters to the optimizer"
            )
        for group in optimizer.param_groups:
            if "param_names" in group:  # of a replica or a compiled model, they have prefixes
                named = zip(group["params"], group["param_names"], strict=True)
                group["param_names"] = [known.get(id(each), name) for each, name in named]
        self.optimizers.append(optimizer)
        self._averaging.overlaps &= len(self.optimizers) == 1 and backward_passes_per_step == 1
        by_default = self._settings.gradient_compression
        compresses = by_default if fp16_compression is None else fp16_compression
        if shards and compresses != by_default:
            raise TrialError(
                f"wrap_optimizer(fp16_compression={compresses}) comes too late for models that are "
                "sharded with FSDP2; set optimizations.gradient_compression in the experiment"
            )
        self._averaging.compresses |= compresses
        by_default = self._settings.average_aggregated_gradients
        divides = average_aggregated_gradients
        self._divides[id(optimizer)] = by_default if divides is None else divides
        return optimizer

    def wrap_lr_scheduler(
        self, lr_scheduler: SchedulerT, step_mode: LRScheduler.StepMode, frequency: int = 1
    ) -> SchedulerT:
        """Step a scheduler of a wrapped optimizer, have checkpoints contain it, and return it.

        Args:
            lr_scheduler: one of ``torch.optim.lr_scheduler``.
            step_mode: when to step it. ReduceLROnPlateau is stepped by hand.
            frequency: step at every `frequency`-th such time.

        Raises:
            TrialError: an argument has the wrong type, or the optimizer is not wrapped.
        """
        wrapped = LRScheduler(lr_scheduler, step_mode, frequency)  # type: ignore[arg-type]
        optimizer = getattr(lr_scheduler, "optimizer", None)
        if not any(optimizer is each for each in self.optimizers):
            raise TrialError(
                "wrap_lr_scheduler got the scheduler of an optimizer that is not wrapped; call "
                "context.wrap_optimizer first"
            )
        self.lr_schedulers.append(wrapped)
        return lr_scheduler

    def wrap_scaler(self, scaler: GradScaler) -> GradScaler:
        """Have checkpoints contain a scaler that the trial uses itself, and return it.

        The trial scales its losses, passes the scaler to `step_optimizer` and calls its ``update``.

        Raises:
            TrialError: `scaler` is not a ``torch.amp.GradScaler``, or a scaler is wrapped already.
        """
        if not isinstance(scaler, GradScaler):
            raise TrialError(f"wrap_scaler takes a torch.amp.GradScaler, got {kind_of(scaler)}")
        if self.scaler is not None:
            raise TrialError(
                "a trial has one scaler: call wrap_scaler once, and not beside "
                "experimental.use_amp() or configure_apex_amp"
            )
        self.scaler = scaler
        return scaler

    def configure_apex_amp(
        self,
        models: Any,
        optimizers: Any,
        enabled: bool = True,
        opt_level: str = "O1",
        cast_model_type: torch.dtype | None = None,
        patch_torch_functions: bool | None = None,
        keep_batchnorm_fp32: bool | str | None = None,
        master_weights: bool | None = None,
        loss_scale: float | str | None = None,
        cast_model_outputs: torch.dtype | None = None,
        num_losses: int = 1,
        verbosity: int = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = 2.0**24,
    ) -> tuple[Any, Any]:
        """Use mixed precision: torch's, since Apex is no longer developed. Returns `models` and
        `optimizers`, unchanged.

        Level O0 changes nothing. O1, O2 and O3 become autocast with a gradient scaler (a constant
        one for a number as `loss_scale`), or autocast without a scaler if `cast_model_type` is
        ``torch.bfloat16``. The other arguments are accepted as in Determined and not used.

        Raises:
            TrialError: `opt_level` or `loss_scale` has another value than in Determined.
        """
        if enabled:
            is_on, scaler = apex_scaler(self.device, opt_level, cast_model_type, loss_scale)
            if is_on:
                self._use_amp(scaler, cast_model_type)
            if is_on and self.distributed.get_rank() == 0:
                logger.warning(
                    f'Apex is no longer developed: configure_apex_amp(opt_level="{opt_level}") '
                    "uses torch's automatic mixed precision, which keeps weights in float32, as "
                    "context.experimental.use_amp() does"
                )
        return models, optimizers

    # ------------------------------------------------------------------------------ training

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Compute gradients, with the arguments of ``torch.Tensor.backward``.

        Scales the loss if mixed precision was switched on by `configure_apex_amp` or
        ``experimental.use_amp``. Does not send anything to other ranks in batches without an
        optimizer step, unless the model is sharded. It is a collective then.

        Raises:
            TrialError: with several ranks, the pass gives a parameter of a model that was wrapped
                without `find_unused_parameters` several gradients.
        """
        if self.precision.scaler is not None:
            loss = self.precision.scaler.scale(loss)
        try:
            with self.precision.paused():
                loss.backward(  # type: ignore[no-untyped-call]
                    gradient=gradient, retain_graph=retain_graph, create_graph=create_graph
                )
        except RuntimeError as error:
            self._averaging.explain(error)
            raise
        self._averaging.backward_ended()

    def step_optimizer(
        self,
        optimizer: Optimizer,
        clip_grads: Callable[[list[nn.Parameter]], Any] | None = None,
        auto_zero_grads: bool = True,
        scaler: GradScaler | None = None,
    ) -> None:
        """Step an optimizer, with gradients averaged over ranks. Collective: every rank calls it.

        With ``optimizations.aggregation_frequency`` n, gradients are added up, and only every n-th
        batch steps. Call this once for each optimizer in every `train_batch`, in any order.

        Args:
            clip_grads: called with a list of the optimizer's parameters, before it steps.
            auto_zero_grads: set the gradients to None after the step.
            scaler: the scaler that has scaled the loss, if the trial uses one itself.

        Raises:
            TrialError: the optimizer is not wrapped; or `auto_zero_grads` is False while gradients
                are added up over batches; or with several ranks, the backward pass left out
                parameters of a model that was wrapped without `find_unused_parameters`.
        """
        if id(optimizer) not in self._divides:
            raise TrialError(
                "step_optimizer got an optimizer that is not wrapped; pass it to "
                "context.wrap_optimizer in __init__"
            )
        if self.aggregation_frequency > 1 and not auto_zero_grads:
            raise TrialError(
                "step_optimizer(auto_zero_grads=False) does not work with "
                f"optimizations.aggregation_frequency {self.aggregation_frequency}: gradients "
                "would be zeroed between the batches that add them up"
            )
        if not self.steps_in_this_batch:
            return
        had_own_gradients = self._averaging.before_step(optimizer)
        if had_own_gradients and scaler is not None:
            share_overflow(scaler, optimizer, self.device)
        if self.aggregation_frequency > 1 and self._divides[id(optimizer)]:
            for parameter in trained_parameters(optimizer):
                if parameter.grad is not None:
                    parameter.grad.div_(self.aggregation_frequency)
        scaler = scaler or self.precision.scaler
        if clip_grads is not None:
            if self.precision.scaler is not None:
                self.precision.scaler.unscale_(optimizer)
            clip_grads(trained_parameters(optimizer))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            self.precision.note_step(scaler, optimizer)
        # Autocast keeps copies of the weights in less precision until the batch ends.
        torch.clear_autocast_cache()
        if auto_zero_grads:
            optimizer.zero_grad()

    @property
    def steps_in_this_batch(self) -> bool:
        """True if optimizers step in the current batch; in others, gradients are added up."""
        return (self.run_info.batches_trained + 1) % self.aggregation_frequency == 0

    @contextmanager
    def training_batch(self) -> Iterator[None]:
        """The controller trains one batch within the block."""
        self.precision.has_stepped = False
        with self._averaging.batch(self.steps_in_this_batch), self.precision.autocast():
            yield
        if self.precision.scaler is not None and self.precision.has_stepped:
            self.precision.scaler.update()
        for scheduler in self.lr_schedulers:
            scheduler.batch_ended(
                self.run_info.batches_trained, self.aggregation_frequency, self.run_info.epoch
            )

    # --------------------------------------------------------------------------- batch sizes

    def get_global_batch_size(self) -> int:
        """The hyperparameter ``global_batch_size``: samples of one batch on all ranks.

        Raises:
            TrialError: it is missing, not a positive int, or less than the number of ranks.
        """
        size, ranks = self.get_hparam("global_batch_size"), self.distributed.get_size()
        if type(size) is not int or size < 1:
            raise TrialError(
                f'the hyperparameter "global_batch_size" is a positive int, got {size!r}'
            )
        if size < ranks:
            raise TrialError(
                f'the hyperparameter "global_batch_size" is {size}, less than the {ranks} slots '
                "that share a batch; enlarge it, or lower resources.slots_per_trial"
            )
        return size

    def get_per_slot_batch_size(self) -> int:
        """Samples of one batch on one rank: the global batch size divided by the ranks.

        Warns once, on rank 0, if there is a remainder, which is left out.

        Raises:
            TrialError: as `get_global_batch_size`.
        """
        size, ranks = self.get_global_batch_size(), self.distributed.get_size()
        if size % ranks and self.distributed.get_rank() == 0 and not self._has_warned_of_remainder:
            self._has_warned_of_remainder = True
            logger.warning(
                "global_batch_size %d is not a multiple of the %d slots: a batch has %d samples",
                size, ranks, size // ranks * ranks,
            )  # fmt: skip
        return size // ranks

    # ----------------------------------------------------------------------------- internals

    @cached_property
    def _device_mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, (self.distributed.get_size(),))

    def _use_amp(self, scaler: GradScaler | None, dtype: torch.dtype | None = None) -> None:
        if scaler is not None:
            self.wrap_scaler(scaler)
        self.precision.switch_on(scaler, dtype)


class PyTorchExperimentalContext:
    """`PyTorchTrialContext.experimental`. Follows ``determined.pytorch``'s class of that name."""

    def __init__(self, parent: PyTorchTrialContext) -> None:
        self._parent = parent

    def use_amp(self, dtype: torch.dtype | None = None) -> None:
        """Train and validate in mixed precision, without further calls.

        Args:
            dtype: for computations that are safe in less precision; None for torch's default,
                float16 on GPUs. Losses are scaled, except for ``torch.bfloat16``, which does not
                need it.

        Raises:
            TrialError: the trial has wrapped a scaler.
        """
        scaled = dtype is not torch.bfloat16
        scaler = GradScaler(self._parent.device.type) if scaled else None
        self._parent._use_amp(scaler, dtype)

    def disable_auto_to_device(self) -> None:
        """Leave batches where the loaders put them; the trial calls ``context.to_device``."""
        self._parent.moves_batches = False

    def disable_dataset_reproducibility_checks(self) -> None:
        """Allow loaders of any class, as `PyTorchTrialContext` does: Determined has it here."""
        self._parent.disable_dataset_reproducibility_checks()

    def wrap_reducer(
        self,
        reducer: Callable[[list[Any]], Any] | MetricReducer,
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> Any:
        """Register a metric of all ranks' values. Older releases of Determined have it here.

        As `PyTorchTrialContext.wrap_reducer`, whose arguments, result and errors it has.
        """
        return self._parent.wrap_reducer(reducer, name, for_training, for_validation)


def _is_trained(model: nn.Module) -> bool:
    return any(each.requires_grad for each in model.parameters())


def kind_of(thing: object) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else type(thing).__name__
