"""`ExperimentConfig`, the whole experiment, and `load_config`, which reads it from a file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    Strict,
    ValidationError,
    model_validator,
)
from typing_extensions import Self

from trial_core.checkpoint.retention_policy import RetentionPolicy
from trial_core.common.text_format import slug
from trial_core.config import determined
from trial_core.config.checkpoint_storage import StorageConfig
from trial_core.config.error_text import error_lines, format_value, validation_error, warn
from trial_core.config.lengths import OPEN_END, CheckpointPeriod, Period
from trial_core.config.resources_section import ResourcesConfig
from trial_core.config.retraining_section import RetrainingConfig
from trial_core.config.search_ranges import draw
from trial_core.config.section_base import Section
from trial_core.config.sections import (
    CheckpointingConfig,
    CostConfig,
    EnvironmentConfig,
    OptimizationsConfig,
    ProfilingConfig,
    ReproducibilityConfig,
    SearcherConfig,
    StageConfig,
    StoppingConfig,
)
from trial_core.config.tracker_list import tracker_list
from trial_core.config.values import MAX_COUNT, Count, Flag, PlainMapping, PositiveOrAuto, Text
from trial_core.config.yaml_file import (
    override,
    override_values,
    read_mapping,
    warn_of_new_hyperparameters,
)
from trial_core.errors import ConfigError
from trial_core.processes.machine.accelerators import CPU, KIND_VARIABLE
from trial_core.schedule.command import is_command
from trial_core.schedule.sequencer import CheckpointPolicy, Schedule
from trial_core.schedule.units import Batch

_NOT_IN_DIGEST: dict[str, Any] = {
    **dict.fromkeys(
        (
            "code", "checkpoint_storage", "checkpointing", "stopping", "retraining", "environment",
            "ignored_fields", "profiling", "tensorboard_logging", "cost", "stages", "trackers",
        ),
        True,
    ),
    "resources": {
        "preload", "engine", "slots_per_node", "network", "max_wait_seconds", "replace_seconds",
        "channel", "ray",
        "shrink_micro_batches", "peak_flops",
    },
    "reproducibility": {"compare_data"},
}  # fmt: skip


def _absolute(folder: str | Path) -> Path:
    # Not `Path.expanduser`, which raises if the user is unknown.
    return Path(os.path.abspath(os.path.expanduser(folder)))


def _default_model(experiment: str) -> str:
    """The model of an experiment that names none: the experiment's own name. ConfigError if it
    would be changed, because other names would become the same model."""
    stored = slug(experiment)
    if stored == experiment:
        return stored
    raise ConfigError(
        f"missing; the default is the experiment's name, but {format_value(experiment)} is not "
        f"made of up to 60 lower case letters, digits and single dashes; set model, for example to "
        f"{stored}"
    )


def _ignored_fields(section: type[Section], data: Any) -> dict[str, Any]:
    """The fields that `section` and the sections in it ignore, in their places.

    Except for sections that hold secrets, such as a registry's password.
    """
    if not isinstance(data, Mapping) or section.holds_secrets:
        return {}
    found = {name: value for name, value in data.items() if name in section.ignored}
    for name, field in section.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, Section):
            found[name] = _ignored_fields(annotation, data.get(name)) or None
    return {name: value for name, value in found.items() if value is not None}


def _warn_of_missing_units(given: Mapping[str, Any]) -> None:
    """Warn of each length and period that is a number: it might be meant in epochs.

    A Core API script counts its own steps, as in Determined.
    """
    searcher = given["searcher"]
    lengths = (
        {"searcher.max_length": searcher.get("max_length")} if isinstance(searcher, Mapping) else {}
    )
    lengths |= {
        name: given.get(name) for name in ("min_validation_period", "min_checkpoint_period")
    }
    for path, value in lengths.items():
        if type(value) is int and 0 < value <= MAX_COUNT:
            warn(
                f"{path}: {value} has no unit and counts batches; to say so, write "
                f"{{batches: {value}}}, or else {{epochs: {value}}}"
            )


class ExperimentConfig(Section):
    """One experiment: a trial class and how to train it."""

    ignored: ClassVar[Mapping[str, str]] = determined.IGNORED

    entrypoint: Annotated[str, BeforeValidator(determined.entrypoint)] = Field(
        description="The trial class, as module:Class; or the command of a script, with Trainer or "
        "the Core API: python train.py [arguments].",
        examples=["model_def:MyTrial"],
        pattern=determined.ENTRYPOINT_PATTERN,
    )
    code: Annotated[Path, AfterValidator(_absolute)] = Field(
        default_factory=Path.cwd,
        title="Code folder",
        description="The folder of the entrypoint's module, on the machine that trains. Default: "
        "the folder of the experiment file, else the current folder.",
    )
    hyperparameters: Annotated[dict[str, Any], BeforeValidator(determined.hyperparameters)] = Field(
        default={},
        description="The trial reads them from its context. Of a search range, as in Determined, "
        "it gets one value, which reproducibility.experiment_seed draws.",
    )
    data: PlainMapping = Field(
        default={},
        description="Where the trial's data is; the trial reads it from its context.",
    )
    searcher: SearcherConfig = Field(title="Length and metric")
    min_validation_period: Period = Field(
        default=None,
        title="Validation period",
        description="How often to validate, in addition to the end.",
    )
    min_checkpoint_period: CheckpointPeriod = Field(
        default=None,
        title="Checkpoint period",
        description='How often to save, in addition to the end. "continuous": the next checkpoint '
        "begins when the last one is stored; all but the two latest and those that are validated, "
        "or that a rule of checkpoint_storage keeps, are deleted.",
    )
    resources: ResourcesConfig = Field(default_factory=ResourcesConfig, title="Resources")
    checkpoint_storage: StorageConfig = Field(
        default_factory=StorageConfig, title="Checkpoint storage"
    )
    name: Annotated[str, Strict()] = Field(
        default="",
        description="Runs and checkpoints are named after it. Default: the code folder's name.",
    )
    description: str = Field(default="", description="Free text.")
    labels: list[Text] = Field(default=[], description="For finding runs.")
    max_restarts: Count = Field(
        default=5,
        title="Restarts",
        description="How many times to restart from the last checkpoint after a rank has failed.",
    )
    scheduling_unit: PositiveOrAuto = Field(
        default="auto",
        title="Scheduling unit",
        description="Batches in one train-workload; each one reports training metrics. "
        '"auto": by the length of training, so that a run has about 50 tasks at most, unless its '
        "periods ask for more; never more than 10 000 batches.",
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
    tensorboard_logging: Flag = Field(
        default=True,
        title="TensorBoard",
        description="Whether reported metrics are written for TensorBoard, if it is installed.",
    )
    trackers: Annotated[list[dict[str, dict[str, Any]]], BeforeValidator(tracker_list)] = Field(
        default=[],
        description="Programs that show what runs do: mlflow, wandb, tensorboard, trackio, or one "
        "of another package, each with its options. Keys and passwords come from the environment.",
        examples=[[{"mlflow": {"tracking_uri": "http://127.0.0.1:5000"}}]],
    )
    stages: list[StageConfig] = Field(
        default=[],
        title="Stages of your own",
        description="Functions that a run calls after its own stages.",
    )
    checkpointing: CheckpointingConfig = Field(
        default_factory=CheckpointingConfig, title="Checkpointing"
    )
    stopping: StoppingConfig = Field(default_factory=StoppingConfig, title="Stopping")
    optimizations: OptimizationsConfig = Field(
        default_factory=OptimizationsConfig, title="Optimizations"
    )
    reproducibility: ReproducibilityConfig = Field(
        default_factory=ReproducibilityConfig, title="Reproducibility"
    )
    profiling: ProfilingConfig = Field(default_factory=ProfilingConfig, title="Profiling")
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig, title="Environment")
    cost: CostConfig = Field(default_factory=CostConfig, title="Cost")
    retraining: RetrainingConfig | None = Field(
        default=None,
        title="Retraining",
        description="How the flow `retrain` keeps this experiment's model up to date.",
    )
    ignored_fields: PlainMapping = Field(
        default={},
        title="Ignored fields",
        description="Filled in: Determined's fields that have no effect. The trial finds them in "
        "their places in context.get_experiment_config().",
    )

    @classmethod
    def prepare(cls, data: Any) -> dict[str, Any]:
        """Fills in the names, and an empty searcher, so that its missing fields are reported.

        Keeps the ignored fields of the experiment and of its sections.
        """
        given = super().prepare(data)
        if ignored := _ignored_fields(cls, data):
            given.setdefault("ignored_fields", ignored)
        given.setdefault("searcher", {})
        searcher = given["searcher"]
        has_no_length = isinstance(searcher, Mapping) and searcher.get("max_length") is None
        if not determined.is_script(given.get("entrypoint")):
            _warn_of_missing_units(given)
        elif has_no_length:
            given["searcher"] = {**searcher, "max_length": OPEN_END}
        if given.get("name") in (None, ""):
            code = given.get("code")
            folder = _absolute(code if isinstance(code, (str, Path)) else ".")
            given["name"] = folder.name or "experiment"
        retraining = given.get("retraining")
        if isinstance(retraining, Mapping) and retraining.get("model") in (None, ""):
            try:
                model = _default_model(str(given["name"]))
            except ConfigError as error:
                raise validation_error(str(error), "retraining", "model") from None
            given["retraining"] = {**retraining, "model": model}
        return given

    @classmethod
    def hint(cls, unknown: str) -> str:
        """Also suggests a section's field that was written one level too high."""
        for name, field in cls.model_fields.items():
            # A section, or `section | None`.
            types = field.annotation, *get_args(field.annotation)
            if any(unknown in getattr(each, "model_fields", {}) for each in types):
                return f'; did you mean "{name}.{unknown}"?'
        return super().hint(unknown)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], source: str = "") -> Self:
        """The experiment in a mapping.

        Args:
            source: the mapping's origin; every line of an error begins with it.

        Raises:
            ConfigError: one line per mistake.
        """
        try:
            return cls.model_validate(mapping)
        except ValidationError as error:
            prefix = f"{source}: " if source else ""
            raise ConfigError("\n".join(prefix + line for line in error_lines(error))) from None

    @model_validator(mode="after")
    def _draw_from_search_ranges(self) -> Self:
        """Gives each hyperparameter one value. Needs the seed, so it comes after all fields."""
        drawn = draw(self.hyperparameters, self.reproducibility.experiment_seed)
        self.__dict__["hyperparameters"] = drawn  # the model is frozen
        return self

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        """Refuses stages that a script does not have, and a metric that comes too late."""
        for number, stage in enumerate(self.stages):
            if self.is_script and stage.after == "validate":
                raise validation_error(
                    "a script validates by itself; use checkpoint-upload or training",
                    "stages", number, "after",
                )  # fmt: skip
            if self.is_script and stage.every is not None and stage.every.unit == "epochs":
                raise validation_error(
                    "a script may have no epochs; give batches", "stages", number, "every"
                )
            if self.searcher.metric in stage.metrics and not stage.gives_validation_metrics:
                raise validation_error(
                    "searcher.metric is needed when a validation ends: set after: validate and "
                    "blocking: true", "stages", number, "metrics",
                )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _check_continuous(self) -> Self:
        """Refuses continuous checkpoints where they make no sense."""
        if not self.saves_continuously:
            return self
        if self.is_script:
            raise validation_error(
                "continuous needs a trial, as module:Class; a script says itself when it saves: "
                "remove it here", "min_checkpoint_period",
            )  # fmt: skip
        for number, stage in enumerate(self.stages):
            if stage.after == "checkpoint-upload" and stage.every is None:
                raise validation_error(
                    "with min_checkpoint_period: continuous there is a checkpoint every few "
                    "seconds; say how often to call the stage", "stages", number, "every",
                )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _check_retraining(self) -> Self:
        """Refuses a retraining by a search, if the experiment does not search."""
        if self.retraining is None or not self.retraining.search or self.searcher.name != "single":
            return self
        raise validation_error(
            "true retrains by a search, and searcher.name is single: name a searcher, such as "
            "asha, and give hyperparameters ranges; or remove it here, to train one trial",
            "retraining", "search",
        )  # fmt: skip

    @property
    def saves_continuously(self) -> bool:
        """True if the next checkpoint begins when the last one is stored."""
        return self.min_checkpoint_period == "continuous"

    @property
    def is_script(self) -> bool:
        """True if the ranks run a script: with `Trainer`, or a Core API script."""
        return is_command(self.entrypoint)

    def require_trial(self, flow: str) -> None:
        """Check that the experiment names a trial's class, which the flow `flow` needs.

        Raises:
            ConfigError: it names a script.
        """
        if self.is_script:
            raise ConfigError(
                f'entrypoint: the flow {flow} needs a trial, as module:Class; "{self.entrypoint}" '
                "is a script, which constructs its trial itself, or has none"
            )

    @property
    def rank_variables(self) -> dict[str, str]:
        """The environment variables that the experiment gives its ranks."""
        on_cpu = {KIND_VARIABLE: CPU} if self.resources.accelerator == CPU else {}
        return {**self.environment.environment_variables, **on_cpu}

    def schedule(self) -> Schedule:
        """When a run of this experiment reports, validates, saves and ends."""
        unit = self.scheduling_unit
        return Schedule(
            max_length=self.searcher.max_length,
            reporting_period=None if unit == "auto" else Batch(unit),
            validation_period=self.min_validation_period,
            checkpoint_period=self.min_checkpoint_period,
            checkpoint_policy=self.checkpoint_policy,
            smaller_is_better=self.searcher.smaller_is_better,
            step_zero_validation=self.perform_initial_validation,
        )

    def starting_from(
        self, *, uuid: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> Self:
        """This experiment, with a new trial that starts from a checkpoint.

        Args:
            uuid: a checkpoint of the same storage.
            path: instead, path or URL of another program's checkpoint.
            weights_only: True to load only the models' weights.

        Raises:
            ConfigError: `path` is a URL with a password or a signature.
        """
        source = {
            "source_checkpoint_uuid": uuid,
            "source_checkpoint": path,
            "source_trial_id": None,
            "source_weights_only": weights_only,
        }
        given = self.searcher.model_dump(mode="json") | source
        try:
            searcher = type(self.searcher).model_validate(given)
        except ValidationError as error:
            raise ConfigError(
                "\n".join(f"searcher.{each}" for each in error_lines(error))
            ) from None
        return self.model_copy(update={"searcher": searcher})

    def retention(self, has_metric: bool = True) -> RetentionPolicy | None:
        """The rules that keep its checkpoints; None keeps all.

        Args:
            has_metric: True if its runs report the searcher metric.
        """
        metric, smaller_is_better = self.searcher.metric, self.searcher.smaller_is_better
        return self.checkpoint_storage.retention(
            metric if has_metric else None, smaller_is_better, self.saves_continuously
        )

    def effective_retraining(self) -> RetrainingConfig:
        """The section `retraining`, or its defaults; the model's name is filled in.

        Raises:
            ConfigError: the section names no model, and the experiment's name cannot be one.
        """
        section = self.retraining or RetrainingConfig()
        if section.model:
            return section
        try:
            return section.model_copy(update={"model": _default_model(self.name)})
        except ConfigError as error:
            raise ConfigError(f"retraining.model: {error}") from None

    def digested(self) -> dict[str, Any]:
        """The fields that `digest` covers, as plain data. Holds no credentials of a section."""
        return self.model_dump(mode="json", exclude=_NOT_IN_DIGEST)

    def environment_digest(self, trial: str) -> str:
        """Digest of the ranks' environment variables, which may be credentials: it is slow to
        compute, and another one in each trial, so that values are hard to guess."""
        variables = self.environment.environment_variables
        return _slow_digest(json.dumps(variables, sort_keys=True), trial) if variables else "none"

    def digest(self) -> str:
        """``sha256:…`` of the fields that determine the training.

        The same experiment has the same digest on every machine: the code folder, storage,
        checkpointing, stopping, retraining and the ranks' environment are left out, and with them
        every credential.
        """
        content = self.digested()
        # As in releases that did not have these fields.
        for name in ("source_trial_id", "source_checkpoint"):
            if getattr(self.searcher, name) is None:
                del content["searcher"][name]
        if self.optimizations == OptimizationsConfig():
            del content["optimizations"]
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


@lru_cache(maxsize=8)
def _slow_digest(text: str, salt: str) -> str:
    return "pbkdf2:" + hashlib.pbkdf2_hmac("sha256", text.encode(), salt.encode(), 200_000).hex()


def _beside(path: Path, folder: str) -> str:
    """A folder relative to that of the experiment file."""
    try:
        return str(path.absolute().parent / os.path.expanduser(folder))
    except ValueError:  # a NUL character in a user's name
        raise ConfigError(f"{path}: code: no such folder: {format_value(folder)}") from None


E = TypeVar("E", bound=ExperimentConfig)


def load_config(
    path: str | os.PathLike[str],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    kind: type[E] = ExperimentConfig,  # type: ignore[assignment]
) -> E:
    """Read an experiment file.

    `code` is relative to the file's folder, and defaults to it. Folders in `checkpoint_storage` are
    relative to the current folder.

    Args:
        overrides: ``"a.b.c=value"``, applied in turn before validation; values are YAML. Or a
            mapping: ``{"a.b.c": value}``, whose values are taken as they are, not as YAML.
        kind: the class of the experiment: `SearchExperiment` for one that searches.

    Raises:
        ConfigError: one line per mistake.
    """
    path = Path(path)
    given = read_mapping(path)
    if isinstance(overrides, Mapping):
        mapping = override_values(given, overrides)
    else:
        mapping = override(given, overrides)
    warn_of_new_hyperparameters(given, overrides)
    code = mapping.get("code")
    if code is None or isinstance(code, (str, Path)):
        mapping["code"] = _beside(path, str(code or "."))
    config = kind.from_mapping(mapping, source=str(path))
    is_there = os.path.isdir(config.code)  # `Path.is_dir` raises if the name is too long
    if not is_there and config.environment.code != "from_checkpoint":
        raise ConfigError(f"{path}: code: no such folder: {config.code}")
    return config
