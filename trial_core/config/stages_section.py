"""The list `stages`: functions of the user's that a run calls after its own stages."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from trial_core.config.error_text import validation_error
from trial_core.config.lengths import Period
from trial_core.config.retraining_section import function_name
from trial_core.config.section_base import Section
from trial_core.config.values import Count, Flag, Seconds, Text

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
