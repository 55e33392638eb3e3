"""Writes an engine's whole state as a folder that DeepSpeed's ``load_checkpoint`` reads."""

from __future__ import annotations

import re
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import AUTOEP_EXPERT_KEY_PREFIX
from deepspeed.checkpoint.ds_to_universal import main as convert
from deepspeed.utils.tensor_fragment import fragment_address

from trial_core.deepspeed.fingerprints import check_exported, fingerprints_of
from trial_core.deepspeed.reshard.parameter_state import Partitions
from trial_core.deepspeed.reshard.saved_state import MODEL_STATES, OPTIMIZER_STATES, rank_files
from trial_core.errors import CheckpointError
from trial_core.rank.state_files.frozen_files import frozen_path, is_frozen_path
from trial_core.rank.state_files.safe_load import Reader

_NOT_CONVERTED = (
    AssertionError, ValueError, LookupError, RuntimeError, TypeError, AttributeError, OSError,
    re.error,
)  # fmt: skip
"""The errors of DeepSpeed's converter for a state that it does not know."""
_UNPICKLED = re.compile(r"\.pt$|rank_|^layer_")
"""In the names of files that DeepSpeed unpickles: it goes by how they begin, too."""
_KEYS = (str, int, float, bool, type(None))


def write_deepspeed(folder: Path, engine: int, target: Path, tag: str, reader: Reader) -> int:
    """Move the files of an engine to ``target/tag``; return their number.

    The `reader` reads each file first, because DeepSpeed unpickles them without limits. `folder`
    has at least the files of tag ``model{engine}``. Raises CheckpointError if a file has objects
    that the reader does not trust.
    """
    saved = folder / f"model{engine}"
    join_frozen(saved, reader)
    for file in saved.rglob("*"):
        if _UNPICKLED.search(file.name) and file.is_file():
            reader.load_mapped(file)
    target.mkdir()
    shutil.move(saved, target / tag)
    (target / "latest").write_text(tag)
    return sum(1 for file in (target / tag).rglob("*") if file.is_file())


def write_universal(folder: Path, engine: int, target: Path, tag: str, reader: Reader) -> int:
    """Like `write_deepspeed`, but as a universal checkpoint of DeepSpeed; count its weights.

    The converter unpickles files that it finds by their names, in all subfolders, and makes paths
    of the names in them. So it gets files that this process wrote, with content that the reader has
    read. Raises CheckpointError if DeepSpeed cannot convert the state, or confuses its weights; or
    a file has objects that the reader does not trust, or names that lead out of the target.
    """
    saved, source = folder / f"model{engine}", folder / f"converted{engine}"
    source.mkdir()
    contents: dict[str, Any] = {}
    for file in sorted(saved.glob("*.pt")):
        if not is_frozen_path(file):
            contents[file.name] = reader.load_mapped(file)
            _require_names_within(file.name, contents[file.name])
    # DeepSpeed's converter looks for the optimizer's states in files of ZeRO alone.
    if not any(OPTIMIZER_STATES.fullmatch(name) for name in contents):
        raise CheckpointError(
            f"engine {engine} was trained without ZeRO, whose states alone DeepSpeed converts; "
            "export --format deepspeed"
        )
    with _is_known(engine):
        for rank in {int(match[2]) for match in map(MODEL_STATES.fullmatch, contents) if match}:
            models = [contents[each.name] for _, each in rank_files(saved, MODEL_STATES, rank)]
            shards = [contents[each.name] for _, each in rank_files(saved, OPTIMIZER_STATES, rank)]
            _correct_places(models[0], [each["optimizer_state_dict"] for each in shards])
    for name, content in contents.items():
        torch.save(content, source / name)
    shutil.rmtree(saved)  # nothing that was not read is left where a name could lead
    target.mkdir()
    options = Namespace(
        input_folder=str(source), output_folder=str(target / tag), num_extract_workers=1,
        num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
    )  # fmt: skip
    with _is_known(engine):
        convert(options)
    recorded = fingerprints_of(folder, engine)
    weights = list((target / tag / "zero").rglob("fp32.pt"))
    for file in weights:
        saved = torch.load(file, mmap=True)
        tensor = saved["param"] if isinstance(saved, dict) else saved
        name = file.parent.relative_to(target / tag / "zero").as_posix()
        check_exported(recorded, {name: tensor})
    return len(weights)


@contextmanager
def _is_known(engine: int) -> Iterator[None]:
    """Inside the block, a state that DeepSpeed's converter does not know is a CheckpointError."""
    try:
        yield
    except _NOT_CONVERTED as error:
        raise CheckpointError(
            f"DeepSpeed cannot convert engine {engine} to a universal checkpoint "
            f"({type(error).__name__}: {error}); export --format deepspeed"
        ) from error


def _correct_places(model: Mapping[str, Any], shards: Sequence[Any]) -> None:
    """Correct where each parameter is in the shards, if they have ``round_robin_gradients``.

    ZeRO 1 and 2 then lay out the parameters in another order, but DeepSpeed 0.19.8 saves the places
    that they would have without it, unless each has a padding.
    """
    zero = model.get("ds_config", {}).get("zero_optimization")
    is_on = isinstance(zero, Mapping) and zero.get("round_robin_gradients")
    paddings = shards[0].get("param_alignment_paddings")  # of ZeRO 1 and 2 alone
    if not is_on or paddings is None:
        return
    partitions = Partitions(model["param_shapes"], paddings, len(shards), is_zero3=False)
    sizes = [flat.numel() for flat in shards[0]["single_partition_of_fp32_groups"]]
    for rank, shard in enumerate(shards):
        shard["param_slice_mappings"] = [
            {
                each.name: fragment_address(numel=each.count, start=each.offset)
                for each in partitions.fragments(buffer, rank, size)
            }
            for buffer, size in enumerate(sizes)
        ]


def _require_names_within(file: str, content: Any) -> None:
    """Check the names in a file, of which DeepSpeed makes paths. Raises CheckpointError."""
    for name in _names(content):
        is_path = isinstance(name, str) and (
            name.startswith("/") or ".." in name.split("/") or bool({*"*?[\0"} & {*name})
        )
        if is_path or type(name) not in _KEYS:
            raise CheckpointError(
                f"{file} names something {name!r}, and DeepSpeed would make a path of it that may "
                "lead outside of the export; expected names of weights, such as layer.0.weight. "
                "Whoever wrote this checkpoint is not to be trusted, or the model names its parts "
                "like paths: export --format deepspeed or --to model.safetensors"
            )


def _names(value: Any) -> Iterator[Any]:
    """All keys in a file at any depth, and the names that DeepSpeed makes keys of."""
    if isinstance(value, dict):
        for key, each in dict.items(value):  # a pickle can give a Counter another `items`
            yield from key if type(key) is tuple else (key,)
            if key == AUTOEP_EXPERT_KEY_PREFIX:
                yield each
            yield from _names(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _names(each)


def join_frozen(folder: Path, reader: Reader) -> None:
    """Put frozen weights into the files where DeepSpeed expects them."""
    for file in sorted(folder.glob("*.pt")):
        if (beside := frozen_path(file)).exists():
            content = reader.load(file)
            file.unlink()  # it may be another one's, too
            torch.save(content, file)
            beside.unlink()
