"""Exports a checkpoint for other programs: its weights to a file, or to a folder.

Consolidates ZeRO's shards; of a PyTorchTrial, writes one of its models. Imports torch when it
converts, so a flow has it done in another process: `export_in_process`.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from trial_core import errors
from trial_core.checkpoint import layout
from trial_core.common import text_format
from trial_core.common.decoding import decode
from trial_core.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from trial_core.checkpoint.manifest import FileEntry, Manifest
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.checkpoint.verified_read import OnRead
    from trial_core.checkpoint.weights.weights import SavedWeight
    from trial_core.config import ExperimentConfig

ExportPrecision = Literal["fp32", "16bit"]
Format = Literal["safetensors", "hf", "adapter", "deepspeed", "universal"]
"""The first is one file, the others are folders."""
COPY_BYTES = 16 * 2**20
HUB = ("hf", "adapter")
"""The formats that a hub takes."""
FOLDERS = ("hf", "adapter", "deepspeed", "universal")
"""The formats that are folders."""
STATE = ("deepspeed", "universal")
"""The formats with the whole state of an engine."""
MARK = "trialflow_export.json"
"""The file of an exported folder that lists the exported files. Only they are replaced."""
SUFFIXES = (".safetensors", ".pt", ".bin")
PYTORCH_STATE = "state_dict.pth"
PYTORCH_FROZEN = "state_dict_frozen.pth"
"""The file that holds all models of a PyTorchTrial, or names the sharded ones."""
FINGERPRINTS = "trialflow/fingerprints-"
"""The prefix of the names of files that an export is compared with."""
PYTORCH_SHARDS = "shards/models_state_dict/"
"""The folder of the parts of sharded models."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportRequest:
    """The weights to export: of the trial's engine or PyTorchTrial's model with an index.

    Attributes:
        is_trusted: True to read objects of any class.
        shard_size: of the largest file of a folder.
    """

    manifest: Manifest
    engine: int = 0
    dtype: ExportPrecision = "fp32"
    is_trusted: bool = False
    format: Format = "safetensors"
    shard_size: str = "2GB"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("format", self.format, get_args(Format)),
            ("dtype", self.dtype, get_args(ExportPrecision)),
        ):
            if value not in known:
                raise ConfigError(f"{name}: expected {', '.join(known)}, got {value!r}")
        if self.format in STATE and self.dtype != "fp32":
            raise ConfigError(
                f"dtype {self.dtype}: has no effect with format {self.format}, which has the whole "
                "state as it was saved: leave it out"
            )
        if self.format != "hf" and self.shard_size != type(self).shard_size:
            raise ConfigError(
                f"max_shard_size {self.shard_size}: has no effect with format {self.format}; only "
                "hf divides its files: leave it out"
            )


@dataclass(frozen=True)
class Exported:
    """The result of an export. `names`: how many weights, or files of DeepSpeed's formats;
    `missing`: names of the frozen weights that the checkpoint does not hold."""

    names: int
    size_bytes: int
    missing: list[str]


class _Mark(msgspec.Struct, kw_only=True):
    """The content of `MARK`: which files in the folder are exported."""

    checkpoint: str
    trial: str
    batches: int
    format: str
    files: list[str]


def check_target(to: Path, format_: Format, force: bool) -> None:
    """Check that an export may be written to `to`. Raises ConfigError if its name does not suit the
    format, or something else is there."""
    is_folder = format_ in FOLDERS
    if not is_folder and to.suffix not in SUFFIXES:
        raise ConfigError(
            f"--to {to}: expected a name that ends in {', '.join(SUFFIXES)}; or a folder, with "
            f"--format {' or '.join(FOLDERS)}"
        )
    if not is_folder and to.is_dir():
        raise ConfigError(f"--to {to} is a folder; give the name of a file")
    if is_folder and to.is_symlink():
        raise ConfigError(f"--to {to} is a symbolic link; give the name of the folder itself")
    if is_folder and to.exists() and not to.is_dir():
        raise ConfigError(f"--to {to} is a file; --format {format_} writes a folder")
    if is_folder and to.exists() and Path.cwd().is_relative_to(to.resolve()):
        raise ConfigError(
            f"--to {to} is the working folder, or above it, and an export replaces the folder that "
            "it writes; give the name of another one"
        )
    has_content = to.exists() and not (is_folder and not any(to.iterdir()))
    if has_content and not force:
        raise ConfigError(f"--to {to} exists already; add --force to replace it")
    if has_content and is_folder:
        _check_export(to)


