"""`trialflow config`: checks an experiment and prints it, or the code that its checkpoints get."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from trial_core.common.text_format import size
from trialflow.deployments.cli import console
from trialflow.deployments.cli.experiment_options import (
    DEFAULT_EXPERIMENT,
    UNCHANGED,
    Changes,
    Experiment,
    open_store_of,
    read_any_experiment,
)
from trialflow.deployments.cli.json_output import AsJson, print_json

if TYPE_CHECKING:
    from trial_core.config import ExperimentConfig


def config(
    config: Experiment = DEFAULT_EXPERIMENT,
    /,
    *,
    changes: Changes = UNCHANGED,
    code: bool = False,
    json_: AsJson = False,
) -> None:
    """Check an experiment and print it as JSON parameters for a deployment.

    For example: prefect deployment run train/train --params "$(trialflow config experiment.yaml)".
    The output includes any credentials in the experiment. With --json it also names its schema, and
    is no parameters.

    Args:
        code: Print which files of the code folder checkpoints and other machines get, and which not
            and why, in place of the experiment.
    """
    experiment = read_any_experiment(config, changes)
    if code:
        _print_code(experiment, json_)
        return
    parameters = {"config": experiment.model_dump(mode="json")}
    if json_:
        print_json("config", parameters)
    else:
        print(json.dumps(parameters, indent=2))


def _print_code(experiment: ExperimentConfig, as_json: bool) -> None:
    """Print the packed files of the code folder, with sizes, then the files that are left out."""
    from trial_core.checkpoint.transfer.trial_code import entrypoint_left_out, packed_code

    packed = packed_code(experiment, open_store_of(experiment))
    problems = [packed.problem, entrypoint_left_out(experiment, packed)]
    if as_json:
        left_out = [{"path": each.path, "why": each.why} for each in packed.left_out]
        found = {"files": packed.files, "left_out": left_out, "problems": [*filter(None, problems)]}
        print_json("config", found)
        return
    print(packed.summary(experiment.code))
    for name, size_bytes in packed.files.items():
        print(f"{size(size_bytes):>10}  {name}")
    if packed.left_out:
        print("left out:")
    for each in packed.left_out:
        print(f"  {each}")
    for problem in problems:
        if problem is not None:
            console.warning(problem)
