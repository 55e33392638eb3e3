"""upload-run-files: uploads the remaining TensorBoard files and profiler traces at the end."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from trial_core.errors import StorageError
from trial_core.messages import FinishRunFiles, RunFilesStored
from trial_core.transfer.run_files import TENSORBOARD, RunFiles, tensorboard_url
from trialflow.tasks.retrying import STORAGE_RETRIES, STORAGE_RETRY_SECONDS, storage_failed
from trialflow.tasks.trial_run import TrialRun


@task(
    name="upload-run-files",
    task_run_name="upload-run-files @{batches_trained}",
    cache_policy=NO_CACHE,
    retries=STORAGE_RETRIES,
    retry_delay_seconds=STORAGE_RETRY_SECONDS,
    retry_condition_fn=storage_failed,
)
def upload_run_files(run: TrialRun, batches_trained: int) -> str:
    """Upload the files that no checkpoint upload has taken along; the URL of all of them.

    Raises:
        StorageError: the files cannot be stored. They are still in the run's folder.
    """
    with run.stage("upload-run-files", f"@{batches_trained}"):
        stall_seconds = run.config.stopping.idle_timeout_seconds
        stored = run.slots.request(FinishRunFiles(), RunFilesStored, stall_seconds=stall_seconds)
        problem = next((rank.problem for rank in stored if rank.problem), None)
        if problem:
            raise StorageError(f"{problem}. The files are in {run.run_dir / TENSORBOARD}")
        if run.store.is_process_local:
            # Only this process sees that storage, so it uploads the files itself.
            folder, scratch = run.run_dir / TENSORBOARD, run.run_dir / "staging"
            RunFiles(run.store, run.trial, folder, TENSORBOARD, scratch).upload_changed()
    url = tensorboard_url(run.store, run.trial)
    get_run_logger().info("files for TensorBoard: %s (tensorboard --logdir)", url)
    return url
