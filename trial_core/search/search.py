"""A search that a driver continues: what to train next, and the record of what came of it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol
from uuid import NAMESPACE_URL, uuid5

from trial_core.common.text_format import is_number, number, plural
from trial_core.config import ExperimentConfig
from trial_core.errors import ConfigError, SearchError
from trial_core.processes.machine.run_dirs import trial_id
from trial_core.schedule.units import Batch, Epoch, TrainUnit
from trial_core.search.halving import Action, Advance, Begin
from trial_core.search.log import (
    Begun,
    Changed,
    Exited,
    NoMore,
    Opened,
    RungReached,
    SearchEvent,
    SearchLog,
)
from trial_core.search.settings import SearchExperiment, SearchSettings, as_recorded
from trial_core.search.state import SearchState, SearchTrial, described, last_settings, opened


class Sampler(Protocol):
    """Chooses hyperparameters; asked and told by the search's driver alone."""

    def ask(self, number: int) -> dict[str, Any] | None:
        """The hyperparameters of trial `number`; None if there are no more at present."""

    def tell(self, trial: SearchTrial) -> None:
        """A trial has begun, has reached a rung, or has failed: called for each such record, in
        order. When a search continues, first for the records that there are."""


class _Asked:
    """A sampler of the user's own: ``ask() -> hyperparameters`` and ``tell(...)``."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def ask(self, number: int) -> dict[str, Any] | None:
        asked: dict[str, Any] | None = self._sampler.ask()
        return asked

    def tell(self, trial: SearchTrial) -> None:
        has_failed = trial.status in ("failed", "invalid")
        if not (trial.reached or has_failed):
            return  # it has begun
        self._sampler.tell(
            trial=trial.number, hyperparameters=deepcopy(dict(trial.hyperparameters)),
            rung=len(trial.reached) - (not has_failed),
            metric=None if has_failed else trial.reached[-1].metric,
        )  # fmt: skip


def sampler_of(experiment: SearchExperiment) -> Sampler | None:
    """The sampler that a search names; None if its ranges, or the points of its grid, decide.
    ConfigError if the class cannot be imported or created, or is no sampler."""
    settings = experiment.searcher
    if settings.sampler is None:
        return None
    name = settings.sampler
    module, _, attribute = name.partition(":")
    folder = str(experiment.code)
    sys.path.insert(0, folder)
    try:
        made = getattr(import_module(module), attribute)(**settings.sampler_options)
    except Exception as error:
        raise ConfigError(
            f"searcher.sampler: {name} cannot be used: {type(error).__name__}: {error}; expected "
            "module:Class, in the code folder or installed here, with options that it takes "
            "(optuna: pip install 'trialflow[search]')"
        ) from error
    finally:
        sys.path.remove(folder)
    if hasattr(made, "sample_independent"):
        from trial_core.search.optuna_sampler import OptunaSampler

        return OptunaSampler(experiment, made)
    if not (hasattr(made, "ask") and hasattr(made, "tell")):
        raise ConfigError(
            f"searcher.sampler: {name} has no ask and tell, and is none of Optuna's samplers"
        )
    return _Asked(made)


@dataclass(frozen=True)
class Leg:
    """A part of a trial's training: from where it is to a rung."""

    trial: SearchTrial
    config: ExperimentConfig  # the trial's experiment
    until: TrainUnit  # where it waits
    is_last: bool  # True if training ends there


