"""Fields of Determined's experiment files are read, ignored or refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from trial_core.checkpoint.retention_policy import RetentionPolicy
from trial_core.config import ExperimentConfig, ExperimentWarning, IgnoredFieldWarning, load_config
from trial_core.errors import ConfigError
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.trial.context import RunInfo, TrialContext
from trial_core.schedule.units import Batch, Epoch

FOR_DETERMINED = """
name: cifar10 deepspeed
description: null
debug: false
workspace: research
project: vision
profiling: {enabled: true}
environment:
  environment_variables:
    - NCCL_DEBUG=INFO
    - OPTIONS=a=b,c
  image: {gpu: determinedai/environments:cuda}
bind_mounts:
  - {host_path: /tmp, container_path: /data}
hyperparameters:
  deepspeed_config: ds_config.json
  learning_rate: {type: const, val: 1e-5}
  optimizer: {type: Adam, betas: [0.9, {type: const, val: 0.95}]}
resources: {slots_per_trial: 2, shm_size: 4294967296, resource_pool: a100}
records_per_epoch: 50000
min_validation_period: {batches: 0}
min_checkpoint_period: {epochs: 2}
searcher:
  name: single
  metric: accuracy
  smaller_is_better: false
  max_length: {batches: 100}
  max_trials: 1
  source_trial_id: null
checkpoint_storage: {type: shared_fs, host_path: /mnt, storage_path: ckpt, save_trial_best: 2}
entrypoint:
  - python3
  - -m
  - determined.launch.deepspeed
  - --trial
  - model_def:CIFARTrial
