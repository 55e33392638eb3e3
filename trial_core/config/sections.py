"""The sections of the experiment file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from trial_core.checkpoint.layout import is_name, is_uuid
from trial_core.checkpoint.storage.credentials import without_credentials
from trial_core.config import determined
from trial_core.config.error_text import format_value, validation_error, warn
from trial_core.config.lengths import LengthField, Period
from trial_core.config.retraining_section import function_name
from trial_core.config.section_base import Section
from trial_core.config.values import MAX_SECONDS, Count, Flag, Positive, Seconds, Seed, Text


def _single(value: Any) -> Any:
    if value != "single":
        raise validation_error(
            f'expected "single" (a run trains one trial), got {format_value(value)}; to train '
            "several trials, use `trialflow search`; with single, one value is drawn from each "
            "search range"
        )
    return value


def _uuid(value: str) -> str:
    if not is_uuid(value):
        raise validation_error(
            "expected a checkpoint's uuid or its beginning (letters, digits and dashes), got "
            f"{format_value(value)}"
        )
    return value


def _source(value: str) -> str:
    if "://" not in value:
        return os.path.abspath(os.path.expanduser(value))
    if (shown := without_credentials(value)) != value:
        raise validation_error(
            f"{shown} must have no password and no signature, because experiments are stored and "
            "shown; give credentials in checkpoint_storage, or in the environment"
        )
    return value


def _trial_id(value: Any) -> Any:
    is_number = type(value) is int and value >= 0
    if not is_number and not (isinstance(value, str) and is_name(value)):
        raise validation_error(
            'expected a trial\'s id, such as "gpt-00000000002a", or its number, got '
            f"{format_value(value)}"
        )
    return value


MIN_IDLE_TIMEOUT_SECONDS = 1800.0
_MAX_MEMORY_GIB = 2.0**20  # 1 PiB
GREATER_IS_BETTER = re.compile(
    r"(?<![a-z])(acc|accuracy|auc|f1|precision|recall|bleu|rouge|reward)(?![a-z])", re.IGNORECASE
)
"""Metrics of which the greatest value is usually the best."""


class SearcherConfig(Section):
    """How long to train, and which metric decides which checkpoint is best."""

    yaml_path: ClassVar[str] = "searcher"
    ignored: ClassVar[Mapping[str, str]] = determined.IGNORED_SEARCHER

    max_length: LengthField = Field(
        title="Length of training",
        description="Training ends exactly after so many batches, or so many epochs.",
        examples=[{"batches": 1000}],
    )
    metric: Text = Field(
        description="The validation metric that decides which checkpoint is best.",
        examples=["validation_loss"],
    )
    smaller_is_better: Flag = Field(
        default=True,
        title="Smaller is better",
        description="Whether a smaller value of the metric is better.",
    )
    name: Annotated[Literal["single"], BeforeValidator(_single)] = Field(
        default="single", title="Searcher", description="Always single: one trial per run."
    )
    source_checkpoint_uuid: Annotated[Text, AfterValidator(_uuid)] | None = Field(
        default=None,
        title="Source checkpoint",
        description="UUID, or its beginning, of the checkpoint whose weights and optimizer state a "
        "new trial starts with, at batch 0. It must be in the same storage.",
    )
    source_trial_id: Annotated[int | str, BeforeValidator(_trial_id)] | None = Field(
        default=None,
        title="Source trial",
        description="Instead of the source checkpoint: the trial whose newest intact checkpoint "
        "that is. Its id, or the number that context.get_trial_id() returns in it.",
    )
    source_checkpoint: Annotated[Text, AfterValidator(_source)] | None = Field(
        default=None,
        title="Source of another program",
        description="Instead of the source checkpoint: the path or URL of a checkpoint that "
        "another program has written: a folder of DeepSpeed's save_checkpoint, a folder of Hugging "
        "Face's save_pretrained, or a file with a state_dict.",
    )
    source_weights_only: Flag = Field(
        default=False,
        title="Source: weights only",
        description="Whether to load only the models' weights from the source checkpoint.",
    )

    @classmethod
    def prepare(cls, data: Any) -> dict[str, Any]:
        """Refuses `source_weights_only` without a source; warns of a doubtful direction."""
        given = super().prepare(determined.with_max_length(data))
        metric = given.get("metric")
        if (
            isinstance(metric, str)
            and "smaller_is_better" not in given
            and GREATER_IS_BETTER.search(metric)
        ):
            warn(
                f"searcher.smaller_is_better is not set, so the smallest {metric} counts as the "
                "best; set it to false if greater is better, else to true"
            )
        names = ("source_checkpoint_uuid", "source_checkpoint", "source_trial_id")
        sources = [name for name in names if given.get(name) is not None]
        if given.get("source_weights_only") is True and not sources:
            raise validation_error(
                "has no effect without source_checkpoint_uuid; name the checkpoint",
                "source_weights_only",
            )
        if len(sources) > 1:
            raise validation_error(
                f"{sources[0]} is given as well; remove one of them", sources[-1]
            )
        return given


class ReproducibilityConfig(Section):
    """Settings that make a run repeatable."""

    yaml_path: ClassVar[str] = "reproducibility"

    experiment_seed: Seed = Field(
        default=0,
        title="Seed",
        description="Seeds Python, NumPy, torch and the order of the training data.",
    )
    compare_data: Flag = Field(
        default=True,
        title="Compare data",
        description="Whether a warning tells that ranks, or a checkpoint and the run that resumes "
        "it, have other data: lists of names, labels and indices in their datasets are compared.",
    )


class OptimizationsConfig(Section):
    """How a `PyTorchTrial` combines gradients and metrics. A DeepSpeedTrial has its own config."""

    yaml_path: ClassVar[str] = "optimizations"
    ignored: ClassVar[Mapping[str, str]] = determined.IGNORED_OPTIMIZATIONS

    aggregation_frequency: Positive = Field(
        default=1,
        title="Aggregation frequency",
        description="Optimizers step once in so many batches, with the gradients of all of them.",
    )
    average_aggregated_gradients: Flag = Field(
        default=True,
        title="Average aggregated gradients",
        description="Whether added-up gradients are divided by the number of batches.",
    )
    average_training_metrics: Flag = Field(
        default=True,
        title="Average training metrics",
        description="Whether training metrics are averaged over ranks; if not, rank 0's count.",
    )
    gradient_compression: Flag = Field(
        default=False,
        title="Gradient compression",
        description="Whether ranks send gradients to each other as float16.",
    )
    sharding: Literal["none", "fsdp2"] = Field(
        default="none",
        description='"none": every rank has the whole models. "fsdp2": models and optimizer state '
        "are divided among the ranks.",
    )


class ProfilingConfig(Section):
    """Profiles some batches on rank 0; torch's trace is stored with the files for TensorBoard."""

    yaml_path: ClassVar[str] = "profiling"
    ignored: ClassVar[Mapping[str, str]] = determined.IGNORED_PROFILING

    enabled: Flag = Field(
        default=False, title="Profile", description="Whether batches are profiled."
    )
    begin_on_batch: Count = Field(
        default=0, title="First batch", description="Index of the first batch to profile."
    )
    end_after_batch: Count | None = Field(
        default=None,
        title="Last batch",
        description="Index of the last batch to profile. Default: five batches are profiled.",
    )

    @classmethod
    def prepare(cls, data: Any) -> dict[str, Any]:
        """Refuses a last batch before the first one."""
        given = super().prepare(data)
        first, last = given.get("begin_on_batch", 0), given.get("end_after_batch")
        if type(first) is int and type(last) is int and last < first:
            raise validation_error(
                f"expected at least begin_on_batch, {first}, got {last}", "end_after_batch"
            )
        return given


