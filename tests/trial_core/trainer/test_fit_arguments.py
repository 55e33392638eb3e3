"""Invalid arguments of `Trainer` and `fit`, each with its message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import trial_core.trainer.init
import trial_core.trainer.trainer
from trial_core.config.script import named_metric, script_config
from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext, Trainer
from trial_core.errors import ConfigError, TrialError, TrialflowError
from trial_core.messages import Length
from trial_core.processes.machine.run_dirs import locked_run_dir
from trial_core.pytorch import Batch, Epoch
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.trial.context import RunInfo
from trial_core.trainer.trainer import fit_begun


class Trial(DeepSpeedTrial):
    """Builds nothing: these arguments are rejected before anything is built."""

    def __init__(self, context: DeepSpeedTrialContext) -> None: ...

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        return {}

    def build_training_data_loader(self) -> None: ...

    def build_validation_data_loader(self) -> None: ...


def context() -> DeepSpeedTrialContext:
    alone = DistributedContext(
        rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1
    )
    return DeepSpeedTrialContext(RunInfo(trial="toy-0000beef", experiment={}), alone)


def trainer() -> Trainer:
    one = context()
    return Trainer(Trial(one), one)


ONE_UNIT = "is a Batch or an Epoch, got"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "fit needs max_length: Batch(1000) or Epoch(3), for example"),
        ({"max_length": 100}, f"fit: max_length {ONE_UNIT} 100; did you mean Batch(100)?"),
        (
            {"max_length": Epoch([1, 2])},
            "fit: max_length is one number of batches or epochs, got Epoch([1, 2])",
        ),
        ({"validation_period": "1"}, f"fit: validation_period {ONE_UNIT} '1'"),
        (
            {"checkpoint_period": 5},
            f"fit: checkpoint_period {ONE_UNIT} 5; did you mean Batch(5)?",
        ),
        ({"reporting_period": None}, f"fit: reporting_period {ONE_UNIT} None"),
        (
            {"validation_period": Batch([1, 2.5])},
            "fit: validation_period is a number of batches or epochs, or a container of such "
            "numbers, got [1, 2.5]",
        ),
        (
            {"checkpoint_policy": "bst"},
            'fit: checkpoint_policy is "best", "all" or "none", got \'bst\'',
        ),
        (
            {"latest_checkpoint": 5},
            'fit: latest_checkpoint is a checkpoint\'s uuid, "latest", a folder or a URL, as text, '
            "got 5",
        ),
    ],
)
def test_an_invalid_argument(arguments: dict[str, Any], message: str) -> None:
    """The message has the value, and what is valid."""
    others = {"max_length": Batch(1)} if arguments and "max_length" not in arguments else {}
    with pytest.raises(ConfigError) as refusal:
        trainer().fit(**others, **arguments)
    assert str(refusal.value) == message


@pytest.mark.parametrize(("policy", "warns"), [(None, False), ("best", True), ("all", False)])
def test_only_a_policy_that_was_asked_for_is_warned_of(
    policy: Any, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A script that names neither a policy nor a metric has every validation saved, silently."""

    def reached(*_: Any) -> None:
        raise TrialflowError("the driver is reached")

    monkeypatch.setattr(trial_core.trainer.trainer, "fit_with_driver", reached)
    with pytest.raises(TrialflowError, match="the driver is reached"):
        trainer().fit(max_length=Batch(1), checkpoint_policy=policy)
    assert any("needs a metric" in message for message in caplog.messages) is warns


def test_trainer_takes_a_constructed_trial_and_its_context() -> None:
    """Nothing else."""
    with pytest.raises(TrialError, match=r"takes a constructed trial, .* the class Trial"):
        Trainer(Trial, context())  # type: ignore[arg-type]
    with pytest.raises(TrialError, match=r"that trial_core.deepspeed.init gives .* got dict"):
        Trainer(Trial(context()), {})  # type: ignore[arg-type]


def test_the_profilers_batches_are_checked() -> None:
    """The last batch is not before the first one."""
    mistaken = trainer()
    mistaken.configure_profiler(enabled=True, begin_on_batch=5, end_after_batch=3)
    with pytest.raises(ConfigError, match=r"profiling.end_after_batch: expected at least .* 5"):
        mistaken.fit(max_length=Batch(1))


def test_what_is_due_in_a_container_is_listed() -> None:
    """The driver gets plain data. Any container will do, if the length of training bounds it."""

    class Squares:
        def __contains__(self, number: object) -> bool:
            return number in (1, 4, 9, 16)

    asked = fit_begun(Batch(Squares()), Epoch({3, 1}), Batch(10), Batch(100), None, False)
    assert asked.checkpoint_period == Length(unit="batches", value=[1, 4, 9])
    assert asked.validation_period == Length(unit="epochs", value=[1, 3])
    with pytest.raises(ConfigError, match="checkpoint_period is a container that cannot be listed"):
        fit_begun(Epoch(Squares()), None, Batch(10), Batch(100), None, False)


