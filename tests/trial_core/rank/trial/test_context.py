"""A trial's context, without ranks."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.slots import TOY
from trial_core.deepspeed import DeepSpeedTrialContext, ModelParallelUnit
from trial_core.errors import (
    ConfigError,
    InvalidExperimentException,
    TrialError,
    TrialValueError,
)
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.trial.context import RunInfo, TrialContext
from trial_core.rank.trial.tensorboard import TensorBoard
from trial_core.schedule.units import EpochLength

EXPERIMENT = {
    "name": "gpt",
    "hyperparameters": {"lr": 0.1, "layers": [4, 5]},
    "data": {"folder": "/data"},
}


def single_rank() -> DistributedContext:
    return DistributedContext.from_environment({})


@pytest.fixture
def info(tmp_path: Path) -> RunInfo:
    return RunInfo("gpt-0000002a", EXPERIMENT, tensorboard=TensorBoard(tmp_path / "tensorboard"))


@pytest.fixture
def context(info: RunInfo) -> DeepSpeedTrialContext:
    return DeepSpeedTrialContext(info, single_rank())


def test_the_context_returns_the_experiment(context: TrialContext) -> None:
    """Configuration, data, hyperparameters and ids."""
    assert context.get_experiment_config() == EXPERIMENT
    assert context.get_data_config() == {"folder": "/data"}
    assert context.get_hparams() == {"lr": 0.1, "layers": [4, 5]}
    assert context.get_hparam("lr") == 0.1
    assert context.get_trial_id() == 42
    assert isinstance(context.get_experiment_id(), int)


def test_the_experiment_id_depends_on_its_name(info: RunInfo) -> None:
    """Runs of one experiment share it."""
    ids = {
        TrialContext(RunInfo(trial, {"name": name}), single_rank()).get_experiment_id()
        for trial, name in [("a-1", "gpt"), ("b-2", "gpt"), ("c-3", "bert")]
    }
    assert len(ids) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda context: context.get_hparams()["layers"].append(6),
        lambda context: context.get_hparam("layers").append(6),
        lambda context: context.get_experiment_config()["hyperparameters"].clear(),
        lambda context: context.get_data_config().clear(),
    ],
)
def test_returned_configuration_is_a_copy(
    context: TrialContext, change: Callable[[TrialContext], None]
) -> None:
    """A change to it does not change the experiment."""
    change(context)
    assert context.get_experiment_config() == {
        "name": "gpt",
        "hyperparameters": {"lr": 0.1, "layers": [4, 5]},
        "data": {"folder": "/data"},
    }


def test_starts_and_ends_of_epochs(info: RunInfo, context: TrialContext) -> None:
    """With epochs of 2.5 batches, batches 0, 3 and 5 begin one, and 2, 4 and 7 end one."""
    info.epoch = EpochLength(10, 4)
    starts, ends = [], []
    for info.batches_trained in range(8):
        assert context.current_train_batch() == info.batches_trained
        if context.is_epoch_start():
            starts.append(info.batches_trained)
        if context.is_epoch_end():
            ends.append(info.batches_trained)
    assert starts == [0, 3, 5]
    assert ends == [2, 4, 7]


def test_a_stop_can_be_requested_and_withdrawn(context: TrialContext) -> None:
    """The flag is false at first."""
    assert context.get_stop_requested() is False
    context.set_stop_requested(True)
    assert context.get_stop_requested() is True
    context.set_stop_requested(False)
    assert context.get_stop_requested() is False


@pytest.mark.parametrize(
    ("experiment", "ends"),
    [
        ({"hyperparameters": {"lr": 1}}, "it sets: lr"),
        ({"hyperparameters": {"widht": 1}}, 'it sets: widht; did you mean "widht"?'),
        (
            {"hyperparameters": {}, "hyperparametres": {"width": 1}},
            'it sets: none; did you mean "hyperparameters", where exp_conf has "hyperparametres"?',
        ),
    ],
)
def test_a_hyperparameter_that_may_be_misspelt(experiment: dict[str, Any], ends: str) -> None:
    """The error names what is similar: a hyperparameter, or a script's whole section."""
    context = TrialContext(RunInfo("toy-1", experiment), single_rank())
    with pytest.raises(TrialValueError) as refused:
        context.get_hparam("width")
    assert str(refused.value).endswith(ends)