class EnvironmentConfig(Section):
    """The environment of the rank processes."""

    yaml_path: ClassVar[str] = "environment"
    ignored: ClassVar[Mapping[str, str]] = determined.IGNORED_ENVIRONMENT
    holds_secrets: ClassVar[bool] = True

    environment_variables: Annotated[
        dict[str, str], BeforeValidator(determined.environment_variables)
    ] = Field(
        default={},
        title="Environment variables",
        description="Set in every rank process; they override inherited ones.",
    )
    code: Literal["folder", "from_checkpoint", "shared"] = Field(
        default="folder",
        description='Where the trial\'s code comes from. "folder": the code folder; other machines '
        'get a copy. "shared": the code folder, which all machines see under the same path. '
        '"from_checkpoint": what the checkpoint that the run continues, starts from or evaluates '
        "was saved with; the machine needs no code folder. That code is executed.",
    )

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """Names without values: some are credentials."""
        return [("environment_variables", dict.fromkeys(self.environment_variables, "***"))]


class CostConfig(Section):
    """What a run's slots cost."""

    yaml_path: ClassVar[str] = "cost"

    per_slot_hour: float | None = Field(
        default=None,
        ge=0,
        le=1e9,
        allow_inf_nan=False,
        title="Price of a slot",
        description="Price of one slot for an hour, in any currency. The ledger of time then tells "
        "what the trial has cost.",
    )


