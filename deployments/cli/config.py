"""`trialflow config`: checks an experiment and prints it."""

from __future__ import annotations

import json

from trialflow.deployments.cli.experiment_options import (
    DEFAULT_EXPERIMENT,
    Experiment,
    Overrides,
    Storage,
    read_experiment,
)


def config(
    config: Experiment = DEFAULT_EXPERIMENT,
    /,
    *,
    set_: Overrides = None,
    storage: Storage = None,
) -> int:
    """Check an experiment and print it as JSON parameters for a deployment.

    For example: prefect deployment run train/train --params "$(trialflow config experiment.yaml)".
    The output includes any credentials in the experiment.
    """
    experiment = read_experiment(config, set_ or [], storage)
    print(json.dumps({"config": experiment.model_dump(mode="json")}, indent=2))
    return 0
