"""build-trial, attach-trial, fetch-checkpoint, build-loaders: prepare the ranks for training."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.resume_point import Restore, ResumePoint
from trial_core.checkpoint.transfer.fetch import fetch_files
from trial_core.common.text_format import plural, ranks_by_node
from trial_core.driver.changed_settings import changes_since_checkpoint
from trial_core.driver.run import Launch
from trial_core.driver.stages.declared_stage import stage
from trial_core.errors import CheckpointDamaged, StorageError, TrialError
from trial_core.messages import (
    AttachTrial,
    BuildLoadersAndRestore,
    BuildTrial,
    FetchCheckpoint,
    Fetched,
    ReadyToTrain,
    RestoredSettings,
    TrialBuilt,
)
from trial_core.schedule.units import EpochLength

logger = logging.getLogger(__name__)


@stage("build-trial", bucket="build")
def build_trial(launch: Launch) -> None:
    """Construct the user's trial, its models and optimizers, on every rank."""
    run = launch.run
    request = BuildTrial(
        trial=run.trial,
        experiment=run.config.model_dump(mode="json"),
        run_dir=str(run.run_dir),
        storage=run.store.spec,
        micro_batch_samples=launch.micro_batch_samples,
    )
    note_built(launch, launch.ask(request, TrialBuilt))
    nodes = launch.slots.nodes
    if len(set(nodes)) > 1:
        run.logger.info("%s", ranks_by_node(nodes))
    run.observer.ranks_placed(nodes)


@stage("attach-trial", bucket="build")
def attach_trial(launch: Launch) -> None:
    """Take over the trial of a script whose ranks are in `Trainer.fit`, or will be."""
    run = launch.run
    request = AttachTrial(trial=run.trial, run_dir=str(run.run_dir), storage=run.store.spec)
    note_built(launch, launch.ask(request, TrialBuilt))


def note_built(launch: Launch, ranks: Sequence[TrialBuilt]) -> None:
    """Note the ranks' descriptions of the trial they have built."""
    answers, built = launch.answers, ranks[0]
    answers.hooks = frozenset(hook for rank in ranks for hook in rank.hooks)  # callbacks may differ
    answers.topology, answers.versions = built.topology, built.versions
    answers.batch_samples = built.batch_samples
    _warn_of_another_batch_size(launch.run.config.hyperparameters, built)
    launch.run.logger.info("trial %s on %s", launch.run.trial, built.topology.description)
    wanted, size = launch.micro_batch_samples or 0, built.topology.micro_batch_samples
    if 0 < size < wanted:
        launch.run.logger.info(
            "micro-batches have %s on these ranks: %d do not divide a batch of a rank",
            plural(size, "sample"), wanted,
        )  # fmt: skip
    launch.run.observer.trial_built(built.topology, built.versions, launch.code.digest)


def _warn_of_another_batch_size(hyperparameters: Mapping[str, Any], built: TrialBuilt) -> None:
    """Warn if ranks cannot share ``global_batch_size`` equally: a batch then has another size."""
    wanted, ranks = hyperparameters.get("global_batch_size"), built.topology.data_parallel_size
    has_remainder = isinstance(wanted, int) and wanted % ranks != 0
    if has_remainder and built.batch_samples not in (0, wanted):
        logger.warning(
            "hyperparameters.global_batch_size is %d, but a batch on %s has %d samples; choose a "
            "number that the ranks can share equally",
            wanted, plural(ranks, "data-parallel rank"), built.batch_samples,
        )  # fmt: skip


@stage(
    "fetch-checkpoint",
    "@{manifest.progress.batches_trained}",
    bucket="restore",
    is_transfer=True,
)
def fetch_checkpoint(
    launch: Launch, manifest: Manifest, restore: Restore = "everything"
) -> str | None:
    """Fetch and verify a checkpoint, or the part to restore. Describe the damage; None if intact.

    Raises StorageError if the storage failed. A retry fetches only the missing files.
    """
    damage = _fetch(launch, manifest, restore)
    if damage:
        launch.run.logger.error("checkpoint %s cannot be used: %s", manifest.uuid, damage)
    return damage


