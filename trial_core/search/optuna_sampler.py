"""Optuna's samplers, and a search as an Optuna study. Pruning is never decided here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Literal

import optuna
from optuna.distributions import (
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError

from trial_core.config.error_text import Location, format_path
from trial_core.config.search_ranges import is_search_range
from trial_core.errors import ConfigError, SearchError
from trial_core.search.settings import SearchExperiment
from trial_core.search.state import SearchState, SearchTrial

Distribution = CategoricalDistribution | FloatDistribution | IntDistribution
Params = dict[str, tuple[Distribution, Any]]
"""A trial's parameters for Optuna: by place, such as ``optimizer.lr``."""


class OptunaSampler:
    """Asks one of Optuna's samplers, by a study in memory that has the trials of the search.

    A trial that has reached its first rung is finished for Optuna: complete at `max_length`, else
    pruned. Each further rung that it reaches is another trial there, with the same parameters.
    The seed and a trial's number decide, if the sampler takes a seed. A sampler that has a state
    besides the trials, such as `QMCSampler`, begins again when a search continues.
    """

    def __init__(self, experiment: SearchExperiment, sampler: optuna.samplers.BaseSampler) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._experiment = experiment
        self._study = optuna.create_study(sampler=sampler, direction=_direction(experiment))
        self._trials: dict[int, Trial] = {}
        takes_seed = "seed" in inspect.signature(type(sampler)).parameters
        self._kind = type(sampler) if takes_seed else None
        distributions(experiment)

    def ask(self, number: int) -> dict[str, Any] | None:
        """The hyperparameters of a trial."""
        if self._kind is not None:
            options = self._experiment.searcher.sampler_options
            seed = options.get("seed", self._experiment.reproducibility.experiment_seed)
            seed = Random(f"{seed} {number}").getrandbits(32)
            self._study.sampler = self._kind(**options | {"seed": seed})
        trial = self._trials[number] = self._study.ask()

        def suggest(search_range: Mapping[str, Any], name: str) -> Any:
            return _suggest(trial, name, distribution(search_range, name))

        found: dict[str, Any] = _resolved(self._experiment.hyperparameters, (), suggest)
        return found

    def tell(self, trial: SearchTrial) -> None:
        """See `Sampler`. A trial that fails after a result is told of no more."""
        if trial.number not in self._trials:
            params = params_of(self._experiment, trial.hyperparameters)
            self._study.enqueue_trial({name: value for name, (_, value) in params.items()})
            self.ask(trial.number)
        has_failed = trial.status in ("failed", "invalid")
        if bool(trial.reached) == has_failed:  # it has begun, or is finished for Optuna
            return
        made = frozen(self._experiment, trial, TrialState.PRUNED)
        if len(trial.reached) > 1:
            self._study.add_trial(made)
            return
        for step, value in made.intermediate_values.items():
            self._trials[trial.number].report(value, step)
        final = made.value if made.state == TrialState.COMPLETE else None
        self._study.tell(self._trials[trial.number], final, made.state)


def store_study(
    experiment: SearchExperiment, state: SearchState, url: str, name: str | None = None
) -> None:
    """Store a search as an Optuna study, which Optuna's dashboard opens.

    A trial that was not trained to `max_length` is pruned there. A trial whose hyperparameters are
    not of the ranges has them as user attributes alone.

    Args:
        url: of a database, as SQLAlchemy has it: ``sqlite:///search.db``.
        name: the study's; by default that of the experiment.

    Raises:
        SearchError: the database has a study of that name, or cannot be used.
    """
    name = name or experiment.name
    try:
        study = optuna.create_study(storage=url, study_name=name, direction=_direction(experiment))
        for trial in state.trials:
            is_due = trial.status == "due"
            running = TrialState.RUNNING if is_due else TrialState.PRUNED
            study.add_trial(frozen(experiment, trial, running))
    except optuna.exceptions.DuplicatedStudyError:
        raise SearchError(
            f"there is an Optuna study {name!r} in that database; choose another name or database, "
            "or delete it"
        ) from None
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError, ImportError) as error:
        raise SearchError(f"no Optuna study can be stored: {error}") from error


def frozen(experiment: SearchExperiment, trial: SearchTrial, unfinished: TrialState) -> FrozenTrial:
    """A trial as Optuna has it.

    Args:
        unfinished: its state if it was not trained to `max_length`, and has not failed.
    """
    values = {each.length: each.metric for each in trial.reached if each.metric is not None}
    last = trial.reached[-1] if trial.reached else None
    state = unfinished
    if last is not None and last.length >= int(experiment.searcher.max_length.value):  # type: ignore[arg-type]
        state = TrialState.COMPLETE
    if trial.status in ("failed", "invalid") or (last is not None and last.metric is None):
        state = TrialState.FAIL
    try:
        params = params_of(experiment, trial.hyperparameters)
    except ValueError:
        params = {}
    return create_trial(
        state=state,
        value=last.metric if last and state in (TrialState.COMPLETE, TrialState.PRUNED) else None,
        params={name: value for name, (_, value) in params.items()},
        distributions={name: kind for name, (kind, _) in params.items()},
        intermediate_values=values,
        user_attrs={
            "trial": trial.id, "status": trial.status, "why": trial.why,
            "hyperparameters": dict(trial.hyperparameters),
        },
    )  # fmt: skip


