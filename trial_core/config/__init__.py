"""The experiment: what to train, with what, for how long, and where its checkpoints go.

The field names are those of Determined's experiment files, and most such files work as they are:
what has no meaning here is ignored with an `IgnoredFieldWarning`. ``load_config`` reads a file;
``ExperimentConfig.from_mapping`` takes what is read already. Both raise a `ConfigError` that lists
everything wrong, one line each, with its path::

    experiment.yaml: searcher.metrc: unknown field; did you mean "metric"?
    experiment.yaml: searcher.max_length.batches: expected a positive integer, got "ten"

An `ExperimentConfig` is also a parameter of the flow, so its JSON schema is the form that a person
fills in, and it survives a round trip through JSON. The schema shows the plain form of every
field; the shorter and older forms (a bare number as a length, Determined's storage types) are
understood in files and in Python, but a Prefect server that checks parameters refuses them.
"""

from __future__ import annotations

from trial_core.config.checkpoint_storage import StorageConfig
from trial_core.config.error_text import IgnoredFieldWarning, error_lines
from trial_core.config.experiment import ExperimentConfig, load_config
from trial_core.config.retraining_section import RetrainingConfig, ScheduleConfig
from trial_core.config.sections import (
    EnvironmentConfig,
    ReproducibilityConfig,
    ResourcesConfig,
    SearcherConfig,
)

__all__ = [
    "EnvironmentConfig",
    "ExperimentConfig",
    "IgnoredFieldWarning",
    "ReproducibilityConfig",
    "ResourcesConfig",
    "RetrainingConfig",
    "ScheduleConfig",
    "SearcherConfig",
    "StorageConfig",
    "error_lines",
    "load_config",
]