def unit() -> ModelParallelUnit:
    return ModelParallelUnit(0, 1, True, True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda context: context.get_hparam("momentum"),
            'the trial asks for hyperparameter "momentum", which the experiment does not set; '
            "it sets: layers, lr",
        ),
        (
            lambda context: context.set_stop_requested("yes"),
            "set_stop_requested takes a bool, got 'yes'",
        ),
        (
            lambda context: context.set_enable_tensorboard_logging(1),
            "set_enable_tensorboard_logging takes a bool, got 1",
        ),
        (
            lambda context: context.is_epoch_start(),
            "is_epoch_start() needs the length of an epoch, but the training loader has no length",
        ),
        (
            lambda context: context.set_mpu(unit()),
            "set_mpu was called before wrap_model_engine; wrap the engine first",
        ),
        (
            lambda context: context.set_mpu(None),
            "set_mpu takes a trial_core.deepspeed.ModelParallelUnit, got NoneType without "
            "data_parallel_rank, data_parallel_world_size, should_report_metrics, ",
        ),
        (
            lambda context: context.wrap_model_engine("model"),
            "wrap_model_engine takes the engine that deepspeed.initialize returns first, got str",
        ),
    ],
)
def test_invalid_calls_are_refused(
    context: DeepSpeedTrialContext, wrong: Callable[[Any], None], message: str
) -> None:
    """The message says what was seen and what was expected."""
    with pytest.raises(TrialError, match=re.escape(message)):
        wrong(context)


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_there_is_one_tensorboard_writer(context: TrialContext, info: RunInfo) -> None:
    """Every call returns the same one; it writes to the context's folder."""
    writer = context.get_tensorboard_writer()
    assert context.get_tensorboard_writer() is writer
    writer.add_scalar("mine", 2.5, 7)
    info.tensorboard.finish()
    (event,) = events(context.get_tensorboard_path()).Scalars("mine")
    assert (event.step, event.value) == (7, 2.5)


def test_reported_metrics_are_written_for_a_trial_with_a_writer(
    context: TrialContext, info: RunInfo
) -> None:
    """Only numbers are written, not arrays or text."""
    context.get_tensorboard_writer()
    info.tensorboard.report("validation", 12, {"loss": 0.5, "confusion": [[1, 2], [3, 4]]})
    info.tensorboard.finish()
    seen = events(context.get_tensorboard_path())
    assert seen.Tags()["scalars"] == ["Determined/val_loss"]
    assert [(event.step, event.value) for event in seen.Scalars("Determined/val_loss")] == [
        (12, 0.5)
    ]


def test_without_tensorboard_calls_no_file_is_written(info: RunInfo, tmp_path: Path) -> None:
    """And there is nothing to upload."""
    info.tensorboard.report("training", 1, {"loss": 1.0})
    info.tensorboard.finish()
    assert not info.tensorboard.has_files_to_upload
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_logging_can_be_switched_on(context: TrialContext, info: RunInfo) -> None:
    """Reported metrics are written although the trial has no writer."""
    context.set_enable_tensorboard_logging(True)
    info.tensorboard.report("training", 3, {"loss": 1.5})
    info.tensorboard.finish()
    assert events(context.get_tensorboard_path()).Tags()["scalars"] == ["Determined/loss"]
    assert info.tensorboard.has_files_to_upload


def test_tensorboard_logging_can_be_switched_off(context: TrialContext, info: RunInfo) -> None:
    """The trial's files are not uploaded, and reported metrics are not written."""
    assert context.get_enable_tensorboard_logging() is True
    context.get_tensorboard_writer().add_scalar("mine", 1.0, 1)
    context.set_enable_tensorboard_logging(False)
    info.tensorboard.report("training", 3, {"loss": 1.5})
    info.tensorboard.finish()
    assert context.get_enable_tensorboard_logging() is False
    assert events(context.get_tensorboard_path()).Tags()["scalars"] == ["mine"]
    assert not info.tensorboard.has_files_to_upload


