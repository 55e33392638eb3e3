"""Where the code of a run's trial comes from: the code folder, or a checkpoint."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.checkpoint_source import CheckpointSource
from trial_core.checkpoint.transfer.code_folder import check_code_folder
from trial_core.checkpoint.transfer.trial_code import TrialCode, code_of_checkpoint
from trial_core.common.any_logger import AnyLogger
from trial_core.config import ExperimentConfig
from trial_core.driver.choose_resume_point import resume_points
from trial_core.driver.entrypoint_check import entrypoint_problem
from trial_core.driver.placement import choose_provider
from trial_core.errors import ConfigError, LaunchError
from trial_core.processes.machine.run_dirs import CODE


def refuse_missing_code(config: ExperimentConfig) -> None:
    """Check the code folder and the entrypoint, before the run waits for accelerators.

    Raises LaunchError if this machine does not have the folder; ConfigError if it has to be sent to
    nodes and holds much besides code, or the entrypoint is missing.
    """
    if config.environment.code == "from_checkpoint":
        return
    if not os.path.isdir(config.code):  # `Path.is_dir` raises if the name is too long
        raise LaunchError(
            f"there is no code folder {config.code} on {socket.gethostname()}: it must be under "
            "that path on the machine that trains (a shared file system, a checkout in the same "
            "place, an image that holds it). A run that continues a checkpoint can use the code "
            "that it was saved with: environment.code: from_checkpoint"
        )
    is_here = choose_provider(config) is None
    if config.environment.code != "shared" and not is_here:
        check_code_folder(config.code)
    python_path = config.rank_variables.get("PYTHONPATH", "")
    problem = entrypoint_problem(config.entrypoint, str(config.code), python_path, is_here)
    if problem is not None:
        raise ConfigError(problem)


def stored_trial_code(
    config: ExperimentConfig, store: CheckpointStore, trial: str, run_dir: Path, logger: AnyLogger
) -> TrialCode | None:
    """Return the code of the run's first checkpoint; None if the run uses the code folder.

    Raises ConfigError if the run begins with nothing, and CheckpointError if the checkpoint has no
    code, or its code is damaged.
    """
    if config.environment.code != "from_checkpoint":
        return None
    checkpoint = next(resume_points(store, config, trial)).checkpoint
    if checkpoint is None:
        raise ConfigError(
            "environment.code: from_checkpoint takes the code of the checkpoint that a run begins "
            f"with, and trial {trial} has none: give --resume or searcher.source_checkpoint_uuid, "
            "or use the code folder (environment.code: folder)"
        )
    return fetched_code(store, checkpoint, run_dir, logger)


def fetched_code(
    store: CheckpointStore, checkpoint: Manifest, run_dir: Path, logger: AnyLogger
) -> TrialCode:
    """Fetch the code of a checkpoint to the run's folder. Raises as `code_of_checkpoint`."""
    code = code_of_checkpoint(CheckpointSource(checkpoint, store), run_dir / CODE)
    logger.info("the ranks use the code of checkpoint %s", checkpoint.uuid)
    return code
