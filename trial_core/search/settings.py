"""The experiment of a search: an `ExperimentConfig` whose hyperparameters have ranges."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from random import Random
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from typing_extensions import Self

from trial_core.config import ExperimentConfig, SearcherConfig
from trial_core.config.determined import IGNORED_SEARCHER
from trial_core.config.error_text import (
    error_lines,
    format_value,
    validation_error,
    warn,
    warn_ignored,
)
from trial_core.config.search_ranges import check, grid, sample
from trial_core.config.values import Count, Flag, Positive, Text
from trial_core.errors import ConfigError, SearchError
from trial_core.observe.trackers.tracker import WITH_GROUPS
from trial_core.search.plan import MAX_TRIALS, BracketPlan, Mode, adaptive_asha, asha, extended

Name = Literal["random", "grid", "asha", "adaptive_asha", "pasha", "custom"]
NAMES = get_args(Name)
MAX_RUNGS = 32
MAY_CHANGE = ("max_trials", "max_length", "max_concurrent_trials", "max_failed_trials")
"""What a search that continues may have other values of."""

_USED_BY: Mapping[str, Sequence[str]] = {
    "bracket_rungs": ("adaptive_asha",),
    "divisor": ("asha", "adaptive_asha", "pasha", "custom"),
    "max_concurrent_trials": NAMES,
    "max_rungs": ("adaptive_asha",),
    "max_trials": NAMES,
    "mode": ("adaptive_asha",),
    "num_rungs": ("asha", "pasha", "custom"),
    "sampler_options": ("custom",),
    "stop_once": ("asha", "adaptive_asha", "custom"),
}
_OF_SEVERAL_RUNGS = ("divisor", "stop_once")
_REPLACED_BY_BRACKET_RUNGS = ("max_rungs", "mode")


def _name(value: Any) -> Any:
    if value not in NAMES:
        raise validation_error(
            f"expected one of {', '.join(NAMES)}, got {format_value(value)}; one trial is trained "
            "by `trialflow train`"
        )
    return value


def _at_most(most: int) -> AfterValidator:
    def check(value: int) -> int:
        if value > most:
            raise validation_error(f"expected at most {most}, got {value}")
        return value

    return AfterValidator(check)


def _divisor(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 1 < value < 1e6:
        return value
    raise validation_error(f"expected a number greater than 1, got {format_value(value)}")


_Recorded = TypeVar("_Recorded", bound=BaseModel)
Rungs = Annotated[Positive, _at_most(MAX_RUNGS)]


class SearchSettings(SearcherConfig):
    """Which trials a search trains, how far, and which metric compares them."""

    ignored: ClassVar[Mapping[str, str]] = {
        name: why for name, why in IGNORED_SEARCHER.items() if name not in _USED_BY
    }

    name: Annotated[Name, BeforeValidator(_name)] = Field(  # type: ignore[assignment]
        title="Searcher",
        description="random, grid: every trial is trained to its end. asha, adaptive_asha, pasha: "
        "the better trials are trained further. custom: `sampler` chooses the hyperparameters.",
    )
    max_trials: Annotated[Positive, _at_most(MAX_TRIALS)] | None = Field(
        default=None,
        title="Trials",
        description="How many trials the search begins. All but grid need it.",
    )
    max_concurrent_trials: Count = Field(
        default=16,
        title="Trials side by side",
        description="The most trials that are due at a time. 0: with one rung all; with more, as "
        "many as bring about one trial to the last rung; when a search continues, as many as "
        "before. Trials are trained side by side as far as there are slots.",
    )
    divisor: Annotated[float, BeforeValidator(_divisor)] = Field(
        default=4.0,
        description="Of the trials at a rung, one in so many continues, so many times as far.",
    )
    num_rungs: Rungs | None = Field(
        default=None,
        title="Rungs",
        description="asha, pasha, custom: the number of rungs. Default: 5; of custom 1.",
    )
    max_rungs: Rungs = Field(
        default=5, title="Most rungs", description="adaptive_asha: the most rungs of a bracket."
    )
    mode: Mode = Field(
        default="standard",
        description="adaptive_asha: how early trials are stopped. aggressive: one bracket with all "
        "rungs; standard: half as many brackets as rungs; conservative: as many.",
    )
    bracket_rungs: list[Rungs] = Field(
        default=[],
        title="Rungs of the brackets",
        description="adaptive_asha: the number of rungs of each bracket, in place of the mode.",
    )
    stop_once: Flag = Field(
        default=False,
        title="Stop once",
        description="asha, adaptive_asha, custom: whether a trial continues at once or never. By "
        "default it waits at its rung, and continues when later results allow it.",
    )
    max_failed_trials: Count = Field(
        default=5,
        title="Failed trials",
        description="The search ends as failed when more trials than this have failed.",
    )
    sampler: Text | None = Field(
        default=None,
        description="custom: a class, as module:Class, which chooses the hyperparameters: one of "
        "Optuna's samplers, or one with ask and tell.",
        examples=["optuna.samplers:TPESampler"],
    )
    sampler_options: dict[str, Any] = Field(
        default={}, title="Sampler's options", description="Keyword arguments of the sampler."
    )

    @model_validator(mode="after")
    def _check_fields_of_searcher(self) -> Self:
        if self.max_trials is None and self.name != "grid":
            raise validation_error(
                f"missing; {self.name} needs the number of trials, such as 16", "max_trials"
            )
        if (self.sampler is None) == (self.name == "custom"):
            problem = (
                "missing; custom needs one, such as optuna.samplers:TPESampler"
                if self.sampler is None
                else f"has no effect with {self.name}; set name: custom"
            )
            raise validation_error(problem, "sampler")
        if not isinstance(self.max_length.value, int):
            raise validation_error("expected {batches: n} or {epochs: n}", "max_length")
        self._drop_what_has_no_effect()
        first = self.divisor ** (self.rung_count - 1)
        if first > self.max_length.value:
            warn(
                f"searcher.num_rungs: {self.rung_count} rungs with divisor {self.divisor:g} need a "
                f"max_length of {math.ceil(first)} {self.max_length.unit}; with "
                f"{self.max_length.value}, several rungs are at 1"
            )
        return self

    def _drop_what_has_no_effect(self) -> None:
        """Warns of settings that the searcher does not use. They get their defaults, as if they had
        not been given: so there is no second warning when the settings are sent."""
        has_one_rung = self.name != "adaptive_asha" and self.rung_count == 1
        for field, names in _USED_BY.items():
            default = type(self).model_fields[field].get_default()
            if getattr(self, field) == default:
                continue
            if self.name not in names:
                where = f"{self.name}, only with {', '.join(names)}"
            elif has_one_rung and field in _OF_SEVERAL_RUNGS:
                where = f"{self.name} and one rung"
            elif self.bracket_rungs and field in _REPLACED_BY_BRACKET_RUNGS:
                where = f"{self.name} and bracket_rungs"
            else:
                continue
            warn_ignored(f"searcher.{field}: ignored: it has no effect with {where}")
            self.__dict__[field] = default  # the model is frozen

    @property
    def rung_count(self) -> int:
        """Rungs of a search with one bracket; 1 if every trial is trained to its end."""
        if self.name in ("asha", "pasha"):
            return self.num_rungs or 5
        return self.num_rungs or 1 if self.name == "custom" else 1

    @property
    def length(self) -> int:
        """Of a whole training, in its `unit`."""
        return int(self.max_length.value)  # type: ignore[arg-type]

    @property
    def unit(self) -> str:
        """Of lengths: ``batches`` or ``epochs``."""
        return str(self.max_length.unit)

    def plan(self, grid_points: int = 0) -> list[BracketPlan]:
        """The brackets of the search. `grid_points`: how many points the grid has."""
        length, trials = self.length, self.max_trials or grid_points
        if self.name == "grid":
            trials = min(trials, grid_points)
        concurrent = self.max_concurrent_trials
        if self.name == "adaptive_asha":
            return adaptive_asha(
                self.max_rungs, self.divisor, length, trials, concurrent, self.mode,
                self.bracket_rungs,
            )  # fmt: skip
        if self.rung_count == 1:
            concurrent = concurrent or trials
        return [asha(self.rung_count, self.divisor, length, trials, concurrent)]


class SearchExperiment(ExperimentConfig):
    """One experiment whose hyperparameters are searched for."""

    searcher: SearchSettings = Field(title="Searcher")

    @model_validator(mode="after")
    def _draw_from_search_ranges(self) -> Self:
        """Keeps the ranges, and refuses those of which nothing can be drawn."""
        has_range = check(self.hyperparameters, needs_counts=self.searcher.name == "grid")
        if not has_range:
            raise validation_error(
                "there is nothing to search for: no hyperparameter has a range, such as {type: "
                "log, minval: -4, maxval: -1}; one trial is trained by `trialflow train` with "
                "searcher.name: single", "hyperparameters",
            )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _keep_what_waits(self) -> Self:
        """Keeps each trial's latest checkpoint, from which it may continue."""
        storage = self.checkpoint_storage
        if storage.save_trial_latest == 0:
            warn(
                "checkpoint_storage.save_trial_latest: 0 is taken as 1, because a trial that waits "
                "continues from its latest checkpoint"
            )
            kept = storage.model_copy(update={"save_trial_latest": 1})
            self.__dict__["checkpoint_storage"] = kept  # the model is frozen
        return self

    def plan(self, began: Mapping[str, Any] | None = None) -> list[BracketPlan]:
        """The brackets of the search, as it begins; of one that continues, `began` is the section
        `searcher` with which it began."""
        settings = self.searcher if began is None else as_recorded(SearchSettings, began)
        return settings.plan(len(self.points))

    def extended_plan(self, plans: Sequence[BracketPlan]) -> list[BracketPlan]:
        """The brackets of a search that has these, and continues with this experiment."""
        settings = self.searcher
        most = settings.max_trials or 0
        if settings.name == "grid":
            most = min(len(self.points), most or MAX_TRIALS)
        return extended(
            plans, settings.divisor, settings.length, most, settings.max_concurrent_trials
        )

    @cached_property
    def points(self) -> list[dict[str, Any]]:
        """The points of the grid, in the order in which they are tried; empty without a grid."""
        return grid(self.hyperparameters) if self.searcher.name == "grid" else []

    def sample(self, trial: int) -> dict[str, Any]:
        """The hyperparameters of a trial: of the grid, or drawn by the seed and its number."""
        if self.points:
            return self.points[trial]
        seed = self.reproducibility.experiment_seed
        return sample(self.hyperparameters, lambda place: Random(f"{seed} {trial} {place}"))

    def of_trial(self, hyperparameters: Mapping[str, Any], search: str) -> ExperimentConfig:
        """The experiment of one trial, as `train` takes it; ConfigError if its hyperparameters
        cannot be stored. Trackers show it below the search's id."""
        searcher = {name: getattr(self.searcher, name) for name in SearcherConfig.model_fields}
        fields = {name: getattr(self, name) for name in ExperimentConfig.model_fields}
        return ExperimentConfig.from_mapping(
            fields
            | {
                "hyperparameters": dict(hyperparameters),
                "searcher": searcher | {"name": "single"},
                "retraining": self.retraining
                and self.retraining.model_copy(update={"search": False}),
                "trackers": [
                    {name: {"group": search, **options} if name in WITH_GROUPS else options}
                    for each in self.trackers
                    for name, options in each.items()
                ],
            }
        )

    def check_continues(self, began: Mapping[str, Any], last: Mapping[str, Any]) -> None:
        """Check that a search may continue with this experiment. It began with `began`, and
        continued last with the section `searcher` that is `last`.

        Raises ConfigError if the data, or another field than those of `MAY_CHANGE`, has changed, or
        a maximum is smaller.
        """
        now = self.recorded()
        searcher, before = now.pop("searcher"), began["searcher"]
        changed = [
            f"searcher.{name}: was {format_value(before.get(name))}, is {format_value(value)}"
            for name, value in searcher.items()
            if name not in MAY_CHANGE and before.get(name) != value
        ]
        changed += [f"{name}: has changed" for name in now if began[name] not in (None, now[name])]
        if changed:
            raise ConfigError(
                "a search continues with the same settings, except for "
                f"{', '.join(f'searcher.{name}' for name in MAY_CHANGE)}; begin a new one without "
                "--resume, or restore: " + "; ".join(changed)
            )
        for name in ("max_trials", "max_length"):
            old, new = last.get(name), searcher.get(name)
            is_other_unit = name == "max_length" and [*(new or ())] != [*(old or ())]
            if _number(new) < _number(old) or is_other_unit:
                raise ConfigError(
                    f"searcher.{name}: a search continues with the same value or a greater one: it "
                    f"was {format_value(old)}, is {format_value(new)}"
                )

    def recorded(self) -> dict[str, Any]:
        """What the log has of the experiment, as plain data: no credentials."""
        plain = self.model_dump(mode="json", include={"searcher", "hyperparameters", "data"})
        return {
            **plain, "experiment": self.name, "seed": self.reproducibility.experiment_seed,
        }  # fmt: skip