def test_a_missing_tensorboard_is_an_error(
    context: TrialContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the command that installs it."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(TrialError, match=re.escape("pip install 'trialflow[tensorboard]'")):
        context.get_tensorboard_writer()


def test_the_profiler_steps_after_every_batch(context: TrialContext, info: RunInfo) -> None:
    """With wait=1, warmup=1, active=1, only the third batch is in the trace."""
    import torch

    context.set_profiler(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1),
    )
    info.tensorboard.start()
    for batch in range(5):
        with torch.profiler.record_function(f"toy_batch_{batch}"):
            torch.ones(2).sum()
        info.tensorboard.batch_ended()
    info.tensorboard.finish()
    (trace,) = context.get_tensorboard_path().glob("rank-0.*.pt.trace.json")
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {name for name in names if str(name).startswith("toy_batch")} == {"toy_batch_2"}


@pytest.mark.parametrize(("trained", "seen"), [(0, {2, 3}), (3, {3}), (4, set())])
def test_the_configured_batches_are_profiled(
    context: TrialContext, info: RunInfo, trained: int, seen: set[int]
) -> None:
    """Batches 2 and 3 of the trial, also if the run resumes at one of them, or after them."""
    import torch

    info.batches_trained = trained
    info.tensorboard.profile_batches(2, 3, lambda: info.batches_trained)
    info.tensorboard.start()
    for batch in range(trained, 6):
        with torch.profiler.record_function(f"toy_batch_{batch}"):
            torch.ones(2).sum()
        info.batches_trained = batch + 1
        info.tensorboard.batch_ended()
    info.tensorboard.finish()
    traces = list(context.get_tensorboard_path().glob("rank-0.*.pt.trace.json"))
    events = [event for trace in traces for event in json.loads(trace.read_text())["traceEvents"]]
    names = {str(event.get("name")) for event in events}
    assert {name for name in names if name.startswith("toy_batch")} == {
        f"toy_batch_{batch}" for batch in seen
    }
    assert len(traces) == min(1, len(seen))


def test_a_profiler_cannot_be_replaced_while_it_runs(context: TrialContext, info: RunInfo) -> None:
    """The message says where to call set_profiler."""
    context.set_profiler()
    info.tensorboard.start()
    try:
        with pytest.raises(TrialError, match="set_profiler was called while a profiler was"):
            context.set_profiler()
    finally:
        info.tensorboard.finish()


def test_from_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary is enough, also with Determined's constants and without a name."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    config = {"hyperparameters": {"lr": {"type": "const", "val": 0.3}}, "data": {"n": 1}}
    context = TrialContext.from_config(config)
    assert context.get_hparams() == {"lr": 0.3}
    assert context.get_data_config() == {"n": 1}
    assert context.distributed.get_size() == 1
    assert context.current_train_batch() == 0
    assert context.get_tensorboard_path().is_dir()
    os.rmdir(context.get_tensorboard_path())


