"""upload-run-files: uploads the remaining TensorBoard files and profiler traces at the end."""

from __future__ import annotations

from trial_core.checkpoint.transfer.run_files import TENSORBOARD, RunFiles, tensorboard_url
from trial_core.driver.run import Launch
from trial_core.driver.stages.declared_stage import stage
from trial_core.errors import StorageError
from trial_core.messages import FinishRunFiles, RunFilesStored


@stage("upload-run-files", "@{batches_trained}", bucket=None, is_transfer=True)
def upload_run_files(launch: Launch, batches_trained: int) -> str:
    """Upload the files that no checkpoint upload has stored. Return the URL of all of them.

    Raises StorageError if they cannot be stored. They stay in the run's folder.
    """
    run = launch.run
    folder, scratch = run.run_dir / TENSORBOARD, run.run_dir / "staging"
    stored = launch.ask(FinishRunFiles(), RunFilesStored)
    problem = next((rank.problem for rank in stored if rank.problem), None)
    if problem:
        raise StorageError(f"{problem}. The files are in {folder}")
    if run.store.is_process_local:
        # Only this process sees that storage, so it uploads the files itself.
        RunFiles(run.store, run.trial, folder, TENSORBOARD, scratch).upload_changed()
    url = tensorboard_url(run.store, run.trial)
    run.logger.info("files for TensorBoard: %s (tensorboard --logdir)", url)
    return url
