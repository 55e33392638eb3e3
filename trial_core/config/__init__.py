"""The experiment: what to train, with what, for how long, and where its checkpoints go.

Fields have the names of Determined's experiment files, and most such files work unchanged: fields
without a meaning here are ignored with an `IgnoredFieldWarning`. ``load_config`` reads a file,
``ExperimentConfig.from_mapping`` a mapping. Both raise a `ConfigError` with one line per mistake::

    experiment.yaml: searcher.metrc: unknown field; did you mean "metric"?
    experiment.yaml: searcher.max_length.batches: expected a positive integer, got "ten"

An `ExperimentConfig` is also a parameter of the flow: its JSON schema is the form in Prefect's UI,
and it survives a round trip through JSON. The schema shows the full form of every field. Files and
Python may also use the short and old forms (a bare number as a length, Determined's storage types);
a Prefect server that validates parameters refuses them.
"""

from __future__ import annotations

from trial_core.config.checkpoint_storage import StorageConfig as StorageConfig
from trial_core.config.error_text import (
    ExperimentWarning as ExperimentWarning,
    IgnoredFieldWarning as IgnoredFieldWarning,
    error_lines as error_lines,
)
from trial_core.config.experiment import (
    ExperimentConfig as ExperimentConfig,
    load_config as load_config,
)
from trial_core.config.resources_section import ResourcesConfig as ResourcesConfig
from trial_core.config.retraining_section import (
    RetrainingConfig as RetrainingConfig,
    ScheduleConfig as ScheduleConfig,
)
from trial_core.config.sections import (
    EnvironmentConfig as EnvironmentConfig,
    OptimizationsConfig as OptimizationsConfig,
    ProfilingConfig as ProfilingConfig,
    ReproducibilityConfig as ReproducibilityConfig,
    SearcherConfig as SearcherConfig,
)
