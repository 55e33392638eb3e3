"""`trialflow export`: writes a checkpoint's contents for other programs: a file or a folder."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trial_core.common import text_format
from trial_core.errors import ConfigError
from trial_core.export.export_checkpoint import (
    HUB,
    MARK,
    ExportPrecision,
    ExportRequest,
    Format,
    check_target,
    export_checkpoint,
)
from trialflow.deployments.cli.experiment_options import CHECKPOINT, HERE, StoragePlace
from trialflow.deployments.cli.json_output import AsJson, print_json
from trialflow.deployments.cli.waiting import waiting


def export(
    checkpoint: Annotated[
        str | None, Parameter(help=f"{CHECKPOINT} Required unless --trial is given.")
    ] = None,
    /,
    *,
    to: Path,
    format_: Annotated[Format, Parameter(name="--format")] = "safetensors",
    trial: str | None = None,
    engine: int = 0,
    dtype: ExportPrecision = "fp32",
    max_shard_size: str = "2GB",
    push_to: str | None = None,
    force: bool = False,
    trusted: bool = False,
    place: StoragePlace = HERE,
    json_: AsJson = False,
) -> None:
    """Write the weights of a checkpoint to one file, or to a folder of another library.

    Consolidates ZeRO's shards; of a PyTorchTrial, writes one of its models. Every file is verified
    before it is loaded, and only tensors and plain data are read from it, unless --trusted is given
    or the file of --config allows more. The folder for temporary files (TMPDIR) needs space for the
    part of the checkpoint that is read, and for the result.

    For example: trialflow export best --to model.safetensors

    Args:
        to: The file to write: .safetensors, .pt or .bin; or the folder of the format.
        format_: safetensors: one file. hf: a folder that AutoModel's from_pretrained opens; LoRA is
            merged. adapter: a folder that peft's PeftModel.from_pretrained opens. deepspeed: the
            whole state of an engine, as save_checkpoint writes it. universal: that, converted by
            DeepSpeed for load_universal.
        trial: Without a checkpoint: export the latest one of this trial, which its first characters
            may name; with best: its best. Default: none.
        engine: Index of the trial's engine, or of a PyTorchTrial's model; the first is 0.
        dtype: fp32: the optimizer's weights. 16bit: the weights the model computes with.
        max_shard_size: hf: the size of its largest file.
        push_to: hf, adapter: upload the folder to this repository of a hub (HF_ENDPOINT, HF_TOKEN).
            A new one is private. Default: none.
        force: Replace an existing file or exported folder.
        trusted: Allow objects of any class, which can run code (checkpointing.trusted).
    """
    from trial_core.models.checkpoint_reference import open_checkpoint

    if push_to is not None and format_ not in HUB:
        raise ConfigError("--push-to uploads a folder; add --format hf, or adapter")
    check_target(to, format_, force)
    reference = _reference(checkpoint, trial)
    store = place.open_store()
    with waiting(f"reading {store.url}"):
        manifest = open_checkpoint(store, reference)
    is_trusted = trusted or _is_trusted(place.config)
    request = ExportRequest(manifest, engine, dtype, is_trusted, format_, max_shard_size)
    with waiting(f"exporting {manifest.uuid} to {to}") as wait:
        done = export_checkpoint(store, request, to, force, wait.bytes_read)
    pushed = None
    if push_to is not None:
        from trial_core.checkpoint.weights.write_hf_folder import push

        with waiting(f"uploading {to} to {push_to}, {text_format.size(done.size_bytes)}"):
            pushed = push(
                to, push_to, f"Checkpoint {manifest.uuid} of trial {manifest.trial}", MARK
            )
    if json_:
        result = {
            "uuid": manifest.uuid,
            "file": str(to.absolute()),
            "names": done.names,
            "size_bytes": done.size_bytes,
            "dtype": dtype,
            "engine": engine,
            "format": format_,
            "missing": done.missing,
            "pushed_to": pushed,
        }
        print_json("export", result)
    else:
        names = text_format.plural(done.names, "file" if format_ == "deepspeed" else "name")
        at = f"trial {manifest.trial}, batch {manifest.progress.batches_trained}"
        if validated := manifest.metrics.get("validation"):
            at += f", {text_format.metrics_line(validated)}"
        size = text_format.size(done.size_bytes)
        print(f"checkpoint {manifest.uuid} ({at}): {names}, {size}, in {to}")
        if pushed:
            print(f"uploaded to {pushed}")


def _reference(checkpoint: str | None, trial: str | None) -> str:
    """Return a reference to the checkpoint to export.

    Raises:
        ConfigError: none is named, or a trial in addition to a checkpoint that does not need one.
    """
    if trial is not None and checkpoint in (None, "best", "latest"):
        return f"{checkpoint or 'latest'}:{trial}"
    if checkpoint is None or trial is not None:
        raise ConfigError(
            "expected either a checkpoint (best, its uuid, or champion:MODEL) or --trial, got "
            + ("neither" if checkpoint is None else "both")
        )
    return checkpoint


def _is_trusted(config: Path | None) -> bool:
    """Return whether the file of --config sets checkpointing.trusted.

    ./experiment.yaml does not count unless it is named: a strange folder must not get its code run.
    """
    if config is None:
        return False
    from trial_core.config import ExperimentWarning, load_config

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentWarning)  # open_store has shown it
        return load_config(config, []).checkpointing.trusted
