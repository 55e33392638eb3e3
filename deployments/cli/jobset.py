"""`trialflow jobset`: prints the file that starts a run on several Kubernetes nodes."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from trialflow.deployments.cli import console
from trialflow.deployments.cli.experiment_options import (
    DEFAULT_EXPERIMENT,
    Experiment,
    read_experiment,
)

DEFAULT_IMAGE = "trialflow:latest"


def jobset(
    config: Experiment = DEFAULT_EXPERIMENT,
    /,
    *,
    nodes: Annotated[int, Parameter(help="How many nodes train.", validator=Number(gte=1))],
    image: Annotated[str, Parameter(help="The image of all pods.")] = DEFAULT_IMAGE,
) -> int:
    """Print a JobSet that trains an experiment on Kubernetes nodes, for `kubectl create -f -`.

    Its pods read the experiment under its path here, in the image's working folder. Changes nothing
    on a server.
    """
    from trialflow.deployments.kubernetes_run import render_jobset

    experiment = read_experiment(config, [])
    if experiment.checkpoint_storage.url.startswith("file://"):
        console.warning(
            f"checkpoint_storage is {experiment.checkpoint_storage.url}: all pods must see it. "
            "Mount it in both pod templates, or use an object storage"
        )
    print(render_jobset(experiment, config, nodes, image), end="")
    return 0
