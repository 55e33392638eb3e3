"""`PyTorchTrialContext` and its trial on a single rank: what is refused, and with which words."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from trial_core.errors import TrialError
from trial_core.pytorch import LRScheduler, PyTorchTrial, PyTorchTrialContext
from trial_core.pytorch.distributed_model import replica_of
from trial_core.pytorch.lr_scheduler import LRScheduler as OwnScheduler
from trial_core.pytorch.pytorch_adapter import PyTorchTrialAdapter
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.schedule.units import EpochLength

EVERY_BATCH = LRScheduler.StepMode.STEP_EVERY_BATCH


def context_of(aggregation: int = 1, **hparams: Any) -> PyTorchTrialContext:
    """A context of a single rank, outside a run."""
    return PyTorchTrialContext.from_config(
        {"hyperparameters": hparams, "optimizations": {"aggregation_frequency": aggregation}}
    )


def wrapped(context: PyTorchTrialContext) -> tuple[Any, Any]:
    """A wrapped model and its wrapped optimizer."""
    model = context.wrap_model(nn.Linear(2, 1))
    return model, context.wrap_optimizer(SGD(model.parameters(), lr=0.1))


def sgd() -> SGD:
    return SGD(nn.Linear(2, 1).parameters(), lr=0.1)


def schedule(context: PyTorchTrialContext, scheduler: Any = None, *rest: Any) -> None:
    optimizer = wrapped(context)[1]
    context.wrap_lr_scheduler(scheduler or StepLR(optimizer, 1), *rest)


def wrap_twice(wrap: Callable[[Any], Any], thing: Any) -> None:
    wrap(wrap(thing))


REFUSED: dict[str, tuple[Callable[[PyTorchTrialContext], Any], str]] = {
    "no model": (
        lambda context: context.wrap_model(None),
        "wrap_model takes a torch.nn.Module, got NoneType",
    ),
    "a model's class": (
        lambda context: context.wrap_model(nn.Linear),
        "wrap_model takes a torch.nn.Module, got the class Linear",
    ),
    "a model twice": (
        lambda context: wrap_twice(context.wrap_model, nn.Linear(2, 1)),
        "wrap_model was called twice with the same model; wrap each one once",
    ),
    "no optimizer": (
        lambda context: context.wrap_optimizer(nn.Linear(2, 1)),
        "wrap_optimizer takes a torch.optim.Optimizer, got Linear",
    ),
    "an optimizer twice": (
        lambda context: wrap_twice(context.wrap_optimizer, sgd()),
        "wrap_optimizer was called twice with the same optimizer; wrap each one once",
    ),
    "no backward pass": (
        lambda context: context.wrap_optimizer(sgd(), backward_passes_per_step=0),
        "wrap_optimizer: backward_passes_per_step is a positive int, got 0",
    ),
    "no scheduler": (
        lambda context: schedule(context, sgd(), EVERY_BATCH),
        "an LR scheduler is one of torch.optim.lr_scheduler, got SGD",
    ),
    "another step mode": (
        lambda context: schedule(context, None, "batch"),
        "step_mode is one of LRScheduler.StepMode's STEP_EVERY_EPOCH, STEP_EVERY_BATCH, "
        "MANUAL_STEP, STEP_EVERY_OPTIMIZER_STEP; got 'batch'",
    ),
    "no frequency": (
        lambda context: schedule(context, None, EVERY_BATCH, 0),
        "an LR scheduler's frequency is a positive int, got 0",
    ),
    "a plateau without a metric": (
        lambda context: schedule(context, ReduceLROnPlateau(sgd()), EVERY_BATCH),
        "ReduceLROnPlateau needs a metric, which only the trial knows: wrap it with "
        "LRScheduler.StepMode.MANUAL_STEP and call its step(metric)",
    ),
    "a scheduler of another optimizer": (
        lambda context: schedule(context, StepLR(sgd(), 1), EVERY_BATCH),
        "wrap_lr_scheduler got the scheduler of an optimizer that is not wrapped; call "
        "context.wrap_optimizer first",
    ),
    "no scaler": (
        lambda context: context.wrap_scaler(None),
        "wrap_scaler takes a torch.amp.GradScaler, got NoneType",
    ),
    "two scalers": (
        lambda context: (context.experimental.use_amp(), context.wrap_scaler(GradScaler("cpu"))),
        "a trial has one scaler: call wrap_scaler once, and not beside experimental.use_amp() or "
        "configure_apex_amp",
    ),
    "a level that Apex lacks": (
        lambda context: context.configure_apex_amp([], [], opt_level="O4"),
        'configure_apex_amp: opt_level is "O0" to "O3", got \'O4\'',
    ),
    "a loss scale of nothing": (
        lambda context: context.configure_apex_amp([], [], loss_scale="much"),
        "configure_apex_amp: loss_scale is a positive number or \"dynamic\", got 'much'",
    ),
    "a step of an unknown optimizer": (
        lambda context: context.step_optimizer(sgd()),
        "step_optimizer got an optimizer that is not wrapped; pass it to context.wrap_optimizer in "
        "__init__",
    ),
    "no batch size": (
        lambda context: context.get_per_slot_batch_size(),
        'the trial asks for hyperparameter "global_batch_size", which the experiment does not set',
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_mistake_in_a_call_of_the_context(what: str) -> None:
    """Says what was seen, and what to do."""
    call, message = REFUSED[what]
    with pytest.raises(TrialError, match="^" + re.escape(message)):
        call(context_of())


def test_gradients_that_are_added_up_must_be_zeroed() -> None:
    """In batches without a step, as well."""
    context = context_of(aggregation=2)
    _, optimizer = wrapped(context)
    message = (
        "step_optimizer(auto_zero_grads=False) does not work with optimizations."
        "aggregation_frequency 2: gradients would be zeroed between the batches that add them up"
    )
    with pytest.raises(TrialError, match="^" + re.escape(message)):
        context.step_optimizer(optimizer, auto_zero_grads=False)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (2.5, 'the hyperparameter "global_batch_size" is a positive int, got 2.5'),
        (True, 'the hyperparameter "global_batch_size" is a positive int, got True'),
        (0, 'the hyperparameter "global_batch_size" is a positive int, got 0'),
        (
            3,
            'the hyperparameter "global_batch_size" is 3, less than the 4 slots that share a '
            "batch; enlarge it, or lower resources.slots_per_trial",
        ),
    ],
)
def test_batch_sizes_that_cannot_be_shared(size: Any, message: str) -> None:
    """Not a positive int, or less than one sample for each rank."""
    context = context_of(global_batch_size=size)
    context.distributed = four_ranks()
    with pytest.raises(TrialError, match="^" + re.escape(message)):
        context.get_per_slot_batch_size()


def test_a_batch_that_ranks_cannot_share_equally(caplog: pytest.LogCaptureFixture) -> None:
    """Each rank gets the same number of samples, with one warning on rank 0."""
    context = context_of(global_batch_size=10)
    context.distributed = four_ranks()
    assert (context.get_per_slot_batch_size(), context.get_global_batch_size()) == (2, 10)
    assert context.get_per_slot_batch_size() == 2  # as for the second loader
    warning = "global_batch_size 10 is not a multiple of the 4 slots: a batch has 8"
    assert caplog.text.count(warning) == 1


def test_an_optimizer_of_parameters_that_are_not_wrapped(caplog: pytest.LogCaptureFixture) -> None:
    """Is trained, with a warning."""
    context_of().wrap_optimizer(sgd())
    assert "2 parameter tensor(s) of optimizer 0 belong to no wrapped model" in caplog.text


class Trial(PyTorchTrial):
    """Wraps what its `hparams` say, and records how `train_batch` is called."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.called: dict[str, Any] = {}
        model = nn.Linear(2, 1)
        if "no_model" not in context.get_hparams():
            context.wrap_model(model)
        if "no_optimizer" not in context.get_hparams():
            self.optimizer = context.wrap_optimizer(SGD(model.parameters(), lr=0.1))

    def train_batch(self, **arguments: Any) -> Any:  # type: ignore[override]
        self.called = arguments
        return torch.tensor(2.0)

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"batch": batch}

    def build_training_data_loader(self) -> Any: ...

    def build_validation_data_loader(self) -> Any: ...


