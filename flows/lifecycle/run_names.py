"""Names of flow runs, by which people tell the runs of one experiment apart."""

from __future__ import annotations

from typing import Any

from prefect import runtime

from trial_core.config import ExperimentConfig
from trial_core.processes.machine.run_dirs import trial_id
from trialflow.flows.lifecycle.parent_runs import identity_of_run


def train_name() -> str:
    """The trial's id: ``mine-4f0c21aa93b7``."""
    return str(runtime.flow_run.parameters.get("trial") or _of_trial())


def evaluate_name() -> str:
    """``mine-evaluation-4f0c21aa93b7``, like the run's folder."""
    given = _given()
    config = getattr(given, "config", given)  # a result holds its experiment
    name = given.trial if config is None else config.name  # without one, the flow will refuse it
    return trial_id(f"{name} evaluation", str(runtime.flow_run.id))


def retrain_name() -> str:
    """``retrain mine-4f0c21aa93b7``, with the id of the challenger's trial."""
    return f"retrain {_of_trial()}"


def search_name() -> str:
    """The search's id: ``mine-search-4f0c21aa93b7``."""
    config: ExperimentConfig = _given()
    named = runtime.flow_run.parameters.get("search")
    return str(named or trial_id(f"{config.name} search", identity_of_run(config)))


def _of_trial() -> str:
    config: ExperimentConfig = _given()
    return trial_id(config.name, identity_of_run(config))


def _given() -> Any:
    """The parameter `config`."""
    return runtime.flow_run.parameters["config"]
