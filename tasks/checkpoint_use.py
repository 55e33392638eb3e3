"""Tasks for a user's own flows that use a checkpoint: `export`, `promote` and `fetch`.

Each takes the result of one of our flows, or a reference with its experiment. In a retry of the
flow that calls them they do only the rest of the work: nothing is refused because an earlier
attempt has done it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from prefect import runtime, task
from prefect.logging import get_run_logger
from pydantic_core import core_schema

from trial_core.checkpoint.retention_policy import own_metric
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.fetch import download
from trial_core.common import text_format
from trial_core.config import ExperimentConfig
from trial_core.driver.result import TrialResult
from trial_core.errors import ConfigError
from trial_core.export.export_checkpoint import ExportPrecision, Format, export_in_process
from trial_core.models.checkpoint_reference import open_checkpoint
from trial_core.models.records import Move
from trial_core.models.registry import Registry
from trial_core.search.settings import EitherExperiment
from trialflow.tasks.events import tell_champion
from trialflow.tasks.retrying import TRANSFER
from trialflow.tasks.storage_block import with_credentials


@runtime_checkable
class HasCheckpoint(Protocol):
    """The result of one of our flows or tasks, which stands for its checkpoint.

    Attributes:
        trial: the trial that saved it.
        checkpoint_uuid: the checkpoint, or None if nothing was saved.
        config: the experiment, which names the storage, or None for a script's result.
    """

    @property
    def trial(self) -> str: ...
    @property
    def checkpoint_uuid(self) -> str | None: ...
    @property
    def config(self) -> ExperimentConfig | None: ...


class ExperimentOrResult:
    """Makes a flow's parameter take a result in place of the experiment, which may be a search.

    To pydantic it is an experiment alone, so a form and the errors of a mapping show nothing else.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        def pass_result(value: Any, validate: core_schema.ValidatorFunctionWrapHandler) -> Any:
            return value if isinstance(value, HasCheckpoint) else validate(value)

        experiment = handler.generate_schema(EitherExperiment)
        return core_schema.no_info_wrap_validator_function(pass_result, experiment)


@dataclass(frozen=True)
class ExportResult:
    """The result of `export`.

    Attributes:
        path: the exported file or folder.
        format: the `format` of `export`.
        names: how many weights; for DeepSpeed's formats, how many files.
        missing: names of frozen weights that the checkpoint does not hold.
        checkpoint_uuid, trial, config: the exported checkpoint, its trial and its experiment.
    """

    path: Path
    format: Format
    names: int
    size_bytes: int
    missing: list[str]
    checkpoint_uuid: str
    trial: str
    config: ExperimentConfig


def checkpoint_of(
    source: HasCheckpoint | str, checkpoint: str | None, config: ExperimentConfig | None
) -> tuple[ExperimentConfig, str]:
    """Return the experiment of a result, and a reference to the result's checkpoint.

    Args:
        source: a reference; or a result, which stands for the checkpoint of its validation metrics
            if that exists, else for its newest.
        checkpoint: another one: ``best`` or ``latest`` of the result's trial, or a reference.
        config: the experiment; needed if `source` has none.

    Raises:
        ConfigError: the experiment is not known, or the result has no checkpoint.
    """
    if isinstance(source, str):
        if config is None:
            raise ConfigError(
                f"checkpoint {source!r}: expected config=, the experiment whose storage has it, or "
                "the result of train or evaluate in place of the text"
            )
        return config, checkpoint or source
    if not isinstance(source, HasCheckpoint):
        raise ConfigError(
            "expected the result of train or evaluate, or a reference to a checkpoint, got a "
            f"{type(source).__name__}"
        )
    config = config or source.config
    if config is None:
        raise ConfigError(
            f"the result of trial {source.trial} has no experiment, as it is of no flow: give "
            "config=, the experiment whose storage has the checkpoint; to evaluate, "
            f'evaluate(config, "{checkpoint or source.checkpoint_uuid}")'
        )
    if checkpoint in ("best", "latest"):
        return config, f"{checkpoint}:{source.trial}"
    if checkpoint is None and source.checkpoint_uuid is None:
        raise ConfigError(f"trial {source.trial} has saved no checkpoint: {source}")
    return config, checkpoint or _validated(source, config) or str(source.checkpoint_uuid)


def _validated(source: HasCheckpoint, config: ExperimentConfig) -> str | None:
    """Return the checkpoint of a training's last validation, if a later one was saved unvalidated.

    Return None if the newest is that one, or if it does not exist. Raises StorageError.
    """
    if not isinstance(source, TrialResult) or source.validated_at in (None, source.checkpoint_at):
        return None
    there = store_of(config).list(source.trial)
    return next(
        (
            each.uuid
            for each in reversed(there)
            if each.progress.batches_trained == source.validated_at and each.is_validated
        ),
        None,
    )


def store_of(config: ExperimentConfig) -> CheckpointStore:
    storage = with_credentials(config).checkpoint_storage
    return CheckpointStore(storage.url, storage.options, config.name)


def _run_name() -> str:
    """Name the run by the target's name only, because a whole path hides the timeline."""
    given: dict[str, Any] = runtime.task_run.parameters
    return f"{runtime.task_run.task_name} → {Path(given['to']).name}"