class CheckpointingConfig(Section):
    """How checkpoints are saved and read."""

    yaml_path: ClassVar[str] = "checkpointing"

    memory_gib_per_rank: float | None = Field(
        default=None,
        ge=0,
        le=_MAX_MEMORY_GIB,
        allow_inf_nan=False,
        title="Memory for snapshots",
        description="GiB of host memory per rank for a snapshot that is being uploaded. Files that "
        "do not fit are staged on local disk; with 0, all files are. Default: the ranks of a "
        "machine share half of the memory that is free at their first snapshot; each takes what it "
        "needs.",
    )
    snapshot: Literal["lazy", "eager"] | None = Field(
        default=None,
        title="When weights are copied",
        description="When a save copies weights and optimizer state. lazy: while the next batch "
        "computes, until its optimizer steps; only for trials that change weights by torch's "
        "optimizers alone, which the first save finds out. eager: before training continues. "
        "Default: lazy on CPU ranks; eager on accelerators, where lazy was not tried yet.",
    )
    when_busy: Literal["wait", "postpone"] = Field(
        default="wait",
        title="While an upload is running",
        description="What happens when the next checkpoint is due. wait: training waits for the "
        "upload. postpone: training continues, and the checkpoint is saved as soon as the upload "
        "has ended. Only periodic checkpoints are postponed: the best and the last always wait.",
    )
    exclude_frozen_parameters: Flag = Field(
        default=False,
        title="Leave out frozen parameters",
        description="Whether checkpoints omit frozen weights that are as the trial has built them; "
        "a resumed run builds them again. Only for trials that do not override save.",
    )
    verify_first: Flag | None = Field(
        default=None,
        title="Verify the first checkpoint",
        description="Whether the ranks load the first checkpoint of a run as soon as it is staged, "
        "so that one that cannot be restored ends the run at once. null: if it is small (256 MiB a "
        "rank at most), and the trial does not override load. Not done by ranks on several "
        "machines, nor with a callback that has on_checkpoint_save_start or _load_start.",
    )
    stall_timeout_seconds: Seconds | None = Field(
        # A disk with much cached data may need minutes to write it, and shows no progress then.
        default=900.0,
        title="Stall timeout of transfers",
        description="Seconds without a byte moved after which a rank's upload or fetch counts as "
        "hung. It is killed and retried like a failed transfer. null: no limit.",
    )
    trusted: Flag = Field(
        default=False,
        title="Trusted checkpoints",
        description="Whether reading a checkpoint may create objects of any class, which can run "
        "code. By default only tensors, plain data and a few known classes are read.",
    )