def _check_export(folder: Path) -> None:
    """Check that a folder holds the files of an export, and nothing else. The ConfigError names
    the files that would be lost."""
    try:
        mark = decode((folder / MARK).read_bytes(), _Mark)
    except (OSError, msgspec.MsgspecError):
        raise ConfigError(
            f"--to {folder} is not an exported folder (it has no readable {MARK}), and --force "
            "would delete what is in it; give the name of a new folder"
        ) from None
    there = {
        each.relative_to(folder).as_posix()
        for each in folder.rglob("*")
        if each.is_symlink() or not each.is_dir()
    }
    if others := sorted(there - {MARK, *mark.files}):
        raise ConfigError(
            f"--to {folder} holds more than the export of checkpoint {mark.checkpoint}, and "
            f"--force would delete it: {text_format.first_few(others)}; move that away, or give "
            "the name of a new folder"
        )


def _write_mark(folder: Path, request: ExportRequest) -> None:
    manifest = request.manifest
    files = [each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file()]
    mark = _Mark(
        checkpoint=manifest.uuid, trial=manifest.trial, batches=manifest.progress.batches_trained,
        format=request.format, files=sorted(files),
    )  # fmt: skip
    (folder / MARK).write_bytes(msgspec.json.format(msgspec.json.encode(mark), indent=1))


def export_checkpoint(
    store: CheckpointStore,
    request: ExportRequest,
    to: Path,
    force: bool = False,
    on_read: OnRead | None = None,
) -> Exported:
    """Fetch and verify a checkpoint's files, and write them in the requested format to a file
    (.safetensors, .pt or .bin) or a folder, which `force` replaces. `on_read` is called while the
    files are fetched, before they are converted.

    Raises:
        ConfigError: see `check_target`.
        CheckpointError: the checkpoint does not hold the requested content, or is damaged.
        StorageError: the storage failed, or the target cannot be written.
    """
    check_target(to, request.format, force)
    from trial_core.checkpoint.storage.local_files import atomic_file
    from trial_core.checkpoint.storage.storage_errors import ErrorTranslator
    from trial_core.checkpoint.transfer.fetch import fetch_files
    from trial_core.checkpoint.verified_read import unheard

    entries = _files_of(request.manifest, request.engine)
    # First check that the file can be written: fetching may take hours. Nothing is created yet.
    target = ErrorTranslator(str(to))
    with target.translated("write"):
        there = next(folder for folder in to.absolute().parents if folder.exists())
        tempfile.TemporaryFile(dir=there).close()
    with tempfile.TemporaryDirectory(prefix="trialflow-export-") as folder:
        uuid, fetched = request.manifest.uuid, Path(folder)
        fetch_files(store, uuid, entries, fetched, on_read=on_read or unheard)
        # Copied to the target: safetensors makes files that only their owner can read.
        written = Path(folder) / f"weights{to.suffix}"
        done = _convert(Path(folder), request, written)
        if written.is_dir():
            _write_mark(written, request)
        with target.translated("write"):
            to.parent.mkdir(parents=True, exist_ok=True)
            if written.is_dir():
                _replace_folder(written, to, lambda: check_target(to, request.format, force))
                return done
            with atomic_file(to, is_durable=True) as file, written.open("rb") as source:
                shutil.copyfileobj(source, file, COPY_BYTES)
                # again: no exclusive create, as disks may have no hard links
                check_target(to, request.format, force)
        return done