class BothWays(Trial):
    """Defines both ways to validate."""

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        return {}


class NeitherWay(Trial):
    """Defines no way to validate."""

    evaluate_batch = PyTorchTrial.evaluate_batch  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("trial_class", "hparam", "message"),
    [
        (Trial, "no_model", "Trial.__init__ wrapped no model; pass each one to context.wrap_model"),
        (
            Trial,
            "no_optimizer",
            "Trial.__init__ wrapped no optimizer; pass each one to context.wrap_optimizer",
        ),
        (
            BothWays,
            "",
            "BothWays defines both of evaluate_batch and evaluate_full_dataset; define exactly one",
        ),
        (
            NeitherWay,
            "",
            "NeitherWay defines neither of evaluate_batch and evaluate_full_dataset; define",
        ),
    ],
)
def test_a_trial_that_lacks_something(
    trial_class: type[PyTorchTrial], hparam: str, message: str
) -> None:
    """A model, an optimizer, or one way to validate."""
    context = context_of(**({hparam: True} if hparam else {}))
    with pytest.raises(TrialError, match="^" + re.escape(message)):
        PyTorchTrialAdapter(trial_class(context), context)


def test_how_batches_reach_the_trial() -> None:
    """By keyword, and on the device: a rank's arrays become tensors, unless the trial does that."""
    context = context_of()
    trial = Trial(context)
    adapter = PyTorchTrialAdapter(trial, context)
    array = torch.ones(3).numpy()
    collected: list[Any] = []
    adapter.train_batch(iter([array]), 4, 5, collected.append)
    assert collected == [torch.tensor(2.0)]
    assert trial.called.keys() == {"batch", "epoch_idx", "batch_idx"}
    assert (trial.called["epoch_idx"], trial.called["batch_idx"]) == (4, 5)
    assert isinstance(trial.called["batch"], torch.Tensor)
    context.experimental.disable_auto_to_device()
    assert adapter.evaluate_batch(iter([array]), 0)["batch"] is array


