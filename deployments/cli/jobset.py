"""`trialflow jobset`: prints the file that starts a run on several Kubernetes nodes, a JobSet.

One pod has the driver, with `trialflow train --engine join`, and each node's pod runs `trialflow
join`. The file is written from ``kubernetes/jobset.yaml.j2``.
"""

from __future__ import annotations

import math
import re
from importlib.resources import files
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from trial_core.errors import ConfigError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.experiment_options import (
    DEFAULT_EXPERIMENT,
    Experiment,
    read_experiment,
)
from trialflow.deployments.cli.json_output import AsJson, print_json

if TYPE_CHECKING:
    from trial_core.config import ExperimentConfig

DEFAULT_IMAGE = "trialflow:latest"
FINAL_EXIT_CODES = [console.FAILED, console.REFUSED, console.BUG, console.INTERRUPTED]
"""With these codes the driver has ended for good. With others it was evicted, killed or lost."""
MIN_POD_GRACE_SECONDS = 60
END_SECONDS = 30
"""The time that a driver needs to begin and to end, besides `stopping.grace_seconds`."""
MAX_NAME_CHARACTERS = 36
"""Kubernetes and JobSet append up to 27 to it, and a pod's name has at most 63."""


def jobset(
    config: Experiment = DEFAULT_EXPERIMENT,
    /,
    *,
    nodes: Annotated[int, Parameter(validator=Number(gte=1))],
    image: str = DEFAULT_IMAGE,
    json_: AsJson = False,
) -> None:
    """Print a JobSet that trains an experiment on Kubernetes nodes, for `kubectl create -f -`.

    Its pods read the experiment under its path here, in the image's working folder. Changes nothing
    on a server.

    Args:
        nodes: How many nodes train.
        image: The image of all pods.
    """
    import yaml

    experiment = read_experiment(config)
    if experiment.checkpoint_storage.url.startswith("file://"):
        console.warning(
            f"checkpoint_storage is {experiment.checkpoint_storage.url}: all pods must see it. "
            "Mount it in both pod templates, or use an object storage"
        )
    text = render_jobset(experiment, config, nodes, image)
    if json_:
        print_json("jobset", {"jobset": yaml.safe_load(text)})
    else:
        print(text, end="")


def render_jobset(experiment: ExperimentConfig, path: PurePath, nodes: int, image: str) -> str:
    """The JobSet of a run, as YAML.

    Args:
        path: the experiment's file in the image, relative to the image's working folder.
        nodes: how many pods train.

    Raises:
        ConfigError: the experiment's slots cannot be divided among the nodes.
    """
    from jinja2 import Environment, StrictUndefined

    source = (files("trialflow.deployments") / "kubernetes" / "jobset.yaml.j2").read_text("utf-8")
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    grace = math.ceil(experiment.stopping.grace_seconds) + END_SECONDS
    return environment.from_string(source).render(
        experiment=path.as_posix(),
        name=jobset_name(experiment.name),
        nodes=nodes,
        slots=slots_of_a_node(experiment, nodes),
        image=image,
        on_cpu=experiment.resources.accelerator == "cpu",
        grace_seconds=max(MIN_POD_GRACE_SECONDS, grace),
        final_exit_codes=FINAL_EXIT_CODES,
    )


def slots_of_a_node(experiment: ExperimentConfig, nodes: int) -> int:
    """How many ranks, and GPUs, each pod has.

    Raises:
        ConfigError: the nodes have too few slots, or the experiment does not say how many it needs.
    """
    needed, each = experiment.resources.max_slots, experiment.resources.slots_per_node
    if not isinstance(needed, int):
        raise ConfigError(
            "resources.slots_per_trial: auto counts the accelerators of one machine; for "
            f"--nodes {nodes}, say how many slots the run needs on all nodes"
        )
    if not isinstance(each, int):
        if needed % nodes:
            raise ConfigError(
                f"{needed} slots (resources.slots_per_trial) cannot be divided equally among "
                f"--nodes {nodes}: change one of them, or set resources.slots_per_node"
            )
        return needed // nodes
    if each * nodes < needed:
        raise ConfigError(
            f"--nodes {nodes} with {each} slots each (resources.slots_per_node) have fewer than "
            f"the {needed} slots of resources.slots_per_trial: give more nodes"
        )
    return each


def jobset_name(experiment: str) -> str:
    """An experiment's name as the beginning of a Kubernetes name: ``GPT (small)`` is gpt-small."""
    name = re.sub(r"[^a-z0-9]+", "-", experiment.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}".rstrip("-")
    return name[:MAX_NAME_CHARACTERS].rstrip("-")
