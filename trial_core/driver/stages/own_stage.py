"""A stage of the user's own: calls a function of the code folder in another process."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_core.config.sections import StageConfig
from trial_core.driver.run import Launch
from trial_core.driver.stages.declared_stage import OwnStageFailed, parallel_stage
from trial_core.processes.machine.function_process import call_function, log_lines

POLL_SECONDS = 0.2


@parallel_stage("own-stage", "{stage.run} @{argument[batches_trained]}")
def own_stage(launch: Launch, stage: StageConfig, argument: Mapping[str, Any]) -> Any:
    """Call the function, and again if it fails, as the experiment says. Return its result.

    A stop request, or the end of the ranks, kills it and ends the pause between two calls.
    Prefect's retries would not. Raises OwnStageFailed if it raised, took too long, or was killed.
    """
    for _ in range(stage.retries):
        try:
            return call(launch, stage, argument)
        except OwnStageFailed as failure:
            if _ends_during(launch, stage.retry_delay_seconds):
                raise
            launch.run.logger.warning("%s; it is called again", failure)
    return call(launch, stage, argument)


def _ends_during(launch: Launch, pause_seconds: float) -> bool:
    """Pause before another call. Return True if a stop forbids it."""
    end = time.monotonic() + pause_seconds
    while not is_ended(launch) and (left := end - time.monotonic()) > 0:
        launch.run.stopping.wait(min(left, POLL_SECONDS))
    return is_ended(launch)


def is_ended(launch: Launch) -> bool:
    """Return whether own stages are killed, and not called again."""
    return launch.run.stopping.request is not None or launch.has_failed


def call(launch: Launch, stage: StageConfig, argument: Mapping[str, Any] | None) -> Any:
    """Call the function once; without an argument, only import it. Raises as `own_stage`."""
    run = launch.run
    log = run.run_dir / "logs" / f"stage-{stage.run.replace(':', '-')}-{stage.after}.log"
    with tempfile.TemporaryDirectory(prefix="trialflow-stage-") as folder:
        result = Path(folder) / "result.json"
        try:
            problem = call_function(
                stage.run, argument,
                code=launch.code.folder,
                log=log,
                environment={**run.config.rank_variables, **run.devices},
                timeout_seconds=stage.timeout_seconds,
                should_cancel=lambda: is_ended(launch),
                result=result,
            )  # fmt: skip
        except (OSError, TypeError, ValueError) as error:  # no process, or no plain argument
            raise OwnStageFailed(f"stage {stage.run} could not be called: {error}") from error
        if argument is not None:
            for line in log_lines(log):
                run.logger.info("[%s] %s", stage.run, line)
        if problem is not None:
            raise OwnStageFailed(f"stage {stage.run}: {problem}")
        return json.loads(result.read_text()) if result.exists() else None
