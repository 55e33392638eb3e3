"""A stage of the user's own: calls a function of the code folder in another process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_core.config.stages_section import StageConfig
from trial_core.driver.run import Launch
from trial_core.errors import TrialflowError
from trial_core.models.callback_process import call_function, log_lines


class OwnStageFailed(TrialflowError):
    """A stage of the user's own has failed."""


def own_stage(launch: Launch, stage: StageConfig, argument: Mapping[str, Any]) -> Any:
    """Call the function, and again if it fails, as the experiment says; what it returns.

    A stop request kills it, and ends the pause between two calls, which Prefect's retries do not.

    Raises:
        OwnStageFailed: it raised, took too long, or was killed.
    """
    with launch.stage("own-stage", f"{stage.run} @{argument['batches_trained']}"):
        for _ in range(stage.retries):
            try:
                return call(launch, stage, argument)
            except OwnStageFailed as failure:
                if is_ended(launch) or launch.run.stopping.wait(stage.retry_delay_seconds):
                    raise
                launch.run.logger.warning("%s; it is called again", failure)
        return call(launch, stage, argument)


def is_ended(launch: Launch) -> bool:
    """Whether own stages are killed, and not called again."""
    return launch.run.stopping.request is not None or launch.has_failed


def call(launch: Launch, stage: StageConfig, argument: Mapping[str, Any] | None) -> Any:
    """As `own_stage`; without an argument, only import the function."""
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
