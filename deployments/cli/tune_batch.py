"""`trialflow tune-batch`: finds the largest micro-batch of a DeepSpeedTrial that fits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from trial_core.common.text_format import plural
from trial_core.errors import ConfigError
from trialflow.deployments.cli.experiment_options import (
    DEFAULT_EXPERIMENT,
    UNCHANGED_RUN,
    Experiment,
    RunChanges,
    open_store_of,
    read_experiment,
    refuse_what_cannot_run,
)
from trialflow.deployments.cli.flow_run import FlowRun
from trialflow.deployments.cli.json_output import AsJson, print_json
from trialflow.deployments.cli.run_display import display_for_stdout
from trialflow.deployments.cli.train import tried

if TYPE_CHECKING:
    from trial_core.driver.states import Ended


def tune_batch(
    config: Experiment = DEFAULT_EXPERIMENT,
    /,
    *,
    changes: RunChanges = UNCHANGED_RUN,
    json_: AsJson = False,
) -> int:
    """Find the largest micro-batch of a DeepSpeedTrial that fits into memory.

    Tries the trial as `trialflow train --test` does, first with one micro-batch a batch, then with
    smaller ones, until none runs out of memory. The batch itself stays the same. Keeps nothing.
    """
    experiment = read_experiment(config, changes)
    if experiment.is_script:
        raise ConfigError(
            f"the script {experiment.entrypoint} builds its engines itself: name its trial's class "
            "as entrypoint (module:Class)"
        )
    refuse_what_cannot_run(experiment, open_store_of(experiment))
    shrinking = experiment.resources.model_copy(update={"shrink_micro_batches": True})
    experiment = experiment.model_copy(update={"resources": shrinking})
    display = display_for_stdout(json_, (experiment.searcher.metric, "loss"))
    run: FlowRun[Ended] = FlowRun(display, experiment)
    exit_code = run.run(lambda _: tried(experiment, display, 0), has_server=False)
    if run.result is None:
        return exit_code
    topology = run.result.launch.answers.topology
    if topology is None or not topology.micro_batch_samples:
        raise ConfigError(f"{experiment.entrypoint} is no DeepSpeedTrial, so it has no micro-batch")
    batch, micro = topology.batch_samples, topology.micro_batch_samples
    ranks = topology.data_parallel_size
    config_keys = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro}
    if json_:
        print_json("tune-batch", {**config_keys, "data_parallel_ranks": ranks})
    else:
        print(
            f"the largest micro-batch that fits has {plural(micro, 'sample')}, a batch of a rank "
            f"{plural(batch // (micro * ranks), 'micro-batch')}. In DeepSpeed's config: "
            f"{json.dumps(config_keys)[1:-1]}"
        )
    return exit_code
