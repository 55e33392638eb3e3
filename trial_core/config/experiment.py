"""`ExperimentConfig`, the whole experiment, and reading it from its file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

from pydantic import AfterValidator, BeforeValidator, Field, Strict, ValidationError
from typing_extensions import Self

from trial_core.config import determined
from trial_core.config.base import Section
from trial_core.config.checkpoint_storage import StorageConfig
from trial_core.config.checkpointing_section import CheckpointingConfig
from trial_core.config.error_text import error_lines
from trial_core.config.lengths import Period
from trial_core.config.parsing import override, read_mapping
from trial_core.config.retraining_section import RetrainingConfig
from trial_core.config.sections import (
    EnvironmentConfig,
    ReproducibilityConfig,
    ResourcesConfig,
    SearcherConfig,
)
from trial_core.config.stopping_section import StoppingConfig
from trial_core.config.values import Count, Flag, PlainMapping, Positive, Text
from trial_core.errors import ConfigError
from trial_core.retention.policy import RetentionPolicy
from trial_core.run.sequencer import CheckpointPolicy, Schedule
from trial_core.text_format import slug
from trial_core.units import Batch

_NOT_WHAT_IS_TRAINED = {
    "code", "checkpoint_storage", "checkpointing", "stopping", "retraining", "environment"
}  # fmt: skip


def _absolute(folder: str | Path) -> Path:
    # Not `Path.expanduser`, which raises where there is no such user.
    return Path(os.path.abspath(os.path.expanduser(folder)))


class ExperimentConfig(Section):
    """One experiment: a trial class and how to train it."""

    ignored: ClassVar[Mapping[str, str]] = determined.IGNORED

    name: Annotated[str, Strict()] = Field(
        default="",
        title="Name",
        description="Run names and checkpoints begin with it. Default: the code folder's name.",
    )
    description: str = Field(default="", title="Description", description="For people to read.")
    labels: list[Text] = Field(default=[], title="Labels", description="For people to find it by.")
    entrypoint: Annotated[str, BeforeValidator(determined.entrypoint)] = Field(
        title="Entrypoint",
        description="The trial class, as module:Class.",
        examples=["model_def:MyTrial"],
        pattern=determined.ENTRYPOINT_PATTERN,
    )
    code: Annotated[Path, AfterValidator(_absolute)] = Field(
        default_factory=Path.cwd,
        title="Code folder",
        description="The folder that holds the entrypoint's module, on the machine that trains. "
        "Default: the folder of the experiment file, else the current one.",
    )
    hyperparameters: Annotated[dict[str, Any], BeforeValidator(determined.hyperparameters)] = Field(
        default={}, title="Hyperparameters", description="What the trial asks its context for."
    )
    data: PlainMapping = Field(
        default={}, title="Data", description="Where the trial's data is, in the trial's terms."
    )
    resources: ResourcesConfig = Field(default_factory=ResourcesConfig, title="Resources")
    searcher: SearcherConfig = Field(title="Searcher")
    scheduling_unit: Positive = Field(
        default=100,
        title="Scheduling unit",
        description="Batches in one train-workload: training metrics are reported as often.",
    )
    min_validation_period: Period = Field(
        default=None,
        title="Validation period",
        description="How often to validate, besides at the end.",
    )
    min_checkpoint_period: Period = Field(
        default=None,
        title="Checkpoint period",
        description="How often to save, besides at the end.",
    )
    perform_initial_validation: Flag = Field(
        default=False,
        title="Validate first",
        description="Whether to validate once before the first batch.",
    )
    checkpoint_policy: CheckpointPolicy = Field(
        default="best",
        title="Checkpoint policy",
        description="Which validations lead to a checkpoint: the best so far, all, or none.",
    )
    checkpoint_storage: StorageConfig = Field(
        default_factory=StorageConfig, title="Checkpoint storage"
    )
    checkpointing: CheckpointingConfig = Field(
        default_factory=CheckpointingConfig, title="Checkpointing"
    )
    reproducibility: ReproducibilityConfig = Field(
        default_factory=ReproducibilityConfig, title="Reproducibility"
    )
    max_restarts: Count = Field(
        default=5,
        title="Restarts",
        description="How often to start again from the last checkpoint when a rank fails.",
    )
    stopping: StoppingConfig = Field(default_factory=StoppingConfig, title="Stopping")
    retraining: RetrainingConfig | None = Field(
        default=None,
        title="Retraining",
        description="How the flow `retrain` keeps a model of this experiment up to date.",
    )
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig, title="Environment")

    @classmethod
    def prepared(cls, data: Any) -> dict[str, Any]:
        """Fills in the names, and an empty searcher so that what is missing in it is named."""
        given = super().prepared(data)
        given.setdefault("searcher", {})
        if given.get("name") in (None, ""):
            code = given.get("code")
            folder = _absolute(code if isinstance(code, (str, Path)) else ".")
            given["name"] = folder.name or "experiment"
        retraining = given.get("retraining")
        if isinstance(retraining, Mapping) and retraining.get("model") in (None, ""):
            given["retraining"] = {**retraining, "model": slug(str(given["name"]))}
        return given

    @classmethod
    def hint(cls, unknown: str) -> str:
        """Also knows the fields of the sections, for one that was written a level too high."""
        for name, field in cls.model_fields.items():
            kinds = (field.annotation, *get_args(field.annotation))  # a section, or one or None
            if any(unknown in getattr(kind, "model_fields", {}) for kind in kinds):
                return f'; did you mean "{name}.{unknown}"?'
        return super().hint(unknown)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], source: str = "") -> Self:
        """The experiment that a mapping describes.

        Args:
            source: where the mapping came from; every line of an error begins with it.

        Raises:
            ConfigError: everything that is wrong, one line each.
        """
        try:
            return cls.model_validate(mapping)
        except ValidationError as error:
            before = f"{source}: " if source else ""
            raise ConfigError("\n".join(before + line for line in error_lines(error))) from None

    def schedule(self) -> Schedule:
        """When a run of this experiment reports, validates, saves and ends."""
        return Schedule(
            max_length=self.searcher.max_length,
            reporting_period=Batch(self.scheduling_unit),
            validation_period=self.min_validation_period,
            checkpoint_period=self.min_checkpoint_period,
            checkpoint_policy=self.checkpoint_policy,
            smaller_is_better=self.searcher.smaller_is_better,
            step_zero_validation=self.perform_initial_validation,
        )

    def retention(self) -> RetentionPolicy | None:
        """Which of this experiment's checkpoints stay; None: all."""
        searcher = self.searcher
        return self.checkpoint_storage.retention(searcher.metric, searcher.smaller_is_better)

    def effective_retraining(self) -> RetrainingConfig:
        """How it is retrained: by its section `retraining`, else by that one's defaults."""
        section = self.retraining or RetrainingConfig()
        return section if section.model else section.model_copy(update={"model": slug(self.name)})

    def digest(self) -> str:
        """``sha256:…`` of what is trained and how.

        Where the code and the checkpoints lie, how these are taken, when a run stops by itself,
        when and against what it is retrained, and what the ranks' environment holds are left out,
        and with them every credential: the same experiment has the same digest on every machine.
        """
        content = self.model_dump(mode="json", exclude=_NOT_WHAT_IS_TRAINED)
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Reads an experiment file.

    A `code` folder is seen from the file's own folder, and is that folder unless given. Folders in
    `checkpoint_storage` are seen from the current one.

    Args:
        overrides: ``"a.b.c=value"``, applied in turn before anything is checked; values are YAML.

    Raises:
        ConfigError: everything that is wrong, one line each.
    """
    path = Path(path)
    mapping = override(read_mapping(path), overrides)
    code = mapping.get("code")
    if code is None or isinstance(code, str):
        mapping["code"] = str(path.absolute().parent / os.path.expanduser(code or "."))
    config = ExperimentConfig.from_mapping(mapping, source=str(path))
    if not config.code.is_dir():
        raise ConfigError(f"{path}: code: no such folder: {config.code}")
    return config