def test_a_method_with_fewer_parameters() -> None:
    """Gets those that it names; with other names, the first ones."""

    class Fewer(Trial):
        def train_batch(self, data: Any, batch_idx: Any) -> Any:  # type: ignore[override]
            return [data, batch_idx]

        def evaluate_batch(self, batch_idx: Any) -> Any:  # type: ignore[override]
            return batch_idx

    context = context_of()
    adapter = PyTorchTrialAdapter(Fewer(context), context)
    collected: list[Any] = []
    adapter.train_batch(iter([1.0]), 4, 5, collected.append)
    assert collected == [[1.0, 4]]
    assert adapter.evaluate_batch(iter([1.0]), 5) == 5


def test_optimizations_without_a_value() -> None:
    """A null in the experiment is the default, also in a script, whose fields are as given."""
    names = ("aggregation_frequency", "average_aggregated_gradients", "average_training_metrics")
    nulls = dict.fromkeys((*names, "gradient_compression", "sharding"))
    context = PyTorchTrialContext.from_config({"optimizations": nulls})
    model, optimizer = wrapped(context)
    assert context.aggregation_frequency == 1
    assert PyTorchTrialAdapter(Trial(context), context).reports_training_metrics
    aggregating = PyTorchTrialContext.from_config(
        {"optimizations": {**nulls, "aggregation_frequency": 2}}
    )
    model, optimizer = wrapped(aggregating)
    before = model.bias.item()
    for _ in range(2):
        with aggregating.training_batch():
            aggregating.backward(model(torch.ones(1, 2)).sum())
            aggregating.step_optimizer(optimizer)
        aggregating.run_info.batches_trained += 1
    assert model.bias.item() == pytest.approx(before - 0.1)  # the mean, not the sum


def test_clipping_that_reads_the_parameters_twice() -> None:
    """As with Determined, which passes a list."""
    context = context_of()
    model, optimizer = wrapped(context)
    before = model.bias.item()

    def clip(parameters: Any) -> None:
        largest = max(float(each.grad.abs().max()) for each in parameters)
        for each in parameters:
            each.grad.div_(largest)

    with context.training_batch():
        context.backward(model(torch.ones(1, 2)).sum() * 8)
        context.step_optimizer(optimizer, clip)
    assert model.bias.item() == pytest.approx(before - 0.1)


def test_levels_of_apex(caplog: pytest.LogCaptureFixture) -> None:
    """O0 changes nothing; the others are torch's mixed precision, with the loss scale asked for."""
    model, optimizer = nn.Linear(2, 1), sgd()
    with caplog.at_level(logging.WARNING):
        off = context_of()
        assert off.configure_apex_amp(model, [optimizer], True, "O0") == (model, [optimizer])
        context_of().configure_apex_amp(model, optimizer, enabled=False, opt_level="O2")
    assert (off.scaler, autocast_type(off), caplog.text) == (None, None, "")
    constant, dynamic, without = context_of(), context_of(), context_of()
    constant.configure_apex_amp(model, optimizer, opt_level="O1", loss_scale="128.0")
    dynamic.configure_apex_amp([model], [optimizer], opt_level="O2", loss_scale="dynamic")
    without.configure_apex_amp(model, optimizer, opt_level="O3", cast_model_type=torch.bfloat16)
    assert caplog.text.count("Apex is no longer developed") == 3
    assert constant.scaler.get_scale() == 128.0
    assert constant.scaler.get_growth_interval() > 2**30
    assert dynamic.scaler.get_growth_interval() == 2000
    assert without.scaler is None
    assert [autocast_type(each) for each in (constant, dynamic, without)] == [torch.bfloat16] * 3


