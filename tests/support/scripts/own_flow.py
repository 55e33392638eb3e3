"""Flows of a user's that train, for a worker."""

from __future__ import annotations

from typing import Any

from prefect import flow, task

from trialflow import ExperimentConfig, train


@flow
def own(config: dict[str, Any], trial: str | None = None) -> None:
    """Call the flow `train`."""
    train(ExperimentConfig.from_mapping(config), trial=trial)


@task
def train_one(config: dict[str, Any], trial: str | None) -> None:
    """Call it in a task's thread."""
    train(ExperimentConfig.from_mapping(config), trial=trial)


@flow
def in_tasks(config: dict[str, Any], trial: str | None = None) -> None:
    """Call it in a task that runs beside the flow."""
    train_one.submit(config, trial).result()
