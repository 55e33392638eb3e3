"""Optuna's samplers, and a search as an Optuna study. Pruning is never decided here."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from random import Random
from typing import Any, Literal

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import GridSampler, QMCSampler
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError

from trial_core.common.text_format import is_number
from trial_core.config.error_text import Location, format_path
from trial_core.config.search_ranges import is_search_range, ranges_of
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
    The seed and a trial's number decide, if the sampler takes a seed. A `GridSampler` or
    `QMCSampler` has one sequence, by one seed: it is asked again for the trials that a search has,
    when the search continues. Another sampler that has a state besides the trials, such as
    `CmaEsSampler`, begins again.
    """

    def __init__(self, experiment: SearchExperiment, sampler: optuna.samplers.BaseSampler) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._experiment = experiment
        options = experiment.searcher.sampler_options
        takes_seed = "seed" in inspect.signature(type(sampler)).parameters
        self._has_sequence = isinstance(sampler, (GridSampler, QMCSampler))
        if self._has_sequence and takes_seed:
            seed = experiment.reproducibility.experiment_seed
            sampler = type(sampler)(**{"seed": seed} | options)
        self._most: float = math.inf
        if isinstance(sampler, GridSampler) and "search_space" in options:
            # Else points would be given again while the last ones are being trained.
            self._most = math.prod(map(len, options["search_space"].values()))
        self._study = optuna.create_study(sampler=sampler, direction=_direction(experiment))
        self._has_more = True
        self._study.stop = self._stop  # type: ignore[method-assign]
        self._trials: dict[int, Trial] = {}
        self._kind = type(sampler) if takes_seed and not self._has_sequence else None
        distributions(experiment)

    def _stop(self) -> None:
        """In place of `Study.stop`, by which `GridSampler` and `BruteForceSampler` say that they
        have tried everything; Optuna's raises outside of its own loop."""
        self._has_more = False

    def ask(self, number: int) -> dict[str, Any] | None:
        """The hyperparameters of a trial; None if the sampler has tried everything."""
        return self._asked(number) if self._has_more and number < self._most else None

    def _asked(self, number: int) -> dict[str, Any]:
        if self._kind is not None:
            options = self._experiment.searcher.sampler_options
            seed = options.get("seed", self._experiment.reproducibility.experiment_seed)
            seed = Random(f"{seed} {number}").getrandbits(32)
            self._study.sampler = self._kind(**options | {"seed": seed})
        trial = self._trials[number] = self._study.ask()
        found: dict[str, Any] = _suggested(trial, self._experiment.hyperparameters, ())
        return found

    def tell(self, trial: SearchTrial) -> None:
        """See `Sampler`. A trial that fails after a result is told of no more."""
        if trial.number not in self._trials:
            if not self._has_sequence:
                params = params_of(self._experiment, trial.hyperparameters)
                self._study.enqueue_trial({name: value for name, (_, value) in params.items()})
            self._asked(trial.number)
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
            running = TrialState.RUNNING if trial.status == "due" else TrialState.PRUNED
            study.add_trial(frozen(experiment, trial, running))
    except optuna.exceptions.DuplicatedStudyError:
        raise SearchError(
            f"there is an Optuna study {name!r} in that database; choose another name or database, "
            "or delete it"
        ) from None
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError, ImportError) as error:
        raise SearchError(f"no Optuna study can be stored: {error}") from error


def frozen(experiment: SearchExperiment, trial: SearchTrial, unfinished: TrialState) -> FrozenTrial:
    """A trial as Optuna has it; in the state `unfinished` if it was not trained to `max_length`,
    and has not failed."""
    values = {each.length: each.metric for each in trial.reached if each.metric is not None}
    last = trial.reached[-1] if trial.reached else None
    state = unfinished
    if last is not None and last.length >= experiment.searcher.length:
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
    """The distributions of all ranges, by place; those within choices, too. ConfigError if Optuna
    does not take a range."""
    found: dict[str, Distribution] = {}

    def note(value: Any, start: Location) -> None:
        for path, each in ranges_of(value, start):
            found[format_path(path)] = distribution(each, format_path(path))
            note(each.get("vals"), path)

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
    """The parameters that give these hyperparameters; ValueError if the ranges do not give them."""
    params = _params_of(experiment.hyperparameters, hyperparameters, ())
    if params is None:
        raise ValueError(f"the ranges do not give {dict(hyperparameters)}")
    return params


def _params_of(ranges: Any, value: Any, path: Location) -> Params | None:
    """The parameters with which ranges give a value; None if they do not."""
    if is_search_range(ranges):
        name = format_path(path)
        kind = distribution(ranges, name)
        if not isinstance(kind, CategoricalDistribution):
            is_of_type = is_number(value) and (isinstance(value, int) or ranges["type"] != "int")
            return {name: (kind, value)} if is_of_type and kind.low <= value <= kind.high else None
        for index, choice in enumerate(ranges["vals"]):
            inner = _params_of(choice, value, (*path, index))
            if inner is not None:
                return inner | {name: (kind, str(index))}
        return None
    if not isinstance(ranges, (Mapping, list)):
        return {} if type(ranges) is type(value) and ranges == value else None
    if isinstance(ranges, list):
        ranges = dict(enumerate(ranges))
        value = dict(enumerate(value)) if isinstance(value, list) else None
    if not isinstance(value, Mapping) or ranges.keys() != value.keys():
        return None
    params: Params = {}
    for key, each in ranges.items():
        if (inner := _params_of(each, value[key], (*path, key))) is None:
            return None
        params |= inner
    return params


def _suggested(trial: Trial, ranges: Any, path: Location) -> Any:
    if isinstance(ranges, list):
        return [_suggested(trial, each, (*path, i)) for i, each in enumerate(ranges)]
    if not isinstance(ranges, Mapping):
        return ranges
    if not is_search_range(ranges):
        return {key: _suggested(trial, each, (*path, key)) for key, each in ranges.items()}
    name = format_path(path)
    kind = distribution(ranges, name)
    if isinstance(kind, CategoricalDistribution):
        index = int(str(trial.suggest_categorical(name, kind.choices)))
        return _suggested(trial, ranges["vals"][index], (*path, index))
    if isinstance(kind, IntDistribution):
        return trial.suggest_int(name, kind.low, kind.high)
    return trial.suggest_float(name, kind.low, kind.high, log=kind.log)


def _direction(experiment: SearchExperiment) -> Literal["minimize", "maximize"]:
    return "minimize" if experiment.searcher.smaller_is_better else "maximize"
