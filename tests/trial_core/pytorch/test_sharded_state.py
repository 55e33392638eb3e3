"""Parts of tensors, as ranks write them, are joined to what the reading ranks hold."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trial_core.checkpoint.manifest import FileEntry
from trial_core.errors import CheckpointError, TrialError
from trial_core.processes.machine.memory_files import MemoryFiles
from trial_core.pytorch import sharded_state
from trial_core.pytorch.sharded_state import (
    SavedParts,
    copy_parts,
    divided,
    files_of_parts,
    joined,
    part_of,
    require_joined,
    write_parts,
)
from trial_core.rank.state_files.safe_load import Reader

WHOLE = torch.arange(35.0).reshape(7, 5)
PLACE = ("models_state_dict", 0, "weight")


def write(folder: Path, bounds: list[int]) -> SavedParts:
    """The rows of `WHOLE` between `bounds`, each part written by one rank."""
    for rank, (first, end) in enumerate(itertools.pairwise(bounds)):
        write_parts({PLACE: ((first, 0), WHOLE[first:end])}, rank, folder, MemoryFiles(0))
    return SavedParts(folder, ["models_state_dict"], Reader())


@pytest.mark.parametrize("bounds", [[0, 7], [0, 4, 7], [0, 2, 4, 6, 7], [0, 3, 3, 7]])
def test_parts_of_any_number_of_ranks_make_the_whole(tmp_path: Path, bounds: list[int]) -> None:
    """A rank's part may be empty."""
    target = torch.full((7, 5), torch.nan)
    write(tmp_path, bounds).fill(PLACE, target)
    assert torch.equal(target, WHOLE)


def test_blocks_of_two_dimensions_make_the_whole() -> None:
    """Each is copied to its place, in rows and columns."""
    target = torch.full((7, 5), torch.nan)
    blocks = [
        ((row, column), WHOLE[row : row + 4, column : column + 3])
        for row in (0, 4)
        for column in (0, 3)
    ]
    assert copy_parts(blocks, target) == 0
    assert torch.equal(target, WHOLE)


@pytest.mark.parametrize("bounds", [[(0, 2), (4, 2)], [(0, 3)]])
def test_a_part_that_is_not_one_block_is_refused(
    monkeypatch: pytest.MonkeyPatch, bounds: list[tuple[int, int]]
) -> None:
    """Otherwise its rows would be restored at other places."""

    class Strided:
        placements, device_mesh = "strided rows", WHOLE

        def to_local(self) -> torch.Tensor:
            return WHOLE[:4]

        def __create_chunk_list__(self) -> list[SimpleNamespace]:
            return [SimpleNamespace(offsets=(first, 0), sizes=(n, 5)) for first, n in bounds]

    monkeypatch.setattr(sharded_state, "DTensor", Strided)
    with pytest.raises(TrialError, match=r"divided as strided rows over .* must be one block"):
        part_of(Strided())  # type: ignore[arg-type]


def test_a_missing_part_is_refused(tmp_path: Path) -> None:
    """Its tensor is named; nothing is left at random values."""
    saved = write(tmp_path, [0, 4])
    with pytest.raises(CheckpointError, match=r"lack 15 element\(s\) of models_state_dict.0.weig"):
        saved.fill(PLACE, torch.empty(7, 5))


def test_a_state_without_sharded_tensors_is_left_as_it_is() -> None:
    """With the versions of modules that a state_dict carries."""
    state = {"models_state_dict": [torch.nn.BatchNorm1d(2).state_dict()], "other": (1, "a")}
    common, parts = divided(state)
    assert parts == {}
    assert common["other"] == (1, "a")
    kept, given = common["models_state_dict"][0], state["models_state_dict"][0]
    assert kept._metadata == given._metadata  # type: ignore[attr-defined]
    assert all(kept[name] is value for name, value in given.items())  # type: ignore[attr-defined]


def test_a_whole_tensor_fills_the_trials_own(tmp_path: Path) -> None:
    """Which may be sharded; its values never stay those of empty memory."""
    target = torch.full((7, 5), torch.nan)
    state = {"models_state_dict": [{"weight": WHOLE, "other": WHOLE[0]}]}
    filled = joined(
        state,
        SavedParts(tmp_path, [], Reader()),
        lambda place, saved: target if place == PLACE else None,
    )["models_state_dict"][0]
    assert filled["weight"] is target
    assert torch.equal(target, WHOLE)
    assert filled["other"] is state["models_state_dict"][0]["other"]


def test_a_placeholder_that_the_trial_has_no_tensor_for_is_refused(tmp_path: Path) -> None:
    """Before an optimizer would train with it."""
    state = {"optimizers_state_dict": [{"exp_avg": torch.empty(2, 3, device="meta")}]}
    left = joined(state, SavedParts(tmp_path, [], Reader()), lambda place, saved: None)
    with pytest.raises(CheckpointError, match=r"optimizers_state_dict.0.exp_avg .* \(2, 3\)"):
        require_joined(left)


@pytest.mark.parametrize(
    ("ranks", "found"), [([1], ["rank-00001"]), (None, ["rank-00001", "rank-00002"])]
)
def test_ranks_fetch_their_own_parts_or_all(ranks: list[int] | None, found: list[str]) -> None:
    """Of the kinds that are restored."""
    digest = "sha256:" + "0" * 64
    files = [
        FileEntry(path=f"shards/{kind}/rank-0000{rank}.pt", size_bytes=1, digest=digest, rank=rank)
        for kind in ("models_state_dict", "gradients")
        for rank in (1, 2)
    ]
    chosen = files_of_parts(files, ["models_state_dict"], ranks)
    assert [file.path for file in chosen] == [f"shards/models_state_dict/{n}.pt" for n in found]
