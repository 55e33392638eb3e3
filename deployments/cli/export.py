"""`trialflow export`: writes a checkpoint's weights to one file."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from trial_core import text_format
from trial_core.errors import CheckpointError, ConfigError
from trialflow.deployments.cli.experiment_options import (
    CHECKPOINT,
    ConfigFile,
    Storage,
    open_store,
)
from trialflow.deployments.cli.tables import AsJson

if TYPE_CHECKING:
    from trial_core.checkpoint.manifest import FileEntry, Manifest
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.export.weights import Weights

Precision = Literal["fp32", "16bit"]
COPY_BYTES = 16 * 2**20
SUFFIXES = (".safetensors", ".pt", ".bin")
PYTORCH_STATE = "state_dict.pth"
"""The file that holds all models of a PyTorchTrial, or names those that are sharded."""
PYTORCH_SHARDS = "shards/models_state_dict/"
"""The folder of the parts of sharded models."""


@dataclass(frozen=True)
class ExportRequest:
    """The weights to export.

    Attributes:
        engine: index of the trial's engine, or of a PyTorchTrial's model.
        dtype: precision of the exported weights.
        is_trusted: whether to read objects of any class.
    """

    manifest: Manifest
    engine: int
    dtype: Precision
    is_trusted: bool


def export(
    checkpoint: Annotated[
        str | None, Parameter(help=f"{CHECKPOINT} Required unless --trial is given.")
    ] = None,
    /,
    *,
    to: Annotated[Path, Parameter(help="The file to write: .safetensors, .pt or .bin.")],
    trial: Annotated[
        str | None,
        Parameter(
            help="Without a checkpoint: export this trial's latest one; with best: its best. "
            "Default: none."
        ),
    ] = None,
    engine: Annotated[
        int,
        Parameter(
            help="Index of the trial's engine, or of a PyTorchTrial's model; the first is 0."
        ),
    ] = 0,
    dtype: Annotated[
        Precision,
        Parameter(
            help="fp32: the optimizer's weights. 16bit: the weights the model computes with."
        ),
    ] = "fp32",
    force: Annotated[bool, Parameter(help="Replace an existing file.")] = False,
    trusted: Annotated[
        bool,
        Parameter(help="Allow objects of any class, which can run code (checkpointing.trusted)."),
    ] = False,
    config: ConfigFile = None,
    storage: Storage = None,
    json_: AsJson = False,
) -> int:
    """Write the weights of a checkpoint to one file.

    Consolidates ZeRO's shards; of a PyTorchTrial, writes one of its models. Every file is verified
    before it is loaded, and only tensors and plain data are read from it, unless --trusted is given
    or the file of --config allows more. The folder for temporary files (TMPDIR) needs space for the
    part of the checkpoint that is read.

    For example: trialflow export best --to model.safetensors
    """
    from trial_core.models.checkpoint_reference import open_checkpoint

    _check_target(to, force)
    reference = _reference(checkpoint, trial)
    store = open_store(config, storage)
    manifest = open_checkpoint(store, reference)
    request = ExportRequest(manifest, engine, dtype, trusted or _is_trusted(config))
    count, size_bytes = _export(store, request, to, force)
    if json_:
        result = {
            "uuid": manifest.uuid,
            "file": str(to.absolute()),
            "names": count,
            "size_bytes": size_bytes,
            "dtype": dtype,
            "engine": engine,
        }
        print(json.dumps(result))
    else:
        names = text_format.plural(count, "name")
        at = f"trial {manifest.trial}, batch {manifest.progress.batches_trained}"
        if validated := manifest.metrics.get("validation"):
            at += f", {text_format.metrics_line(validated)}"
        size = text_format.size(size_bytes)
        print(f"checkpoint {manifest.uuid} ({at}): {names}, {size}, in {to}")
    return 0


def _check_target(to: Path, force: bool) -> None:
    if to.suffix not in SUFFIXES:
        raise ConfigError(f"--to {to}: expected a name that ends in {', '.join(SUFFIXES)}")
    if to.is_dir():
        raise ConfigError(f"--to {to} is a folder; give the name of a file")
    if to.exists() and not force:
        raise ConfigError(f"--to {to} exists already; add --force to replace it")


def _reference(checkpoint: str | None, trial: str | None) -> str:
    """What to export, as a reference.

    Raises:
        ConfigError: nothing is named, or a trial beside a checkpoint that is named without it.
    """
    if trial is not None and checkpoint in (None, "best", "latest"):
        return f"{checkpoint or 'latest'}:{trial}"
    if checkpoint is None or trial is not None:
        raise ConfigError(
            "expected either a checkpoint (best, its uuid, or champion:MODEL) or --trial, got "
            + ("neither" if checkpoint is None else "both")
        )
    return checkpoint


def _files_of(manifest: Manifest, engine: int) -> list[FileEntry]:
    """The files that hold an engine's weights, or a PyTorchTrial's.

    Raises:
        CheckpointError: there are none.
    """
    entries = [entry for entry in manifest.files if entry.path.startswith(f"model{engine}/")]
    if any(entry.path.endswith("model_states.pt") for entry in entries):
        return entries
    if any(entry.path == PYTORCH_STATE for entry in manifest.files):
        names = (PYTORCH_STATE, PYTORCH_SHARDS)
        return [entry for entry in manifest.files if entry.path.startswith(names)]
    saved = {entry.path.partition("/")[0] for entry in manifest.files if "/" in entry.path}
    engines = sorted(name.removeprefix("model") for name in saved if name.startswith("model"))
    if engines:
        reason = f"its engines are {', '.join(engines)}"
    else:
        reason = (
            "the trial overrides save, so only the trial can read its files; to fetch them: "
            f"trialflow checkpoints download {manifest.uuid} --to FOLDER"
        )
    raise CheckpointError(
        f"checkpoint {manifest.uuid} of {manifest.entrypoint} holds no DeepSpeed weights for "
        f"engine {engine} (model{engine}/…model_states.pt): {reason}"
    )


def _is_trusted(config: Path | None) -> bool:
    """Whether the file of --config sets checkpointing.trusted.

    ./experiment.yaml has no say unless it is named: a strange folder must not get its code run.
    """
    if config is None:
        return False
    from trial_core.config import ExperimentWarning, load_config

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentWarning)  # open_store has shown it
        return load_config(config, []).checkpointing.trusted


def _export(
    store: CheckpointStore, request: ExportRequest, to: Path, force: bool
) -> tuple[int, int]:
    """Fetch the files and write the weights. Return the number of names and of bytes."""
    from trial_core.storage.local_files import atomic_file
    from trial_core.storage.storage_errors import ErrorTranslator
    from trial_core.transfer.fetch import fetch_files

    entries = _files_of(request.manifest, request.engine)
    # First check that the file can be written: fetching may take hours. Nothing is created yet.
    errors = ErrorTranslator(str(to))
    with errors.translated("write"):
        there = next(folder for folder in to.absolute().parents if folder.exists())
        tempfile.TemporaryFile(dir=there).close()
    with tempfile.TemporaryDirectory(prefix="trialflow-export-") as folder:
        fetch_files(store, request.manifest.uuid, entries, Path(folder))
        # Copied to the target: safetensors makes files that only their owner can read.
        weights_file = Path(folder) / f"weights{to.suffix}"
        count = _convert(Path(folder), request, weights_file)
        with errors.translated("write"):
            to.parent.mkdir(parents=True, exist_ok=True)
        with (
            errors.translated("write"),
            atomic_file(to, is_durable=True) as file,
            weights_file.open("rb") as source,
        ):
            shutil.copyfileobj(source, file, COPY_BYTES)
            _check_target(to, force)  # again: no exclusive create, as disks may have no hard links
        return count, weights_file.stat().st_size


def _convert(folder: Path, request: ExportRequest, target: Path) -> int:
    """Consolidate and write the weights of fetched files. Return the number of names."""
    # DeepSpeed logs to stdout, which is reserved for this command's result.
    with contextlib.redirect_stdout(io.StringIO()):
        from trial_core.export.weights import write_weights

        weights = _weights_of(folder, request)
    facts = {
        "trialflow.checkpoint": request.manifest.uuid,
        "trialflow.trial": request.manifest.trial,
        "trialflow.batches": str(request.manifest.progress.batches_trained),
        "trialflow.engine": str(request.engine),
        "trialflow.dtype": request.dtype,
    }
    write_weights(weights, target, facts)
    return len(weights)


def _weights_of(folder: Path, request: ExportRequest) -> Weights:
    from trial_core.controller.safe_load import Reader

    if (folder / PYTORCH_STATE).exists():
        from trial_core.pytorch.model_weights import model_weights
        from trial_core.pytorch.pytorch_adapter import PyTorchTrialAdapter

        reader = Reader(request.is_trusted, PyTorchTrialAdapter.checkpoint_classes)
        return model_weights(folder, request.engine, request.dtype, reader)
    from trial_core.deepspeed.checkpoint_engine import CHECKPOINT_CLASSES
    from trial_core.deepspeed.export.engine_weights import export_weights

    reader = Reader(request.is_trusted, CHECKPOINT_CLASSES)
    return export_weights(folder, request.engine, request.dtype, reader)
