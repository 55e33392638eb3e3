"""A sampler that the user names, which chooses the hyperparameters of a search's trials."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Protocol

from trial_core.errors import ConfigError
from trial_core.search.settings import SearchExperiment
from trial_core.search.state import SearchTrial


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
            trial=trial.number, hyperparameters=dict(trial.hyperparameters),
            rung=len(trial.reached) - (not has_failed),
            metric=None if has_failed else trial.reached[-1].metric,
        )  # fmt: skip


def sampler_of(experiment: SearchExperiment) -> Sampler | None:
    """The sampler that a search names; None if its ranges, or the points of its grid, decide.

    Raises:
        ConfigError: the class that it names cannot be imported or created, or is no sampler.
    """
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
