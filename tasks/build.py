"""build-trial, fetch-checkpoint, build-loaders: prepare the ranks for training."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.resume_point import Restore, ResumePoint
from trial_core.errors import CheckpointDamaged, StorageError
from trial_core.messages import (
    BuildLoaders,
    BuildTrial,
    FetchCheckpoint,
    Fetched,
    LoadersBuilt,
    TrialBuilt,
)
from trial_core.text_format import plural, ranks_by_node
from trial_core.transfer.fetch import fetch_files
from trial_core.units import EpochLength
from trialflow.tasks.retrying import STORAGE_RETRIES, STORAGE_RETRY_SECONDS, storage_failed
from trialflow.tasks.trial_run import TrialRun

logger = logging.getLogger(__name__)


@task(name="build-trial", task_run_name="build-trial", cache_policy=NO_CACHE)
def build_trial(run: TrialRun) -> None:
    """Construct the user's trial, with its engines, on every rank."""
    run.logger = get_run_logger()
    with run.stage("build-trial", ""):
        ranks = run.slots.request(
            BuildTrial(
                trial=run.trial,
                experiment=run.config.model_dump(mode="json"),
                run_dir=str(run.run_dir),
                storage=run.store.spec,
            ),
            TrialBuilt,
            stall_seconds=run.config.stopping.idle_timeout_seconds,
        )
    built = ranks[0]
    run.hooks = frozenset(hook for rank in ranks for hook in rank.hooks)  # callbacks may differ
    run.topology = built.topology
    run.versions = built.versions
    run.batch_samples = built.batch_samples
    _warn_of_another_batch_size(run.config.hyperparameters, built)
    run.logger.info("trial %s on %s", run.trial, _describe(built))
    nodes = run.slots.nodes
    if len(set(nodes)) > 1:
        run.logger.info("%s", ranks_by_node(nodes))
    run.observer.ranks_placed(nodes)


def _warn_of_another_batch_size(hyperparameters: Mapping[str, Any], built: TrialBuilt) -> None:
    """Warn if ranks cannot share ``global_batch_size`` equally, and a batch has other samples."""
    wanted, ranks = hyperparameters.get("global_batch_size"), built.topology.data_parallel_size
    has_remainder = isinstance(wanted, int) and wanted % ranks != 0
    if has_remainder and built.batch_samples not in (0, wanted):
        logger.warning(
            "hyperparameters.global_batch_size is %d, but a batch on %s has %d samples; choose a "
            "number that the ranks can share equally",
            wanted, plural(ranks, "data-parallel rank"), built.batch_samples,
        )  # fmt: skip


def _describe(built: TrialBuilt) -> str:
    """``4 ranks (2 data-parallel, 2 pipeline stages, ZeRO stage 1), 16 samples a batch``.

    Leaves out what the trial does not use or does not say.
    """
    topology = built.topology
    parts = [
        f"{topology.data_parallel_size} data-parallel",
        f"{topology.pipeline_parallel_size} pipeline stages",
        f"{topology.model_parallel_size} model-parallel",
    ]
    shown = [part for part in parts if not part.startswith("1 ")]
    if topology.is_state_divided:
        shown.append(topology.state_division)
    ranks = plural(topology.world_size, "rank") + (f" ({', '.join(shown)})" if shown else "")
    if not built.batch_samples:
        return ranks
    return f"{ranks}, {plural(built.batch_samples, 'sample')} a batch"


@task(
    name="fetch-checkpoint",
    task_run_name="fetch-checkpoint @{manifest.progress.batches_trained}",
    cache_policy=NO_CACHE,
    retries=STORAGE_RETRIES,
    retry_delay_seconds=STORAGE_RETRY_SECONDS,
    retry_condition_fn=storage_failed,
)
def fetch_checkpoint(
    run: TrialRun, manifest: Manifest, restore: Restore = "everything"
) -> str | None:
    """Fetch and verify a checkpoint. Return what is damaged; None if it is intact.

    Args:
        restore: how much of it will be restored.

    Raises:
        StorageError: the storage failed. A retry fetches only the missing files.
    """
    with run.stage("fetch-checkpoint", f"@{manifest.progress.batches_trained}"):
        damage = _fetch(run, manifest, restore)
    if damage:
        get_run_logger().error("checkpoint %s cannot be used: %s", manifest.uuid, damage)
    return damage


def _fetch(run: TrialRun, manifest: Manifest, restore: Restore) -> str | None:
    if run.store.is_process_local:
        # Only this process sees that storage. It fetches the files to where the ranks look.
        try:
            folder = run.run_dir / "restored" / manifest.uuid
            fetch_files(run.store, manifest.uuid, manifest.files, folder)
        except CheckpointDamaged as damage:
            return str(damage)
        return None
    request = FetchCheckpoint(
        uuid=manifest.uuid,
        files=manifest.files,
        saved_by=manifest.topology,
        restore=restore,
    )
    stall_seconds = run.config.stopping.idle_timeout_seconds
    fetched = run.slots.request(request, Fetched, stall_seconds=stall_seconds)
    for rank, result in enumerate(fetched):
        if result.problem:
            raise StorageError(
                f"rank {rank}: checkpoint {manifest.uuid} cannot be fetched: {result.problem}"
            )
    return next((result.damage for result in fetched if result.damage), None)


@task(
    name="build-loaders",
    task_run_name="build-loaders @{point.progress.batches_trained}",
    cache_policy=NO_CACHE,
)
def build_loaders(run: TrialRun, point: ResumePoint) -> EpochLength | None:
    """Build the loaders and restore the checkpoint. Return the length of an epoch."""
    begin = point.progress.batches_trained
    run.batches_trained = begin
    run.clock.starts_at(begin)
    with run.stage("build-loaders", f"@{begin}"):
        ranks = run.slots.request(
            BuildLoaders(
                batches_trained=begin,
                checkpoint=point.uuid,
                restore=point.restore,
                saved_by=point.saved_by,
            ),
            LoadersBuilt,
            stall_seconds=run.config.stopping.idle_timeout_seconds,
        )
        run.clock.count_as("restore", max(rank.restore_seconds for rank in ranks))
    run.epoch = ranks[0].epoch
    return run.epoch