def export_in_process(config: ExperimentConfig, uuid: str, to: Path, **options: Any) -> Exported:
    """Export a checkpoint of the experiment's storage in another process, with `force`. `options`
    are fields of `ExportRequest`. Raises as `export_checkpoint`, or CheckpointError if the process
    was killed."""
    from trial_core.processes.machine.function_process import call_function

    with tempfile.TemporaryDirectory(prefix="trialflow-export-") as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        argument = {
            "config": config.model_dump(mode="json"),
            "uuid": uuid,
            "to": str(to.absolute()),
            "options": options,
        }
        here = f"{__name__}:{export_here.__name__}"
        problem = call_function(here, argument, code=Path(folder), log=log, result=answer)
        if not answer.exists():
            raise CheckpointError(f"checkpoint {uuid} is not exported to {to}: {problem}")
        given = json.loads(answer.read_text())
    if "error" in given:
        raise getattr(errors, given["error"])(given["message"])
    return Exported(**given)


def export_here(argument: Mapping[str, Any]) -> dict[str, Any]:
    """What `export_in_process` calls in the other process; returns the result or the error."""
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.config import ExperimentConfig

    config = ExperimentConfig.from_mapping(argument["config"])
    storage = config.checkpoint_storage
    store = CheckpointStore(storage.url, storage.options, config.name)
    try:
        manifest, trusted = store.open(argument["uuid"]), config.checkpointing.trusted
        request = ExportRequest(manifest, is_trusted=trusted, **argument["options"])
        return asdict(export_checkpoint(store, request, Path(argument["to"]), force=True))
    except errors.TrialflowError as error:
        known = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
        return {"error": known.__name__, "message": str(error)}