class Search:
    """One search, in the driver that has it, which alone appends to its log (empty for a new one).

    It makes the sampler that the experiment asks for, unless it is given one.

    Raises ConfigError if the experiment is not the one that the search began with; SearchError if
    the log was altered, or the sampler cannot be used.
    """

    def __init__(
        self,
        experiment: SearchExperiment,
        log: SearchLog,
        search: str,
        sampler: Sampler | None = None,
    ) -> None:
        self.id = search
        self.experiment = experiment
        self._log = log
        settings = experiment.searcher
        recorded = experiment.recorded()
        self._sampler = sampler or sampler_of(experiment)
        if not log.events:
            log.append(Opened, **recorded)
        began = {name: getattr(opened(log.events), name) for name in recorded}
        began["searcher"], last = (
            as_recorded(SearchSettings, each).model_dump(mode="json")
            for each in (began["searcher"], last_settings(log.events))
        )
        experiment.check_continues(began, last)
        self.state = SearchState(
            experiment.plan(began["searcher"]), settings.name, settings.stop_once,
            settings.smaller_is_better,
        )  # fmt: skip
        self._follows: Sequence[Action] = ()
        self._take_new()
        if recorded["searcher"] != last:
            plans = experiment.extended_plan(self.state.plans)
            self._note(Changed, searcher=recorded["searcher"], plans=plans)

    @property
    def events(self) -> list[SearchEvent]:
        """Its records so far, in order."""
        return self._log.events

    def next(self, running: Collection[int]) -> Leg | None:
        """What to train next, besides the trials that are running; None if nothing is due.

        If no trial is running then, the search is over, also if a sampler has no more trials: that
        is recorded, and the sampler is asked again when the search continues.

        Raises:
            SearchError: the sampler fails.
            ConfigError: it gives hyperparameters that cannot be stored.
            Superseded: another driver has the search.
        """
        self._log.settle()
        self._take_new()
        has_more = True
        for work in self.state.work:
            if isinstance(work, Begin):
                if has_more and self._begin(work):
                    return self.next(running)
                has_more = False
            elif work.trial not in running:
                return self._leg(self.state.trials[work.trial])
        is_at_end = all(isinstance(work, Begin) for work in self.state.work)
        if not has_more and is_at_end and not self.state.has_no_more:
            self._note(NoMore)
        return None

    def reached(
        self, leg: Leg, batches: int, metrics: Mapping[str, Any], checkpoint: str | None
    ) -> None:
        """Record that a trial has been trained to its rung, with the metrics of its validation
        there. SearchError if they lack the searcher metric; Superseded if another driver has the
        search."""
        name = self.experiment.searcher.metric
        if not is_number(metrics.get(name)):
            raise SearchError(
                f'searcher.metric "{name}" is not among the validation metrics of trial '
                f"{leg.trial.number} ({leg.trial.id}): {', '.join(sorted(metrics)) or 'none'}"
            )
        value = float(metrics[name])
        self._note(
            RungReached, trial=leg.trial.number, length=int(leg.until.value),  # type: ignore[arg-type]
            batches=batches, metric=value if math.isfinite(value) else None, checkpoint=checkpoint,
        )  # fmt: skip

    def failed(self, leg: Leg, why: str, is_invalid: bool = False, is_counted: bool = True) -> None:
        """Record that a trial has failed, or has ended itself; see `Exited`.

        Raises:
            SearchError: more trials have failed than `max_failed_trials`, or more are invalid than
                the search has trials.
            Superseded: another driver has the search.
        """
        self._note(
            Exited, trial=leg.trial.number, why=why, is_invalid=is_invalid, is_counted=is_counted
        )
        most = self.experiment.searcher.max_failed_trials
        whole = sum(plan.max_trials for plan in self.state.plans)
        if self.state.invalid > whole + most:
            raise SearchError(
                f"{plural(self.state.invalid, 'trial')} of search {self.id} had invalid "
                f"hyperparameters, although it has only {plural(whole, 'trial')}; the last: {why}. "
                "Begin a search with other ranges"
            )
        if self.state.failed > most:
            raise SearchError(
                f"{plural(self.state.failed, 'trial')} of search {self.id} have failed, more than "
                f"searcher.max_failed_trials={most}; the last: {why}. Correct the cause and "
                "continue the search, or raise max_failed_trials"
            )

    def news(self, trial: SearchTrial) -> str:
        """What has just come of a trial, and the best so far, for people, on a line."""
        settings, state = self.experiment.searcher, self.state
        found = ""
        if trial.reached and trial.status not in ("failed", "invalid"):
            last = trial.reached[-1].metric
            found = f": {settings.metric} {'not finite' if last is None else number(last)}"
        parts = [f"trial {trial.number}{found}", described(state, trial, settings.unit)]
        others = [state.trials[each.trial] for each in self._follows if isinstance(each, Advance)]
        parts += [
            f"trial {other.number} {described(state, other, settings.unit)}"
            for other in others
            if other is not trial
        ]
        if state.best is not None:
            best, result = state.best
            parts.append(f"best: trial {best.number}, {number(result.metric)}")
        return " · ".join(parts)

    def _note(self, kind: Any, **fields: Any) -> None:
        self._log.append(kind, **fields)
        self._take_new()

    def _take_new(self) -> None:
        """Take the records that the state does not have yet, and tell the sampler, in order."""
        for event in self._log.events[self.state.applied :]:
            self._follows = self.state.apply(event)
            if isinstance(event, Begun) and event.id != self._id_of(event.trial):
                raise SearchError(
                    f"the log of search {self.id} was altered: its trial {event.trial} is "
                    f"{self._id_of(event.trial)}, not {event.id}; restore it from a backup"
                )
            if self._sampler and isinstance(event, (Begun, RungReached, Exited)):
                self._call(self._sampler.tell, self.state.trials[event.trial])

    def _begin(self, work: Begin) -> bool:
        """Begin a new trial; False if the sampler has no more hyperparameters now."""
        trial = len(self.state.trials)
        ask = self._sampler.ask if self._sampler else self.experiment.sample
        hyperparameters = self._call(ask, trial)
        if hyperparameters is None:
            return False
        if not isinstance(hyperparameters, dict):
            raise SearchError(
                f"the sampler {self.experiment.searcher.sampler} gave "
                f"{type(hyperparameters).__name__} for trial {trial}, expected a dict of "
                "hyperparameters, or None if there are no more"
            )
        # Plain data, which the sampler does not have: it may change what it gave.
        plain = self.experiment.of_trial(hyperparameters, self.id).hyperparameters
        self._note(
            Begun, trial=trial, id=self._id_of(trial), bracket=work.bracket, hyperparameters=plain
        )
        return True

    def _id_of(self, trial: int) -> str:
        """The id of a trial's runs: no storage may choose it, and so have another trial trained."""
        return trial_id(self.experiment.name, uuid5(NAMESPACE_URL, f"{self.id}/{trial}").hex)

    def _leg(self, trial: SearchTrial) -> Leg:
        unit = self.experiment.searcher.unit
        length = self.state.length_due(trial)
        is_last = trial.rung == len(self.state.rungs_of(trial)) - 1
        until: TrainUnit = (Batch if unit == "batches" else Epoch)(length)
        config = self.experiment.of_trial(trial.hyperparameters, self.id)
        return Leg(trial, config, until, is_last)

    def _call(self, method: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return method(argument)
        except ConfigError:
            raise
        except Exception as error:
            raise SearchError(
                f"the sampler {self.experiment.searcher.sampler} failed: {type(error).__name__}: "
                f"{error}"
            ) from error