@task(name="export", task_run_name=_run_name, **TRANSFER)
def export(
    source: HasCheckpoint | str,
    to: str | Path,
    *,
    format: Literal["safetensors", "hf", "adapter", "deepspeed", "universal"] = "safetensors",
    checkpoint: str | None = None,
    engine: int = 0,
    dtype: ExportPrecision = "fp32",
    max_shard_size: str = "2GB",
    config: ExperimentConfig | None = None,
) -> ExportResult:
    """Write a checkpoint's weights to a file, or to a folder of another library.

    Works as `trialflow export`, in another process. Replaces an earlier export to the same place.

    Args:
        source: the result of `train` or `evaluate`; or a reference such as ``best:TRIAL``, a uuid
            or ``champion:MODEL``, with `config`.
        to: the file, .safetensors, .pt or .bin; or the folder of the format.
        format: ``safetensors``: one file. ``hf``: a folder for ``from_pretrained``. ``adapter``: a
            folder for peft. ``deepspeed``, ``universal``: the whole state of an engine.
        checkpoint: another checkpoint than the result stands for: ``best`` or ``latest`` of its
            trial, or a reference. A result of `train` stands for the checkpoint of its validation
            metrics; for its newest if that was not saved.
        engine: index of the trial's engine, or of a PyTorchTrial's model; the first is 0.
        dtype: ``fp32``: the optimizer's weights. ``16bit``: the model's working weights.
        max_shard_size: of ``hf``: the size of its largest file.
        config: the experiment, if `source` has none.

    Raises:
        ConfigError: `to` does not fit the format, or is not an export; the format or precision does
            not exist; or the experiment is not known.
        CheckpointNotFound, CheckpointDamaged: the checkpoint cannot be read.
        CheckpointError: it does not hold the requested weights.
        StorageError: the storage failed, or the target cannot be written.
    """
    config, reference = checkpoint_of(source, checkpoint, config)
    manifest = open_checkpoint(store_of(config), reference)
    done = export_in_process(
        with_credentials(config), manifest.uuid, Path(to),
        format=format, engine=engine, dtype=dtype, shard_size=max_shard_size,
    )  # fmt: skip
    names = text_format.plural(done.names, "name")
    size = text_format.size(done.size_bytes)
    logger = get_run_logger()
    logger.info("checkpoint %s: %s, %s, in %s", manifest.uuid, names, size, to)
    if done.missing:
        frozen = text_format.plural(len(done.missing), "frozen weight")
        logger.warning("without %s, which the checkpoint does not hold; see `missing`", frozen)
    return ExportResult(
        Path(to).absolute(), format, done.names, done.size_bytes, done.missing, manifest.uuid,
        manifest.trial, config,
    )  # fmt: skip


@task(name="promote", task_run_name="promote → {model}", **TRANSFER)
def promote(
    source: HasCheckpoint | str,
    model: str,
    *,
    checkpoint: str | None = None,
    why: str = "",
    config: ExperimentConfig | None = None,
) -> Move:
    """Make a checkpoint the champion of a model, after every byte of it is verified.

    It is first registered as a version of the model, unless it is one. If it is the champion
    already, or an earlier attempt at the flow run has promoted it, nothing changes, and the move
    that made it champion is returned: a flow run promotes a checkpoint once, and a retry does not
    undo a person's decision.

    Args:
        source, checkpoint, config: see `export`.
        model: the model's name in the registry.
        why: shown in the model's history.

    Returns:
        The move: `champion` and `previous` are numbers of versions.

    Raises:
        ConfigError: the experiment is not known.
        CheckpointNotFound, CheckpointDamaged: the checkpoint cannot be read.
        PromotionConflict: another process moves the champion at the same time.
        RegistryError: the name is not valid for a model.
        StorageError: the storage failed.
    """
    config, reference = checkpoint_of(source, checkpoint, config)
    registry, searcher = Registry(store_of(config)), config.searcher
    # From the outermost flow: Prefect gives a flow within it another run in each attempt.
    run = str(runtime.flow_run.root_flow_run_id or "")
    manifest = open_checkpoint(registry.store, reference)
    version = registry.register(
        model, manifest, metric=searcher.metric, smaller_is_better=searcher.smaller_is_better,
        value=own_metric(manifest, searcher.metric), run=run,
    )  # fmt: skip
    logger, last = get_run_logger(), registry.last_move(model)
    if last is not None and last.champion != version.number and run:
        for move in registry.moves(model):
            if (move.run, move.champion) == (run, version.number):
                logger.warning("this run has promoted %s, but since then: %s", version, last)
                return move
    move = registry.promote(model, version.number, run=run, why=why)
    tell_champion(registry, move, config)
    logger.info("checkpoint %s is %s, the champion", manifest.uuid, version)
    return move


@task(name="fetch", task_run_name=_run_name, **TRANSFER)
def fetch(
    source: HasCheckpoint | str,
    to: str | Path,
    *,
    checkpoint: str | None = None,
    config: ExperimentConfig | None = None,
) -> Path:
    """Bring a checkpoint's files into a folder, and verify each of them.

    Args:
        source, checkpoint, config: see `export`.
        to: a new or empty folder, or one that holds this checkpoint or a part of it.

    Returns:
        The folder.

    Raises:
        ConfigError: the experiment is not known.
        CheckpointError: the folder holds other files.
        CheckpointNotFound, CheckpointDamaged: the checkpoint cannot be read.
        StorageError: the storage failed, or the folder cannot be written.
    """
    config, reference = checkpoint_of(source, checkpoint, config)
    store = store_of(config)
    manifest = download(store, open_checkpoint(store, reference).uuid, Path(to))
    size = text_format.size(manifest.total_bytes)
    get_run_logger().info("checkpoint %s: %s, in %s", manifest.uuid, size, to)
    return Path(to).absolute()