def test_from_config_draws_from_search_ranges() -> None:
    """A YAML file for a search can be debugged as it is; the experiment's seed decides."""
    config: dict[str, Any] = {
        "hyperparameters": {"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1}},
        "reproducibility": {"experiment_seed": 3},
    }
    first, again = (TrialContext.from_config(config).get_hparam("lr") for _ in range(2))
    assert 1e-4 <= first == again <= 1e-1
    config["reproducibility"]["experiment_seed"] = 4
    assert TrialContext.from_config(config).get_hparam("lr") != first


def test_from_config_refuses_a_list_of_hyperparameters() -> None:
    """They have names."""
    with pytest.raises(ConfigError, match="hyperparameters: expected a mapping, got"):
        TrialContext.from_config({"hyperparameters": ["lr"]})


DEBUGGING = f"""
import json, os, sys
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name)
sys.path.insert(0, {str(TOY)!r})
from toy_trial import ToyTrial
from tests.support.processes import listening_beyond_loopback
from trial_core.deepspeed import DeepSpeedTrialContext, ModelParallelUnit
from trial_core.errors import TrialError

hparams = {{"micro_batch_size": 3, "accumulation": 2}}
context = DeepSpeedTrialContext.from_config({{"hyperparameters": hparams}})
trial = ToyTrial(context)
batches = iter(trial.build_training_data_loader().get_data_loader())
losses = [float(trial.train_batch(batches, 0, i)["loss"]) for i in range(3)]
errors = []
unit = ModelParallelUnit(0, 1, True, True)
context.set_mpu(unit)
try:
    context.set_mpu(unit)
except TrialError as error:
    errors.append(str(error))
assert context.wrap_model_engine(trial.engine) is trial.engine
sizes = [
    context.get_train_micro_batch_size_per_gpu(), context.train_micro_batch_size_per_gpu,
    context.get_num_micro_batches_per_slot(), context.num_micro_batches_per_slot,
    context.get_global_batch_size(), context.get_per_slot_batch_size(),
    context.use_pipeline_parallel, len(context.models),
]
exposed = listening_beyond_loopback([os.getpid()])
print(json.dumps({{
    "sizes": sizes, "steps": trial.engine.global_steps, "losses": losses, "errors": errors,
    "exposed": exposed,
}}))
"""


@pytest.mark.long
@pytest.mark.slots
def test_debugging_a_trial_in_plain_python() -> None:
    """Determined's example: create a context and a trial, then train batches."""
    (result,) = run_ranks(DEBUGGING, 1)
    assert result["steps"] == 1
    assert result["sizes"] == [3, 3, 2, 2, 6, 6, False, 1]
    assert len(set(result["losses"])) == 3
    assert result["exposed"] == []
    assert result["errors"] == ["set_mpu was called twice; a trial has one ModelParallelUnit"]


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (lambda context: context.set_stop_requested("yes"), TypeError),
        (lambda context: context.set_enable_tensorboard_logging(1), TypeError),
        (lambda context: context.wrap_model_engine("model"), TypeError),
        (lambda context: context.wrap_reducer(3), TypeError),
        (lambda context: context.wrap_reducer(len, name=3), TypeError),
        (lambda context: context.set_mpu(None), TypeError),
        (lambda context: context.get_hparam("momentum"), ValueError),
        (lambda context: context.set_mpu(unit()), InvalidExperimentException),
        (lambda context: context.get_global_batch_size(), InvalidExperimentException),
    ],
)
def test_mistakes_are_caught_as_in_determined(
    context: DeepSpeedTrialContext, wrong: Callable[[Any], None], kind: type[Exception]
) -> None:
    """Each is an InvalidExperimentException; a wrong type is a TypeError, too."""
    with pytest.raises(kind) as mistake:
        wrong(context)
    assert isinstance(mistake.value, InvalidExperimentException)


def test_an_unknown_name_says_what_to_use(context: DeepSpeedTrialContext) -> None:
    """Also a name that only another kind of trial has."""
    with pytest.raises(AttributeError, match=r"no attribute 'step_optimizer'; use engine.step\(\)"):
        context.step_optimizer  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'get_hprams'; did you mean 'get_hparam"):
        context.get_hprams  # noqa: B018
    assert not hasattr(context, "anything")


def test_where_a_resumed_run_began(info: RunInfo, context: DeepSpeedTrialContext) -> None:
    """The first batch of this run, the epoch of the current one, and the seed."""
    info.experiment = {"reproducibility": {"experiment_seed": 7}}
    info.batches_trained = info.initial_batch = 5
    info.epoch = EpochLength(10, 4)
    assert (context.get_initial_batch(), context.current_train_epoch()) == (5, 2)
    info.current_batch = 7
    assert (context.current_train_batch(), context.current_train_epoch()) == (7, 2)
    assert context.get_trial_seed() == 7
