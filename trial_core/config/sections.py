"""The sections of the experiment file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from trial_core.config import determined
from trial_core.config.base import Section
from trial_core.config.error_text import refusal, shown
from trial_core.config.lengths import Length
from trial_core.config.values import Flag, Seed, Text


def _slots(value: Any) -> int | str:
    if value == "auto" or (type(value) is int and value > 0):
        return value  # type: ignore[no-any-return]  # just narrowed
    advice = "; a slot is a CPU process where there is no accelerator" if value == 0 else ""
    raise refusal(f'expected a positive integer or "auto", got {shown(value)}{advice}')


def _single(value: Any) -> Any:
    if value != "single":
        raise refusal(
            f'expected "single" (a run trains one trial), got {shown(value)}; '
            "give every hyperparameter one value"
        )
    return value


class ResourcesConfig(Section):
    """What a run trains on."""

    at: ClassVar[str] = "resources"
    ignored: ClassVar[Mapping[str, str]] = determined.IGNORED_RESOURCES

    slots_per_trial: Annotated[
        int | Literal["auto"],
        PlainValidator(_slots),
        WithJsonSchema(
            {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "const": "auto"}]}
        ),
    ] = Field(
        default=1,
        title="Slots per trial",
        description='Rank processes, each with one accelerator where there are some; "auto" is '
        "one for every accelerator of the machine.",
    )


class SearcherConfig(Section):
    """How long to train, and which metric says what is best."""

    at: ClassVar[str] = "searcher"
    ignored: ClassVar[Mapping[str, str]] = determined.IGNORED_SEARCHER
    refused: ClassVar[Mapping[str, str]] = determined.REFUSED_SEARCHER

    name: Annotated[Literal["single"], BeforeValidator(_single)] = Field(
        default="single", title="Searcher", description="Always single: one trial a run."
    )
    metric: Text = Field(
        title="Metric",
        description="The validation metric that says which checkpoint is best.",
        examples=["validation_loss"],
    )
    smaller_is_better: Flag = Field(
        default=True, title="Smaller is better", description="Which way the metric improves."
    )
    max_length: Length = Field(
        title="Length of training",
        description="Training ends exactly here.",
        examples=[{"batches": 1000}],
    )
    source_checkpoint_uuid: Text | None = Field(
        default=None,
        title="Source checkpoint",
        description="The checkpoint that a new trial starts from, at batch 0, with its weights and "
        "optimizer state: its uuid, or how that begins. It lies in the same storage.",
    )
    source_weights_only: Flag = Field(
        default=False,
        title="Source: weights only",
        description="Whether to take the models' weights alone from the source checkpoint.",
    )

    @classmethod
    def prepared(cls, data: Any) -> dict[str, Any]:
        """Refuses a way of starting from a checkpoint that is not named."""
        given = super().prepared(data)
        if given.get("source_weights_only") is True and "source_checkpoint_uuid" not in given:
            raise refusal(
                "has no effect without source_checkpoint_uuid; name the checkpoint",
                "source_weights_only",
            )
        return given


class ReproducibilityConfig(Section):
    """What makes a run repeatable."""

    at: ClassVar[str] = "reproducibility"

    experiment_seed: Seed = Field(
        default=0,
        title="Seed",
        description="Seeds Python, NumPy, torch and the order of the training data.",
    )


class EnvironmentConfig(Section):
    """What the rank processes find in their environment."""

    at: ClassVar[str] = "environment"
    ignored: ClassVar[Mapping[str, str]] = determined.IGNORED_ENVIRONMENT
    holds_secrets: ClassVar[bool] = True

    environment_variables: Annotated[
        dict[str, str], BeforeValidator(determined.environment_variables)
    ] = Field(
        default={},
        title="Environment variables",
        description="Set in every rank process, over those it inherits.",
    )

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """Names without values, of which some are credentials."""
        return [("environment_variables", dict.fromkeys(self.environment_variables, "***"))]
