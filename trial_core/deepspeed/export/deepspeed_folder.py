"""Writes an engine's whole state as a folder that DeepSpeed's ``load_checkpoint`` reads."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

import torch
from deepspeed.checkpoint.ds_to_universal import main as convert

from trial_core.controller.frozen_files import frozen_path
from trial_core.controller.safe_load import Reader
from trial_core.deepspeed.fingerprints import check_exported, fingerprints_of
from trial_core.errors import CheckpointError


def write_deepspeed(folder: Path, engine: int, target: Path, tag: str, reader: Reader) -> int:
    """Move the files of an engine to ``target/tag``; return their number.

    Args:
        folder: a checkpoint's verified files, at least those of tag ``model{engine}``.
        tag: DeepSpeed's name of the checkpoint, such as ``global_step500``.
        reader: reads files whose frozen weights are beside them.

    Raises:
        CheckpointError: such a file has objects that the reader does not trust.
    """
    join_frozen(folder / f"model{engine}", reader)
    target.mkdir()
    shutil.move(folder / f"model{engine}", target / tag)
    (target / "latest").write_text(tag)
    return sum(1 for file in (target / tag).rglob("*") if file.is_file())


def write_universal(folder: Path, engine: int, target: Path, tag: str, reader: Reader) -> int:
    """As `write_deepspeed`, converted to a universal checkpoint by DeepSpeed; count its weights.

    Raises:
        CheckpointError: DeepSpeed cannot convert the state, or confuses its weights; or a file has
            objects that the reader does not trust, which DeepSpeed would unpickle.
    """
    source = folder / f"model{engine}"
    join_frozen(source, reader)
    for file in sorted(source.glob("*.pt")):
        reader.load_mapped(file)
    target.mkdir()
    # DeepSpeed's converter looks for the optimizer's states in files of ZeRO alone.
    if not any(source.glob("*zero_pp_rank_*_optim_states.pt")):
        raise CheckpointError(
            f"engine {engine} was trained without ZeRO, whose states alone DeepSpeed converts; "
            "export --format deepspeed"
        )
    options = Namespace(
        input_folder=str(source), output_folder=str(target / tag), num_extract_workers=1,
        num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
    )  # fmt: skip
    try:
        convert(options)
    except (AssertionError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        raise CheckpointError(
            f"DeepSpeed cannot convert engine {engine} to a universal checkpoint "
            f"({type(error).__name__}: {error}); export --format deepspeed"
        ) from error
    recorded = fingerprints_of(folder, engine)
    weights = list((target / tag / "zero").rglob("fp32.pt"))
    for file in weights:
        saved = torch.load(file, mmap=True)
        tensor = saved["param"] if isinstance(saved, dict) else saved
        name = file.parent.relative_to(target / tag / "zero").as_posix()
        check_exported(recorded, {name: tensor})
    return len(weights)


def join_frozen(folder: Path, reader: Reader) -> None:
    """Put frozen weights into the files where DeepSpeed expects them."""
    for file in sorted(folder.glob("*.pt")):
        if (beside := frozen_path(file)).exists():
            content = reader.load(file)
            file.unlink()  # it may be another one's, too
            torch.save(content, file)
            beside.unlink()
