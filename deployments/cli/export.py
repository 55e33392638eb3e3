"""`trialflow export`: a checkpoint's weights as one file."""

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
from trial_core.errors import CheckpointError, CheckpointNotFound, ConfigError
from trialflow.deployments.cli.experiment_options import ConfigFile, Storage, open_store
from trialflow.deployments.cli.tables import AsJson

if TYPE_CHECKING:
    from trial_core.checkpoint.manifest import FileEntry, Manifest
    from trial_core.checkpoint.store import CheckpointStore

Precision = Literal["fp32", "16bit"]
COPY_BYTES = 16 * 2**20
SUFFIXES = (".safetensors", ".pt", ".bin")


@dataclass(frozen=True)
class Wanted:
    """Which weights of which checkpoint to export, and how to read them."""

    manifest: Manifest
    engine: int
    dtype: Precision
    trusted: bool


def export(
    checkpoint: str | None = None,
    /,
    *,
    to: Annotated[Path, Parameter(help="The file to write: .safetensors, or .pt or .bin.")],
    trial: Annotated[str | None, Parameter(help="Export this trial's newest checkpoint.")] = None,
    engine: Annotated[int, Parameter(help="Which of the trial's engines; the first is 0.")] = 0,
    dtype: Annotated[
        Precision,
        Parameter(help="fp32: the optimizer's weights. 16bit: those that the model runs with."),
    ] = "fp32",
    force: Annotated[bool, Parameter(help="Replace a file that is there already.")] = False,
    trusted: Annotated[
        bool,
        Parameter(help="Read objects of any class, which can run code; as checkpointing.trusted."),
    ] = False,
    config: ConfigFile = None,
    storage: Storage = None,
    json_: AsJson = False,
) -> int:
    """Write the weights of a checkpoint that DeepSpeed has saved into one file.

    ZeRO's shards are put together. Every file is verified before it is loaded, and nothing but
    tensors and plain data is read from it, unless --trusted or the experiment says otherwise.
    Needs room for the engine's part of the checkpoint in the folder for temporary files (TMPDIR).

    Parameters
    ----------
    checkpoint
        The checkpoint's uuid, or its beginning; or give --trial.
    """
    _check_target(to, force)
    if (checkpoint is None) == (trial is None):
        raise ConfigError("give either a checkpoint or --trial, and not both")
    store = open_store(config, storage)
    manifest = _find(store, checkpoint, trial)
    wanted = Wanted(manifest, engine, dtype, trusted or _is_trusted(config))
    count, size_bytes = _export(store, wanted, to, force)
    if json_:
        said = {"uuid": manifest.uuid, "file": str(to.absolute()), "names": count}
        print(json.dumps({**said, "size_bytes": size_bytes, "dtype": dtype, "engine": engine}))
    else:
        names = text_format.plural(count, "name")
        print(f"checkpoint {manifest.uuid}: {names}, {text_format.size(size_bytes)}, in {to}")
    return 0


def _check_target(to: Path, force: bool) -> None:
    if to.suffix not in SUFFIXES:
        raise ConfigError(f"--to {to}: expected a name that ends in {', '.join(SUFFIXES)}")
    if to.is_dir():
        raise ConfigError(f"--to {to}: this is a folder; give the name of a file")
    if to.exists() and not force:
        raise ConfigError(f"--to {to}: it exists already; --force replaces it")


def _find(store: CheckpointStore, checkpoint: str | None, trial: str | None) -> Manifest:
    if checkpoint is not None:
        return store.open(checkpoint)
    manifest = store.newest(trial or "")
    if manifest is None:
        raise CheckpointNotFound(f"trial {trial!r} has no checkpoint in {store.url}")
    return manifest


def _files_of(manifest: Manifest, engine: int) -> list[FileEntry]:
    """The files under the tag of an engine: all that its weights need.

    Raises:
        CheckpointError: there is none.
    """
    entries = [entry for entry in manifest.files if entry.path.startswith(f"model{engine}/")]
    if any(entry.path.endswith("model_states.pt") for entry in entries):
        return entries
    saved = {entry.path.partition("/")[0] for entry in manifest.files if "/" in entry.path}
    engines = sorted(name.removeprefix("model") for name in saved if name.startswith("model"))
    if engines:
        why = f"its engines are {', '.join(engines)}"
    else:
        why = (
            "it has been written by a save of the trial's own, whose files only the trial can "
            f"read: trialflow checkpoints download {manifest.uuid} --to FOLDER brings them"
        )
    raise CheckpointError(
        f"checkpoint {manifest.uuid} of {manifest.entrypoint} holds no weights that DeepSpeed has "
        f"saved for engine {engine} (model{engine}/…model_states.pt): {why}"
    )


def _is_trusted(config: Path | None) -> bool:
    """Whether the experiment trusts what it reads."""
    if config is None:
        return False
    from trial_core.config import IgnoredFieldWarning, load_config

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IgnoredFieldWarning)  # said when the storage was looked for
        return load_config(config, []).checkpointing.trusted


def _export(store: CheckpointStore, wanted: Wanted, to: Path, force: bool) -> tuple[int, int]:
    """Fetch, put together and write; how many names and bytes."""
    from trial_core.storage.local import whole_file
    from trial_core.storage.storage_errors import Explainer
    from trial_core.transfer.files import fetch_files

    entries = _files_of(wanted.manifest, wanted.engine)
    # Tried first: hours of fetching must not end in a file that cannot be written.
    explainer = Explainer(str(to))
    with explainer.explaining("write"):
        to.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=to.parent).close()
    with tempfile.TemporaryDirectory(prefix="trialflow-export-") as folder:
        fetch_files(store, wanted.manifest.uuid, entries, Path(folder))
        # safetensors would replace a file by one that only its owner can read: so it is copied.
        made = Path(folder) / f"weights{to.suffix}"
        count = _convert(Path(folder), wanted, made)
        with (
            explainer.explaining("write"),
            whole_file(to, is_durable=True, is_new=not force) as file,
            made.open("rb") as source,
        ):
            shutil.copyfileobj(source, file, COPY_BYTES)
        return count, made.stat().st_size


def _convert(folder: Path, wanted: Wanted, made: Path) -> int:
    """Put the weights of fetched files together, and write them; how many names."""
    # DeepSpeed writes its log to stdout, which is for this command's answer.
    with contextlib.redirect_stdout(io.StringIO()):
        from trial_core.controller.safe_load import Reader
        from trial_core.deepspeed.checkpoint_classes import CHECKPOINT_CLASSES
        from trial_core.deepspeed.export.weights_file import (
            export_weights,
            write_weights,
        )

        reader = Reader(wanted.trusted, CHECKPOINT_CLASSES)
        weights = export_weights(folder, wanted.engine, wanted.dtype, reader)
    facts = {
        "trialflow.checkpoint": wanted.manifest.uuid,
        "trialflow.trial": wanted.manifest.trial,
        "trialflow.batches": str(wanted.manifest.progress.batches_trained),
        "trialflow.engine": str(wanted.engine),
        "trialflow.dtype": wanted.dtype,
    }
    write_weights(weights, made, facts)
    return len(weights)
