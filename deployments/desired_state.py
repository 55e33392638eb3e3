"""The deployments and work pools that a Prefect server should have, read from
`prefect.yaml` and `work_pools/`. `trialflow.deployments.resources` brings them to a server.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Literal

import yaml

from trial_core.errors import ConfigError

RETRAIN_ENTRYPOINT = "trialflow.flows.retrain.retrain"
PoolType = Literal["process", "docker", "kubernetes"]

# Prefect refuses these characters in names.
BANNED_IN_NAMES = "/%&<>"


@dataclass(frozen=True)
class DesiredDeployment:
    """A deployment as ``prefect.yaml`` describes it.

    Attributes:
        entrypoint: module and function of its flow.
        parameters: default parameters of a new deployment; people may change them later.
        from_file: parameters from the user's file, set at each deployment.
        environment: environment variables of its runs.
    """

    name: str
    entrypoint: str
    description: str
    tags: list[str] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    from_file: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DeploymentTarget:
    """Where the runs of a deployment execute.

    Attributes:
        pool: the work pool that runs them.
        directory: their working folder, or None for the pool's default.
        keeps_pool, keeps_directory: True if an existing deployment keeps its own.
    """

    pool: str
    directory: str | None
    keeps_pool: bool = False
    keeps_directory: bool = False


def check_pool_name(name: str) -> None:
    """Refuse with ConfigError a name that Prefect does not accept for a work pool."""
    if not name.strip() or set(name) & set(BANNED_IN_NAMES):
        raise ConfigError(
            f"--pool {name!r} is not a valid work pool name: it must not be empty or contain any "
            f"of {' '.join(BANNED_IN_NAMES)}"
        )


def job_template(pool_type: PoolType) -> dict[str, Any]:
    """The base job template of our work pools of a type."""
    file = files("trialflow.deployments") / "work_pools" / f"{pool_type}.json"
    template: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return template


def deployments() -> list[DesiredDeployment]:
    """The deployments in our ``prefect.yaml``."""
    described = yaml.safe_load((files("trialflow.deployments") / "prefect.yaml").read_text("utf-8"))
    return [
        DesiredDeployment(
            name=each["name"],
            entrypoint=each["entrypoint"],
            description=each["description"],
            tags=each["tags"],
            parameters=each.get("parameters", {}),
            environment=each["work_pool"]["job_variables"]["env"],
        )
        for each in described["deployments"]
    ]


def base_deployment(model: str) -> DesiredDeployment:
    """The deployment of a model's retraining, without the experiment."""
    (general,) = (each for each in deployments() if each.entrypoint == RETRAIN_ENTRYPOINT)
    return DesiredDeployment(
        name=model,
        entrypoint=RETRAIN_ENTRYPOINT,
        description=f"Retrains the model {model} and promotes a better version.",
        tags=general.tags,
        environment=general.environment,
    )
