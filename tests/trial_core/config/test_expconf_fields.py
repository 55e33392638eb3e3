"""Every field of Determined 0.38's experiment schema: it is used, or ignored with a warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from trial_core.config import ExperimentConfig
from trial_core.config.error_text import ExperimentWarning, IgnoredFieldWarning
from trial_core.errors import ConfigError
from trial_core.schedule.units import Batch, Epoch

Fields = dict[str, Any]

# By section; after the schema's `properties`, with those of all searchers that 0.38 knows.
USED: list[tuple[str, Fields]] = [
    (
        "",
        {
            "checkpoint_policy": "all",
            "checkpoint_storage": "/mnt/checkpoints",
            "data": {"folder": "/data"},
            "description": "text",
            "entrypoint": "model_def:MyTrial",
            "environment": {},
            "hyperparameters": {"lr": 0.1},
            "labels": ["a"],
            "max_restarts": 2,
            "min_checkpoint_period": {"epochs": 1},
            "min_validation_period": {"batches": 10},
            "name": "mnist",
            "optimizations": {},
            "perform_initial_validation": True,
            "profiling": {},
            "reproducibility": {},
            "resources": {},
            "scheduling_unit": 50,
            "searcher": {"metric": "loss", "max_length": {"batches": 1}},
        },
    ),
    (
        "searcher",
        {
            "name": "single",
            "metric": "loss",
            "smaller_is_better": False,
            "source_trial_id": 3,
            "max_length": {"batches": 7},
        },
    ),
    (
        "searcher",
        {
            "metric": "loss",
            "source_checkpoint_uuid": "0a1b2c3d",
            "max_time": 7,
            "time_metric": "epochs",
        },
    ),
    ("reproducibility", {"experiment_seed": 3}),
    (
        "optimizations",
        {
            "aggregation_frequency": 2,
            "average_aggregated_gradients": False,
            "average_training_metrics": False,
            "gradient_compression": True,
        },
    ),
    ("profiling", {"enabled": True, "begin_on_batch": 3, "end_after_batch": 5}),
    ("resources", {"slots_per_trial": 2}),
    ("environment", {"environment_variables": ["A=1"]}),
    (
        "checkpoint_storage",
        {
            "type": "shared_fs",
            "host_path": "/mnt",
            "storage_path": "a",
            "save_experiment_best": 1,
            "save_trial_best": 2,
            "save_trial_latest": 3,
        },
    ),
    ("checkpoint_storage", {"type": "directory", "container_path": "/mnt"}),
    (
        "checkpoint_storage",
        {
            "type": "s3",
            "bucket": "b",
            "access_key": "a",
            "secret_key": "s",
            "endpoint_url": "http://localhost:9000",
            "prefix": "p",
        },
    ),
    ("checkpoint_storage", {"type": "gcs", "bucket": "b", "prefix": "p"}),
    (
        "checkpoint_storage",
        {
            "type": "azure",
            "container": "c",
            "connection_string": "x",
        },
    ),
    (
        "checkpoint_storage",
        {
            "type": "azure",
            "container": "c",
            "account_url": "https://name.blob.core.windows.net",
            "credential": "x",
        },
    ),
]

IGNORED: dict[str, Fields] = {
    "": {
        "bind_mounts": [{"host_path": "/a", "container_path": "/b"}],
        "data_layer": {"type": "shared_fs"},
        "debug": True,
        "integrations": {"pachyderm": {}, "webhooks": {"webhook_id": [1]}},
        "internal": {},
        "log_pattern_policies": [],
        "log_policies": [{"name": "oom", "pattern": "CUDA out of memory"}],
        "pbs": {"pbsbatch_args": []},
        "preemption_timeout": 60,
        "project": "vision",
        "records_per_epoch": 100,
        "retention_policy": {"log_retention_days": 3},
        "security": {},
        "slurm": {"sbatch_args": []},
        "tensorboard_storage": {"type": "shared_fs"},
        "workspace": "research",
    },
    "searcher": {
        "bracket_rungs": [],
        "budget": {},
        "divisor": 4,
        "max_concurrent_trials": 2,
        "max_rungs": 2,
        "max_trials": 2,
        "mode": "standard",
        "num_rungs": 2,
        "stop_once": False,
        "train_stragglers": True,
        "unit": "batches",
    },
    "optimizations": {
        "auto_tune_tensor_fusion": False,
        "grad_updates_size_file": "a",
        "mixed_precision": "O0",
        "tensor_fusion_cycle_time": 5,
        "tensor_fusion_threshold": 64,
    },
    "profiling": {"sync_timings": True},
    "resources": {
        "agent_label": "a",
        "devices": [],
        "is_single_node": True,
        "max_slots": 2,
        "native_parallel": False,
        "priority": 3,
        "resource_pool": "a",
        "shm_size": "4g",
        "slots": 1,
        "weight": 1,
    },
    "environment": {
        "add_capabilities": [],
        "drop_capabilities": [],
        "force_pull_image": True,
        "image": {"cpu": "a", "cuda": "b", "rocm": "c"},
        "pod_spec": {},
        "ports": {"a": 1},
        "proxy_ports": [],
        "registry_auth": {"username": "a"},
    },
    "checkpoint_storage": {
        "checkpoint_path": "a",
        "container_path": "a",
        "propagation": "rprivate",
        "tensorboard_path": "a",
    },
}

MINIMAL: dict[str, Fields] = {
    "searcher": {"metric": "loss", "max_length": {"batches": 1}},
    "checkpoint_storage": {"type": "shared_fs", "host_path": "/mnt"},
}


def read(section: str, fields: Fields) -> tuple[ExperimentConfig, list[str]]:
    """An experiment with `fields` in a section, and the paths of the ignored ones."""
    given: Fields = {"entrypoint": "model_def:MyTrial", "searcher": MINIMAL["searcher"]}
    given |= {section: fields} if section else fields
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ExperimentWarning)
        config = ExperimentConfig.from_mapping(given)
    return config, [
        str(each.message).partition(":")[0]
        for each in warned
        if issubclass(each.category, IgnoredFieldWarning)
    ]


@pytest.mark.parametrize(("section", "fields"), USED)
def test_a_field_that_has_a_meaning_here_is_used(section: str, fields: Fields) -> None:
    """Without a warning that it is ignored."""
    assert read(section, fields)[1] == []


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [(section, *item) for section, fields in IGNORED.items() for item in fields.items()],
)
def test_any_other_field_is_ignored_with_one_warning(section: str, name: str, value: Any) -> None:
    """It names the field's path. The trial still finds the field in its experiment."""
    config, warned = read(section, {**MINIMAL.get(section, {}), name: value})
    assert warned == [f"{section}.{name}".removeprefix(".")]
    ignored = config.ignored_fields.get(section, {}) if section else config.ignored_fields
    if section not in ("environment", "checkpoint_storage"):  # may hold secrets
        assert ignored == {name: value}