def autocast_type(context: PyTorchTrialContext) -> torch.dtype | None:
    """The type that a batch of the context computes with; None: its tensors' own."""
    with context.training_batch():
        return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def test_mixed_precision_without_further_calls() -> None:
    """use_amp scales the loss, unscales before clipping, and takes note of batches without a step.

    The loss scale shrinks after a step that was skipped.
    """
    context = context_of()
    context.experimental.use_amp()
    model, optimizer = wrapped(context)
    before, norms = model.weight.clone(), []
    for factor in (1.0, float("inf"), 1.0):
        with context.training_batch():
            loss = model(torch.ones(1, 2)).float().sum() * factor
            context.backward(loss)
            context.step_optimizer(
                optimizer, lambda each: norms.append([float(one.grad.norm()) for one in each])
            )
    with context.training_batch():
        pass
    assert context.scaler.get_scale() == 2.0**15
    torch.testing.assert_close(model.weight, before - 0.2)
    assert norms[0] == pytest.approx([2**0.5, 1.0])


def test_mixed_precision_of_a_type() -> None:
    """bfloat16 has the range of float32: the loss is not scaled."""
    context = context_of()
    context.experimental.use_amp(dtype=torch.bfloat16)
    assert (autocast_type(context), context.scaler) == (torch.bfloat16, None)
    context = context_of()
    context.experimental.use_amp(dtype=torch.float16)
    assert autocast_type(context) is torch.float16
    assert context.scaler is not None


def test_a_model_with_the_names_of_a_replica(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Attributes pass through; those that DistributedDataParallel hides are named in a warning."""
    model = nn.Linear(2, 1)
    model.dim, model.temperature = 64, 1.0
    with lone_process_group(tmp_path):
        replica = replica_of(model, torch.device("cpu"))
        replica.temperature, replica.note = 2.0, "own"
    assert (model.temperature, replica.temperature) == (2.0, 2.0)
    assert not hasattr(model, "note")
    assert caplog.text.count("hide them from the result of wrap_model: dim. Rename them") == 1


def test_a_replica_of_a_container_is_read_as_one(tmp_path: Path) -> None:
    """As the container itself, whichever of the operators it has."""
    first, second = nn.Linear(2, 3), nn.Linear(3, 1)
    with lone_process_group(tmp_path):
        chain: Any = replica_of(nn.Sequential(first, second), torch.device("cpu"))
        named: Any = replica_of(nn.ModuleDict({"head": second}), torch.device("cpu"))
        plain = replica_of(nn.Linear(2, 1), torch.device("cpu"))
    assert (chain[0], chain[-1], len(chain), list(chain)) == (first, second, 2, [first, second])
    assert list(chain[:1]) == [first]
    assert ("head" in named, "tail" in named, named["head"]) == (True, False, second)
    assert bool(plain)
    assert not isinstance(plain, Collection)


@contextmanager
def lone_process_group(folder: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def four_ranks() -> DistributedContext:
    environment = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    return DistributedContext.from_environment(environment)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_step_modes() -> None:
    """With an epoch of 2.5 batches and a step in every second batch, over 10 batches."""
    modes, seen = LRScheduler.StepMode, {}
    for mode in modes:
        for frequency in (1, 2):
            scheduler = StepLR(sgd(), 1)
            own = OwnScheduler(scheduler, mode, frequency)
            counts = []
            for batch in range(10):
                own.batch_ended(batch, 2, EpochLength(10, 4))
                counts.append(scheduler.last_epoch)
            seen[mode.name, frequency] = counts
            assert own.get_last_lr() == scheduler.get_last_lr()
    assert seen == {
        ("STEP_EVERY_EPOCH", 1): [0, 0, 1, 1, 2, 2, 2, 3, 3, 4],
        ("STEP_EVERY_EPOCH", 2): [0, 0, 0, 0, 1, 1, 1, 1, 1, 2],
        ("STEP_EVERY_BATCH", 1): [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
        ("STEP_EVERY_BATCH", 2): [0, 1, 1, 2, 2, 3, 3, 4, 4, 5],
        ("MANUAL_STEP", 1): [0] * 10,
        ("MANUAL_STEP", 2): [0] * 10,
        ("STEP_EVERY_OPTIMIZER_STEP", 1): [0, 1, 1, 2, 2, 3, 3, 4, 4, 5],
        ("STEP_EVERY_OPTIMIZER_STEP", 2): [0, 0, 0, 1, 1, 1, 1, 2, 2, 2],
    }