def distributions(experiment: SearchExperiment) -> dict[str, Distribution]:
    """The distributions of all ranges, by place; those within choices, too.

    Raises:
        ConfigError: Optuna does not take a range.
    """
    found: dict[str, Distribution] = {}

    def note(value: Any, path: Location) -> None:
        if is_search_range(value):
            name = format_path(path)
            found[name] = distribution(value, name)
            value = value.get("vals", [])
        inner = value.items() if isinstance(value, Mapping) else ()
        for key, each in enumerate(value) if isinstance(value, list) else inner:
            note(each, (*path, key))

    note(experiment.hyperparameters, ())
    return found


def distribution(search_range: Mapping[str, Any], name: str) -> Distribution:
    """The distribution of a range. Of choices, it has their indices as text."""
    type_ = search_range["type"]
    try:
        if type_ == "categorical":
            return CategoricalDistribution([str(i) for i in range(len(search_range["vals"]))])
        lowest, highest = search_range["minval"], search_range["maxval"]
        if type_ == "int":
            return IntDistribution(lowest, highest)
        if type_ == "double":
            return FloatDistribution(lowest, highest)
        low, high = sorted(search_range.get("base", 10.0) ** end for end in (lowest, highest))
        return FloatDistribution(low, high, log=True)
    except (ValueError, ArithmeticError) as error:
        raise ConfigError(f"hyperparameters.{name}: not a range for Optuna: {error}") from None


def params_of(experiment: SearchExperiment, hyperparameters: Mapping[str, Any]) -> Params:
    """The parameters that give these hyperparameters.

    Raises:
        ValueError: the ranges do not give them.
    """
    params: Params = {}
    if not _is_given(experiment.hyperparameters, hyperparameters, (), params):
        raise ValueError(f"the ranges do not give {dict(hyperparameters)}")
    return params


def _is_given(ranges: Any, value: Any, path: Location, params: Params) -> bool:
    """Return whether ranges give a value, and note the parameters with which they do."""
    if is_search_range(ranges):
        name = format_path(path)
        kind = distribution(ranges, name)
        if not isinstance(kind, CategoricalDistribution):
            params[name] = (kind, value)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            is_whole = isinstance(value, int) or ranges["type"] != "int"
            return is_number and is_whole and kind.low <= value <= kind.high
        for index, choice in enumerate(ranges["vals"]):
            inner: Params = {}
            if _is_given(choice, value, (*path, index), inner):
                params.update(inner | {name: (kind, str(index))})
                return True
        return False
    if isinstance(ranges, Mapping):
        return (
            isinstance(value, Mapping)
            and ranges.keys() == value.keys()
            and all(_is_given(ranges[key], value[key], (*path, key), params) for key in ranges)
        )
    if isinstance(ranges, list):
        return (
            isinstance(value, list)
            and len(ranges) == len(value)
            and all(
                _is_given(r, v, (*path, i), params)
                for i, (r, v) in enumerate(zip(ranges, value, strict=True))
            )
        )
    return type(ranges) is type(value) and bool(ranges == value)


def _resolved(ranges: Any, path: Location, choose: Callable[[Mapping[str, Any], str], Any]) -> Any:
    if is_search_range(ranges):
        chosen = choose(ranges, format_path(path))
        if ranges["type"] != "categorical":
            return chosen
        return _resolved(ranges["vals"][int(chosen)], (*path, int(chosen)), choose)
    if isinstance(ranges, Mapping):
        return {key: _resolved(each, (*path, key), choose) for key, each in ranges.items()}
    if isinstance(ranges, list):
        return [_resolved(each, (*path, i), choose) for i, each in enumerate(ranges)]
    return ranges


def _suggest(trial: Trial, name: str, kind: Distribution) -> Any:
    if isinstance(kind, CategoricalDistribution):
        return trial.suggest_categorical(name, kind.choices)
    if isinstance(kind, IntDistribution):
        return trial.suggest_int(name, kind.low, kind.high)
    return trial.suggest_float(name, kind.low, kind.high, log=kind.log)


def _direction(experiment: SearchExperiment) -> Literal["minimize", "maximize"]:
    return "minimize" if experiment.searcher.smaller_is_better else "maximize"