@pytest.mark.parametrize(
    ("searcher", "length", "ignored"),
    [
        ({"max_time": 5, "time_metric": "batches"}, Batch(5), []),
        ({"max_time": 5, "time_metric": "epochs"}, Epoch(5), []),
        (
            {"max_time": 5, "time_metric": "epochs", "max_length": {"batches": 7}},
            Batch(7),
            ["searcher.max_time", "searcher.time_metric"],
        ),
        (
            {"max_time": 5, "time_metric": "steps", "max_length": {"batches": 7}},
            Batch(7),
            ["searcher.max_time", "searcher.time_metric"],
        ),
    ],
)
def test_a_time_in_batches_or_epochs_is_the_length_of_training(
    searcher: Fields, length: Batch | Epoch, ignored: list[str]
) -> None:
    """`max_length` counts if both are given: it can say more."""
    config, warned = read("searcher", {"metric": "loss", **searcher})
    assert config.searcher.max_length == length
    assert warned == ignored


@pytest.mark.parametrize(
    ("searcher", "problem"),
    [
        (
            {"max_time": 5, "time_metric": "steps"},
            'searcher.time_metric: expected "batches" or "epochs", got "steps"; or give the length '
            "of training as max_length: {batches: 1000}",
        ),
        (
            {"max_time": -1, "time_metric": "epochs"},
            "searcher.max_time: expected a positive",
        ),
        ({"max_time": 5}, 'searcher.time_metric: expected "batches" or "epochs", got nothing'),
    ],
)
def test_a_time_that_is_no_length_is_refused(searcher: Fields, problem: str) -> None:
    """If nothing else says how long to train."""
    with pytest.raises(ConfigError) as error:
        read("searcher", {"metric": "loss", **searcher})
    (line,) = str(error.value).splitlines()
    assert line.startswith(problem)