def test_a_misspelt_field_of_exp_conf(caplog: pytest.LogCaptureFixture) -> None:
    """It is the trial's, and has no effect; a warning says what may be meant.

    Not of a name that is similar to a field that is given as well.
    """
    searcher = {"metrc": "loss", "mode": 3}
    own = {"mine": 1, "names": ["a"]}
    script_config({"name": "b", "searcher": searcher, "checkpoint_storag": "x", **own})
    assert [record.getMessage() for record in caplog.records] == [
        'exp_conf: "checkpoint_storag" has no effect; did you mean "checkpoint_storage"?',
        'exp_conf: searcher: "metrc" has no effect; did you mean "metric"?',
    ]


def test_exp_conf_may_have_any_fields() -> None:
    """Fields that a script does not use may have any values: the trial reads them."""
    exp_conf = {
        "mine": object(), "entrypoint": ["python3", "train.py"], "max_restarts": "often",
        "resources": {"slots_per_trial": 10**9, "gpu": "large"}, "checkpoint_policy": "mine",
        "searcher": {"name": "adaptive_asha", "metric": "accuracy", "max_trials": 16},
        "stopping": {"grace_seconds": "long", "stall_timeout_seconds": 60},
    }  # fmt: skip
    config = script_config(exp_conf)
    assert config.searcher.metric == "accuracy"
    assert config.stopping.stall_timeout_seconds == 60


def test_fields_that_a_script_uses_are_checked() -> None:
    """One line for each mistake, as for an experiment file."""
    with pytest.raises(ConfigError) as refusal:
        script_config(
            {
                "searcher": {"metric": 3},
                "reproducibility": {"experiment_seed": "x"},
                "checkpoint_storage": {"type": "tape"},
            }
        )
    paths = {line.rpartition(": expected")[0] for line in str(refusal.value).splitlines()}
    assert paths >= {"exp_conf: searcher.metric", "exp_conf: reproducibility.experiment_seed"}


def test_hparams_replace_those_of_exp_conf() -> None:
    """They must be a mapping."""
    exp_conf = {"hyperparameters": {"lr": 1, "depth": 2}}
    assert script_config(exp_conf).hyperparameters == {"lr": 1, "depth": 2}
    assert script_config(exp_conf, {"lr": 3}).hyperparameters == {"lr": 3}
    with pytest.raises(ConfigError, match="hparams: expected a mapping, got a list"):
        script_config(None, [1])  # type: ignore[arg-type]


def test_exp_conf_may_be_an_experiment_of_determined() -> None:
    """Its launch command and lengths are ignored."""
    exp_conf = {
        "name": "mine", "entrypoint": "python3 train.py",
        "searcher": {"name": "single", "metric": "accuracy", "max_length": {"records": 5}},
    }  # fmt: skip
    config = script_config(exp_conf, trial_class=Trial, max_length=Epoch(3))
    assert (config.name, config.entrypoint) == ("mine", f"{__name__}:Trial")
    assert config.code == Path(__file__).parents[__name__.count(".")]
    assert config.searcher.max_length == Epoch(3)
    assert named_metric(exp_conf) == "accuracy"
    assert named_metric({}) is None


def test_a_trial_that_another_process_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes before anything is built, and the folder is free afterwards."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path))
    with (
        locked_run_dir("toy-0000beef"),
        pytest.raises(TrialflowError, match="toy-0000beef is being trained by process"),
    ):
        trainer().fit(max_length=Batch(1))
    with pytest.raises(TrialError, match="wrap_model_engine"):  # this trial gets no further
        trainer().fit(max_length=Batch(1))
    with locked_run_dir("toy-0000beef"):
        pass


def test_a_trial_can_be_fitted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the first fit failed, because the trial's state is then unknown."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path))
    one = trainer()
    with pytest.raises(TrialError, match="wrap_model_engine"):  # this trial gets no further
        one.fit(max_length=Batch(1))
    with pytest.raises(
        TrialError, match="fit was called twice; to continue training, construct a new"
    ):
        one.fit(max_length=Batch(2))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("experiment.yaml", "experiment.yaml"),  # `script_config` refuses it
        (None, {"optimizations": {"aggregation_frequency": 2}}),
        (
            {"optimizations": {"sharding": "fsdp2"}},
            {"optimizations": {"sharding": "fsdp2", "aggregation_frequency": 2}},
        ),
    ],
)
def test_an_aggregation_frequency_is_added_to_exp_conf(
    monkeypatch: pytest.MonkeyPatch, given: Any, expected: Any
) -> None:
    """What is no mapping is left to the check of all fields."""
    seen = []

    @contextmanager
    def context(kind: type, hparams: object, exp_conf: object, *others: object) -> Iterator[None]:
        seen.append(exp_conf)
        yield

    monkeypatch.setattr(trial_core.trainer.init, "_context", context)
    with trial_core.trainer.init.pytorch_init(exp_conf=given, aggregation_frequency=2):
        assert seen == [expected]
