"""The sharded tensors of a `PyTorchTrial`'s state in checkpoints.

With FSDP2 a tensor is divided among the ranks, and each rank writes its parts, as
``shards/{kind}/rank-00000.pt``: offset and values by the tensor's keys in the state. In
``state_dict.pth`` a placeholder stands there, a tensor without data (on the device "meta").

Any number of ranks can join the parts: each copies the overlap with its own part, or the whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trial_core.checkpoint.manifest import FileEntry
from trial_core.errors import CheckpointError, TrialError
from trial_core.processes.machine.memory_files import MemoryFiles
from trial_core.rank.state_files.frozen_files import KeyPath, frozen_path, replaced
from trial_core.rank.state_files.safe_load import Reader
from trial_core.rank.state_files.tensor_files import write_tensors

SHARDS_FOLDER = "shards"

Part = tuple[tuple[int, ...], torch.Tensor]
"""A part of a tensor: the offset in each dimension, and the values."""

Targets = Callable[[KeyPath, torch.Tensor], torch.Tensor | None]
"""For a key path and the tensor there: an empty tensor to fill, sharded or not; None: leave it."""


# ----------------------------------------------------------------------------------- writing


def divided(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[KeyPath, Part]]:
    """`state` with placeholders for its sharded tensors, and this rank's parts of these."""
    parts: dict[KeyPath, Part] = {}

    def take_out(keys: KeyPath, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        parts[keys] = part_of(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    return replaced(dict(state), take_out), parts


def part_of(tensor: torch.Tensor) -> Part:
    """This rank's part of a tensor, which shares memory with it. A plain tensor is one part.

    Raises TrialError if this rank's part is not a single block.
    """
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tensor.detach()
    with torch.no_grad():
        values = tensor.to_local()
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(values.shape):
        raise TrialError(
            f"checkpoints cannot hold a tensor that is divided as {tensor.placements} over a "
            f"device mesh of {tuple(tensor.device_mesh.shape)} ranks: a rank's part must be one "
            "block. Shard over one dimension"
        )
    return tuple(chunks[0].offsets), values


def write_parts(
    parts: Mapping[KeyPath, Part],
    rank: int,
    folder: Path,
    memory_files: MemoryFiles,
    frozen: Collection[KeyPath] = (),
) -> None:
    """Write this rank's parts: a file for each kind, which is the first key, and one for frozen."""
    files: dict[str, dict[KeyPath, Part]] = defaultdict(dict)
    for keys, part in parts.items():
        path = Path(SHARDS_FOLDER, str(keys[0]), file_name(rank))
        files[(frozen_path(path) if keys in frozen else path).as_posix()][keys] = part
    for name, content in files.items():
        memory_files.write(folder, name, partial(write_tensors, content))


# ----------------------------------------------------------------------------------- reading


class SavedParts:
    """The parts in a checkpoint's fetched files, by keys. Values stay in the files until used."""

    def __init__(self, folder: Path, kinds: Iterable[str], reader: Reader) -> None:
        self._parts: dict[KeyPath, dict[tuple[int, ...], torch.Tensor]] = defaultdict(dict)
        for kind in kinds:
            for path in sorted((folder / SHARDS_FOLDER / kind).glob("*.pt")):
                for keys, (offset, values) in reader.load_mapped(path).items():
                    self._parts[keys][tuple(offset)] = values

    def __contains__(self, keys: KeyPath) -> bool:
        return keys in self._parts

    def memory(self, keys: KeyPath) -> Hashable:
        """Where a tensor's parts are in memory: the same for the names of tied weights."""
        return frozenset(
            (offset, part.shape, part.dtype, part.data_ptr())
            for offset, part in self._parts.get(keys, {}).items()
        )

    def fill(self, keys: KeyPath, target: torch.Tensor) -> None:
        """Copy the saved tensor to `target`: of a sharded one, this rank's part.

        Raises CheckpointError if the fetched files do not hold all of it.
        """
        missing = copy_parts(self._parts.get(keys, {}).items(), target)
        if missing:
            raise CheckpointError(
                f"the fetched shards lack {missing} element(s) of {_dotted(keys)}: the trial has "
                "sharded its models in another way than the one that saved the checkpoint. Shard "
                "them as before, or resume on another number of slots, which reads all shards"
            )


def copy_parts(parts: Iterable[Part], target: torch.Tensor) -> int:
    """Copy the overlap with this rank's part of `target`; return how many elements none holds."""
    offset, values = part_of(target)
    missing = values.numel()
    for saved_offset, saved in parts:
        spans = [
            (max(first, other), min(first + size, other + other_size))
            for first, size, other, other_size in zip(
                offset, values.shape, saved_offset, saved.shape, strict=True
            )
        ]
        if any(end <= begin for begin, end in spans):
            continue
        block = values[_slices(spans, offset)]
        block.copy_(saved[_slices(spans, saved_offset)])
        missing -= block.numel()
    return missing


def joined(state: Mapping[str, Any], saved: SavedParts, target_of: Targets) -> dict[str, Any]:
    """A `divided` or whole `state` with the tensors of `target_of`, filled from the checkpoint."""

    def fill(keys: KeyPath, tensor: torch.Tensor) -> torch.Tensor:
        target = target_of(keys, tensor)
        if target is None:
            return tensor
        if tensor.is_meta:
            saved.fill(keys, target)
        else:
            copy_parts([part_of(tensor)], target)
        return target

    filled: dict[str, Any] = replaced(dict(state), fill)
    return filled


def require_joined(state: Mapping[str, Any]) -> None:
    """Check that no placeholder is left: the optimizers' state fits the trial's parameters."""

    def check(keys: KeyPath, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            raise CheckpointError(
                f"{_dotted(keys)} of the checkpoint has the shape {tuple(tensor.shape)}, and the "
                "trial has no such parameter; resume with the models and optimizers that were saved"
            )
        return tensor

    replaced(dict(state), check)


def files_of_parts(
    files: Sequence[FileEntry], kinds: Iterable[str], ranks: Sequence[int] | None
) -> list[FileEntry]:
    """The files that hold parts of these kinds, written by `ranks` (None: by any rank)."""
    folders = {f"{SHARDS_FOLDER}/{kind}" for kind in kinds}
    paths = [Path(file_name(rank)) for rank in ranks or ()]
    names = {path.name for path in (*paths, *map(frozen_path, paths))}
    split = [(file, *file.checked_path.rpartition("/")) for file in files]
    return [
        file
        for file, folder, _, name in split
        if folder in folders and (ranks is None or name in names)
    ]


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def _slices(spans: Sequence[tuple[int, int]], offset: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(begin - first, end - first) for (begin, end), first in zip(spans, offset, strict=True)
    )


def _dotted(keys: KeyPath) -> str:
    return ".".join(map(str, keys))