def _either(value: Any, validate: ValidatorFunctionWrapHandler) -> ExperimentConfig:
    if isinstance(value, SearchExperiment) or (isinstance(value, Mapping) and searches(value)):
        return SearchExperiment.model_validate(value)
    experiment: ExperimentConfig = validate(value)
    return experiment


class EitherSchema(ExperimentConfig):
    """The JSON schema of `EitherExperiment`: a server names a wrong field, not the experiment."""

    searcher: SearcherConfig | SearchSettings


EitherExperiment = Annotated[
    ExperimentConfig, WrapValidator(_either, json_schema_input_type=EitherSchema)
]
"""An experiment that trains one trial, or one that searches: its searcher tells which."""


def check_retraining(experiment: ExperimentConfig, source: str = "") -> None:
    """Refuse an experiment with a searcher of several trials that does not ask to be retrained by a
    search: ConfigError, which begins with `source`, its file."""
    section = experiment.retraining
    if isinstance(experiment, SearchExperiment) and not (section and section.search):
        raise ConfigError(
            f"{source}{': ' if source else ''}searcher.name: a retraining trains one trial "
            f"(single), got {format_value(experiment.searcher.name)}; to retrain by a search, set "
            "retraining.search: true; to search once, use `trialflow search`"
        )


def searches(experiment: Mapping[str, Any]) -> bool:
    """Return whether an experiment, as plain data, names a searcher of several trials."""
    searcher = experiment.get("searcher")
    return isinstance(searcher, Mapping) and searcher.get("name") in NAMES


def as_recorded(
    kind: type[_Recorded], fields: Mapping[str, Any], what: str = "the search"
) -> _Recorded:
    """Settings of a log, of which the driver that wrote them has warned; SearchError if they were
    altered."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return kind.model_validate(dict(fields))
    except ValidationError as error:
        lines = "; ".join(error_lines(error))
        raise SearchError(f"the settings of {what} cannot be read: {lines}") from None


def _number(value: Any) -> int:
    """A maximum: a number of trials, or a length; a grid's may be None."""
    if isinstance(value, Mapping):
        return int(next(iter(value.values())))
    return MAX_TRIALS if value is None else int(value)