def _replace_folder(source: Path, target: Path, check: Callable[[], None]) -> None:
    """Copy a folder; `target` is replaced when the copy is complete, and `check` raises nothing."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copytree(source, partial, copy_function=shutil.copyfile)
        check()
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(folder: Path, request: ExportRequest, target: Path) -> Exported:
    if request.format in STATE:
        return _convert_state(folder, request, target)
    # DeepSpeed logs to stdout, which is reserved for this command's result.
    with contextlib.redirect_stdout(io.StringIO()):
        from trial_core.checkpoint.weights.model_files import facts_folder, read_facts
        from trial_core.checkpoint.weights.weights import read_all, write_weights

        weights = _weights_of(folder, request)
    files = folder / facts_folder(request.engine)
    facts = read_facts(files)
    missing = [name for name in facts.frozen if name not in weights]
    if request.format != "safetensors":
        if facts.hf is None:
            raise CheckpointError(
                f"checkpoint {request.manifest.uuid} holds no config of model {request.engine}: it "
                "is no model of transformers, or an earlier version of trialflow saved it; export "
                "one file: --to model.safetensors"
            )
        if missing and request.format == "hf":
            raise CheckpointError(
                f"{_not_held(missing)}, so there is no whole model; write the adapter alone "
                "with --format adapter, or what was trained with --to model.safetensors"
            )
        from trial_core.checkpoint.weights.write_hf_folder import write_adapter, write_model

        target.mkdir()
        if request.format == "adapter":
            names = write_adapter(weights, facts.hf, files, target)
        else:
            names = write_model(weights, facts.hf, files, target, request.shard_size)
        return Exported(len(names), _size_of(target), [])
    if missing:
        _logger.warning(
            "%s: load the base model first, then this file with strict=False", _not_held(missing)
        )
    about = {
        "trialflow.checkpoint": request.manifest.uuid,
        "trialflow.trial": request.manifest.trial,
        "trialflow.batches": str(request.manifest.progress.batches_trained),
        "trialflow.engine": str(request.engine),
        "trialflow.dtype": request.dtype,
    }
    write_weights(read_all(weights), target, about)
    return Exported(len(weights), target.stat().st_size, missing)


def _convert_state(folder: Path, request: ExportRequest, target: Path) -> Exported:
    if (folder / PYTORCH_STATE).exists():
        raise CheckpointError(
            f"checkpoint {request.manifest.uuid} is a PyTorchTrial's, which has no state of "
            "DeepSpeed; export its weights: --to model.safetensors"
        )
    tag = f"global_step{request.manifest.progress.batches_trained}"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from trial_core.deepspeed.checkpoint_engine import CHECKPOINT_CLASSES
        from trial_core.deepspeed.export.deepspeed_folder import write_deepspeed, write_universal
        from trial_core.rank.state_files.safe_load import Reader

        reader = Reader(request.is_trusted, CHECKPOINT_CLASSES)
        if request.format == "deepspeed":
            count = write_deepspeed(folder, request.engine, target, tag, reader)
        else:
            count = write_universal(folder, request.engine, target, f"{tag}_universal", reader)
    return Exported(count, _size_of(target), [])


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _not_held(missing: list[str]) -> str:
    return (
        f"the checkpoint does not hold {text_format.plural(len(missing), 'frozen weight')} "
        f"({text_format.first_few(missing)}), because of checkpointing.exclude_frozen_parameters"
    )


def _weights_of(folder: Path, request: ExportRequest) -> dict[str, SavedWeight]:
    from trial_core.rank.state_files.safe_load import Reader

    if (folder / PYTORCH_STATE).exists():
        from trial_core.pytorch.pytorch_adapter import PyTorchTrialAdapter
        from trial_core.pytorch.pytorch_state import model_weights

        reader = Reader(request.is_trusted, PyTorchTrialAdapter.checkpoint_classes)
        return model_weights(folder, request.engine, request.dtype, reader)
    from trial_core.deepspeed.checkpoint_engine import CHECKPOINT_CLASSES
    from trial_core.deepspeed.export.engine_weights import checked_weights

    reader = Reader(request.is_trusted, CHECKPOINT_CLASSES)
    return checked_weights(folder, request.engine, request.dtype, reader)


def _files_of(manifest: Manifest, engine: int) -> list[FileEntry]:
    """The files that hold an engine's weights, or a PyTorchTrial's. CheckpointError: there are
    none."""
    from trial_core.schedule.command import is_command

    facts = f"export{engine}/"
    names: tuple[str, ...] = (f"model{engine}/", f"{layout.VALIDATED}{engine}/", facts)
    entries = [entry for entry in manifest.files if entry.path.startswith(names)]
    if any(entry.path.endswith("model_states.pt") for entry in entries):
        return [*entries, *(each for each in manifest.files if each.path.startswith(FINGERPRINTS))]
    if any(entry.path == PYTORCH_STATE for entry in manifest.files):
        names = (PYTORCH_STATE, PYTORCH_FROZEN, PYTORCH_SHARDS, facts)
        return [entry for entry in manifest.files if entry.path.startswith(names)]
    paths = [entry.checked_path for entry in manifest.files]
    saved = {path.partition("/")[0] for path in paths if "/" in path}
    engines = sorted(name.removeprefix("model") for name in saved if name.startswith("model"))
    to_fetch = f"to fetch them: trialflow checkpoints download {manifest.uuid} --to FOLDER"
    if is_command(manifest.entrypoint):
        reason = f"a script has written its files, which no trial's format has; {to_fetch}"
    elif engines:
        reason = f"its engines are {', '.join(engines)}"
    else:
        reason = f"the trial overrides save, so only the trial can read its files; {to_fetch}"
    raise CheckpointError(
        f"checkpoint {manifest.uuid} of {manifest.entrypoint} holds no DeepSpeed weights for "
        f"engine {engine} (model{engine}/…model_states.pt): {reason}"
    )