def _fetch(launch: Launch, manifest: Manifest, restore: Restore) -> str | None:
    run = launch.run
    if run.store.is_process_local:
        # Only this process sees that storage. It fetches the files for the ranks.
        try:
            folder = run.run_dir / "restored" / manifest.uuid
            fetch_files(run.store, manifest.uuid, manifest.files, folder)
        except CheckpointDamaged as damage:
            return str(damage)
        return None
    request = FetchCheckpoint(
        uuid=manifest.uuid, files=manifest.files, saved_by=manifest.topology, restore=restore
    )
    fetched = launch.ask(request, Fetched)
    for rank, result in enumerate(fetched):
        if result.problem:
            raise StorageError(
                f"rank {rank}: checkpoint {manifest.uuid} cannot be fetched: {result.problem}"
            )
    return next((result.damage for result in fetched if result.damage), None)


def _is_unchanged(launch: Launch, point: ResumePoint) -> bool:
    """True if the experiment and the code are those of the checkpoint, as after a restart."""
    saved = point.checkpoint
    if saved is None or saved.code is None or point.restore != "everything":
        return False
    config = launch.run.config
    return (
        launch.code.digest == saved.code.digest
        and saved.config_digest == config.digest()
        and saved.environment_digest in ("", config.environment_digest(saved.trial))
    )


def tell_changes(launch: Launch, point: ResumePoint, settings: RestoredSettings) -> None:
    """Tell people what has changed since the checkpoint of the ranks, and note it for manifests."""
    run, answers, saved = launch.run, launch.answers, point.checkpoint
    told = changes_since_checkpoint(point, run.config, answers.versions, settings)
    # A script is told of its experiment at its start, before it calls `fit`.
    news = [each for each in told if each not in answers.changes]
    answers.changes = told
    answers.earlier_changes = saved.changes if saved and point.restore == "everything" else []
    if run.test_mode == "compare":  # the caller tells them
        return
    if settings.kept or settings.not_kept or not settings.is_known:
        launch.warn(news)
        return
    for each in news:
        run.logger.info("%s", each)
        run.observer.notice(each)


@stage("build-loaders", "@{point.progress.batches_trained}", bucket="build")
def build_loaders(launch: Launch, point: ResumePoint) -> EpochLength | None:
    """Build the loaders and restore the checkpoint. Return the length of an epoch."""
    begin = point.progress.batches_trained
    launch.status.batches_trained = launch.status.began_at = begin
    launch.run.clock.starts_at(begin)
    request = BuildLoadersAndRestore(
        batches_trained=begin,
        checkpoint=point.uuid,
        restore=point.restore,
        saved_by=point.saved_by,
        epoch=point.checkpoint.epoch if point.checkpoint else None,
        validation_limit=1 if launch.run.test_mode else None,
        keep=launch.answers.keep or [*launch.run.keep],
        compares=not _is_unchanged(launch, point),
    )
    ranks = launch.ask(request, ReadyToTrain)
    launch.run.clock.count_as("restore", max(rank.restore_seconds for rank in ranks))
    launch.warn(ranks[0].warnings)
    tell_changes(launch, point, ranks[0].settings)
    launch.answers.epoch = ranks[0].epoch
    launch.answers.loads_micro_batches = all(r.loads_micro_batches is not False for r in ranks)
    topology = launch.answers.topology
    has_micro_batches = topology is not None and topology.micro_batch_samples > 0
    is_other_size = launch.micro_batch_samples is not None and has_micro_batches
    if is_other_size and not launch.answers.loads_micro_batches:
        remedy = (
            "its batch_size is another number than engine.train_micro_batch_size_per_gpu(). Pass "
            "it that"
        )
        if launch.micro_batch_samples == 0:  # see `BuildTrial`
            raise TrialError(
                "tune-batch tries micro-batches of other sizes, and the training loader does not "
                f"take them: {remedy}"
            )
        raise TrialError(
            "the memory is too small for the configured micro-batches, and the training loader "
            f"does not take smaller ones: {remedy}, or reduce both"
        )
    return launch.answers.epoch