class StoppingConfig(Section):
    """When a run stops by itself, and how long it may take."""

    yaml_path: ClassVar[str] = "stopping"

    grace_seconds: float = Field(
        default=25.0,
        ge=0,
        le=MAX_SECONDS,
        allow_inf_nan=False,
        title="Grace period",
        description="Seconds that a run may take to save after Cancel, SIGTERM or Ctrl-C; then its "
        "ranks are killed. Prefect's workers kill after 30.",
    )
    time_budget_seconds: Seconds | None = Field(
        default=None,
        title="Time budget",
        description="Seconds after which a run saves and ends; resume it later. Default: no limit.",
    )
    stall_timeout_seconds: Seconds | None = Field(
        default=1800.0,
        title="Stall timeout",
        description="Seconds without a trained or validated batch after which the ranks count as "
        "hung: their stacks are logged, and they are restarted. Stages without batches (building, "
        "fetching, saving, callbacks) count as hung after as long, and at least half an hour, "
        "without a write to a log or disk. An evaluate_full_dataset counts as one batch. null: no "
        "limit.",
    )

    fail_on_non_finite_loss: Flag = Field(
        default=True,
        title="Fail if the loss is not finite",
        description="Whether a run ends as failed whose training loss is NaN or infinite in all "
        "batches of a train-workload, and in at least 5. From the first such batch on, no "
        "checkpoint is stored, so that the last one is from before it. false: such a run trains "
        "on. Metrics that are not finite are warned of in any case.",
    )

    server_outage_seconds: Seconds | None = Field(
        default=3600.0,
        title="Server outage",
        description="Seconds without an answer of the Prefect server after which a run saves and "
        "ends. Until then it trains, and reports later what it could not report. null: no limit.",
    )

    @property
    def idle_timeout_seconds(self) -> float | None:
        """How long ranks may write nothing in a stage without batches; None for no limit. At least
        half an hour: the timeout is chosen by the length of a batch, which says nothing about a
        build that downloads, or a callback."""
        stall = self.stall_timeout_seconds
        return None if stall is None else max(stall, MIN_IDLE_TIMEOUT_SECONDS)


After = Literal["validate", "checkpoint-upload", "training"]


class StageConfig(Section):
    """A stage of the user's own."""

    yaml_path: ClassVar[str] = "stages"

    run: Annotated[str, BeforeValidator(function_name)] = Field(
        title="Function",
        description="A function of the code folder, or a Prefect task, as module:function. It is "
        "called in a process of its own, with the run's result so far.",
        examples=["samples:write"],
    )
    after: After = Field(
        description="After each validation, after each commit of a checkpoint, or once at the end "
        "of training.",
        examples=["validate"],
    )
    every: Period = Field(
        default=None,
        description="How often, of those occasions: the first one after each so many batches or "
        "epochs. Default: at all of them.",
    )
    blocking: Flag = Field(
        default=False,
        description="Whether training waits for it. If not, it runs beside training.",
    )
    metrics: list[Text] = Field(
        default=[],
        description="Names of numbers that it returns. If training waits for it after a "
        "validation, they are validation metrics, of which searcher.metric may be one.",
    )
    on_failure: Literal["warn", "fail"] = Field(
        default="warn",
        title="If it fails",
        description="Whether its failure is a warning, or ends the run, which saves first.",
    )
    retries: Count = Field(default=0, description="How often to call it again.")
    retry_delay_seconds: Seconds = Field(
        default=10.0, title="Pause", description="Seconds before it is called again."
    )
    timeout_seconds: Seconds | None = Field(
        default=600.0,
        title="Timeout",
        description="A call that takes longer is killed and counts as failed. Null: no limit.",
    )

    @classmethod
    def prepare(cls, data: Any) -> dict[str, Any]:
        """Refuses a period for an event that happens once."""
        given = super().prepare(data)
        if given.get("after") == "training" and given.get("every") is not None:
            raise validation_error("has no effect with after: training, which is once", "every")
        return given

    @property
    def gives_validation_metrics(self) -> bool:
        """True if its result is reported with the validation's metrics."""
        return self.after == "validate" and self.blocking