"""


def experiment(**fields: Any) -> ExperimentConfig:
    searcher = {"metric": "loss", "max_length": {"batches": 100}}
    mapping = {"entrypoint": "model_def:MyTrial", "searcher": searcher, **fields}
    return ExperimentConfig.from_mapping(mapping)


def problems(**fields: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        experiment(**fields)
    return str(error.value).splitlines()


def test_a_file_of_determined_works_unchanged(tmp_path: Path) -> None:
    """Fields that have a meaning here keep it."""
    path = tmp_path / "const.yaml"
    path.write_text(FOR_DETERMINED)
    with pytest.warns(IgnoredFieldWarning):
        config = load_config(path)
    assert config.entrypoint == "model_def:CIFARTrial"
    assert config.hyperparameters == {
        "deepspeed_config": "ds_config.json",
        "learning_rate": 1e-5,
        "optimizer": {"type": "Adam", "betas": [0.9, 0.95]},
    }
    assert config.searcher.max_length == Batch(100)
    assert (config.min_validation_period, config.min_checkpoint_period) == (None, Epoch(2))
    assert config.checkpoint_storage.url == "file:///mnt/ckpt"
    assert config.checkpoint_storage.save_trial_best == 2
    assert config.environment.environment_variables == {"NCCL_DEBUG": "INFO", "OPTIONS": "a=b,c"}
    assert config.description == ""


def test_retention_uses_the_searcher_metric() -> None:
    """Its name and its direction."""
    searcher = {"metric": "accuracy", "smaller_is_better": False, "max_length": {"batches": 100}}
    config = experiment(searcher=searcher, checkpoint_storage={"save_trial_best": 2})
    expected = RetentionPolicy(2, 1, 0, metric="accuracy", smaller_is_better=False)
    assert config.retention() == expected


def test_every_ignored_field_warns_with_its_path(tmp_path: Path) -> None:
    """One warning each; a null field causes none."""
    path = tmp_path / "const.yaml"
    path.write_text(FOR_DETERMINED)
    with pytest.warns(IgnoredFieldWarning) as warned:
        load_config(path)
    assert sorted(str(warning.message).partition(":")[0] for warning in warned) == [
        "bind_mounts",
        "debug",
        "entrypoint",
        "environment.image",
        "project",
        "records_per_epoch",
        "resources.resource_pool",
        "resources.shm_size",
        "searcher.max_trials",
        "workspace",
    ]


def test_a_config_that_is_sent_does_not_warn_again() -> None:
    """Nor does it lose the ignored fields."""
    with pytest.warns(IgnoredFieldWarning, match="^debug: ignored: "):
        config = experiment(debug=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sent = ExperimentConfig.model_validate(config.model_dump(mode="json"))
    assert sent == config
    assert sent.ignored_fields == {"debug": True}


def test_the_trial_sees_ignored_fields_in_their_places() -> None:
    """At the top and in sections, but no secrets. They do not change what the experiment is."""
    fields = {
        "records_per_epoch": 50000,
        "resources": {"slots_per_trial": 2, "shm_size": "4g"},
        "environment": {"registry_auth": {"password": "secret"}},
    }
    with pytest.warns(IgnoredFieldWarning):
        config = experiment(**fields)
    info = RunInfo("toy-0000002a", config.model_dump(mode="json"))
    seen = TrialContext(info, DistributedContext.from_environment({})).get_experiment_config()
    assert seen["records_per_epoch"] == 50000
    assert seen["resources"].items() >= {"slots_per_trial": 2, "shm_size": "4g"}.items()
    assert "secret" not in str(seen)
    assert "ignored_fields" not in seen
    assert config.digest() == experiment(resources={"slots_per_trial": 2}).digest()


@pytest.mark.parametrize(
    "command",
    [
        "python3 -m determined.launch.deepspeed --trial pkg.model_def:Trial",
        "python3 -m determined.launch.torch_distributed --trial=pkg.model_def:Trial --verbose",
    ],
)
def test_the_trial_is_read_from_a_launchers_command(command: object) -> None:
    """A warning says that trialflow replaces the launcher."""
    with pytest.warns(IgnoredFieldWarning, match="only --trial pkg.model_def:Trial is used of"):
        assert experiment(entrypoint=command).entrypoint == "pkg.model_def:Trial"


def test_the_trial_may_be_a_launchers_last_word() -> None:
    """Without --trial."""
    command = "python3 -m determined.launch.torch_distributed pkg.model_def:Trial"
    with pytest.warns(IgnoredFieldWarning, match="determined.launch.torch_distributed is not used"):
        assert experiment(entrypoint=command).entrypoint == "pkg.model_def:Trial"


@pytest.mark.parametrize(
    "command",
    [
        "python -m determined.launch.deepspeed bash run_clm.sh --model gpt2",
        "python3 -m determined.launch.deepspeed --trial",
        "python3 train.py --trial 'open quote",
        [],
    ],
)
def test_a_command_without_a_trial_or_a_script_is_refused(command: object) -> None:
    """Ranks run nothing else."""
    (problem,) = problems(entrypoint=command)
    assert problem.startswith('entrypoint: expected "module:Class", such as "model_def:MyTrial"')


def test_no_slots_are_one_rank_on_the_cpu() -> None:
    """As in Determined, on a machine with accelerators, too."""
    with pytest.warns(ExperimentWarning, match="0 is read as one rank on the CPU"):
        config = experiment(resources={"slots_per_trial": 0})
    assert (config.resources.slots_per_trial, config.resources.accelerator) == (1, "cpu")


def test_a_users_type_is_not_a_search_range() -> None:
    """A DeepSpeed config in the hyperparameters has fields named `type`, too."""
    values = {"optimizer": {"type": "Adam", "params": {"lr": 1}}, "scheduler": {"type": "log"}}
    assert experiment(hyperparameters=values).hyperparameters == values


def test_names_of_hyperparameters_become_text() -> None:
    """As in JSON, and so as under Determined."""
    config = experiment(hyperparameters={"layers": {1: "a", 2.5: "b", None: "c", "d": "e"}})
    assert config.hyperparameters == {"layers": {"1": "a", "2.5": "b", "null": "c", "d": "e"}}


@pytest.mark.parametrize(
    ("given", "variables"),
    [
        (["A=1", "B=x=y", "C="], {"A": "1", "B": "x=y", "C": ""}),
        ({"A": "1", "N": 4}, {"A": "1", "N": "4"}),
        ({"cpu": ["A=1"], "cuda": ["B=2"]}, {"A": "1", "B": "2"}),
        ({"cpu": None, "gpu": ["B=2"]}, {"B": "2"}),
        ({"cpu": "not a list of assignments"}, {"cpu": "not a list of assignments"}),
    ],
)
def test_environment_variables_have_three_forms(given: Any, variables: dict[str, str]) -> None:
    """A mapping, a list of assignments, or lists by device; a variable may be called cpu."""
    config = experiment(environment={"environment_variables": given})
    assert config.environment.environment_variables == variables


def test_an_accelerators_variable_overrides_the_cpus() -> None:
    """The device is not known when the config is read, so a difference warns."""
    given = {"cuda": ["A=cuda"], "cpu": ["A=cpu", "B=same"], "rocm": ["B=same"]}
    with pytest.warns(IgnoredFieldWarning, match="A differs between devices") as warned:
        config = experiment(environment={"environment_variables": given})
    assert config.environment.environment_variables == {"A": "cuda", "B": "same"}
    assert len(warned) == 1


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["A=1", "HUSH"], "[1]: expected NAME=VALUE, got text without a name and ="),
        ([{"A": "HUSH"}], "[0]: expected NAME=VALUE, got a mapping"),
        ({"cuda": ["HUSH"]}, ".cuda[0]: expected NAME=VALUE, got text without a name and ="),
        ({"A": True}, ".A: expected text, got true or false; put it in quotes"),
        ("HUSH", ": expected a mapping or a list of NAME=VALUE, got text"),
    ],
)
def test_an_invalid_environment_variable_is_named_but_not_shown(given: Any, problem: str) -> None:
    """Its value may be a secret."""
    lines = problems(environment={"environment_variables": given})
    assert lines == [f"environment.environment_variables{problem}"]


def test_values_of_environment_variables_are_not_in_the_repr() -> None:
    """Names are."""
    config = experiment(environment={"environment_variables": {"TOKEN": "HUSH"}})
    assert "TOKEN" in repr(config)
    assert "HUSH" not in repr(config) + str(config) + repr(config.environment)
