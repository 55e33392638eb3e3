"""Random pickles over the names that the restricted reader allows."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from tests.support.pickle_fuzz import archive
from tests.support.ranks import run_ranks
from trial_core.errors import CheckpointError
from trial_core.processes.slots.rank_main import TRIAL_MODULES
from trial_core.rank.state_files.safe_load import Reader


def load(path: Path, content: bytes, reader: Reader | None = None) -> object:
    path.write_bytes(archive(content))
    return (reader or Reader()).load(path)


@pytest.mark.slots
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 500), pytest.param(1_000_000, 100_000, marks=pytest.mark.long)],
)
def test_a_pickle_is_read_or_refused(first: int, count: int) -> None:
    """Nothing else: no other exception, no crash, no attribute of a class changed."""
    program = f"from tests.support.pickle_fuzz import main; main({first}, {count})"
    (counts,) = run_ranks(program, 1, preload=TRIAL_MODULES, seconds=1800)
    assert counts.keys() == {"returned", "refused", "malformed"}, counts
    assert min(counts.values()) > count // 100, "the grammar reaches too little"


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x02", b"\x80\x02}u.", b"\x80\x02N)R.", b"\x80\x02h\x05."]
)
def test_what_is_not_a_pickle_is_refused(tmp_path: Path, content: bytes) -> None:
    """With the file's name, whatever torch raises."""
    with pytest.raises(CheckpointError, match=r"state\.pt"):
        load(tmp_path / "state.pt", content)


def test_an_error_within_torch_is_a_refusal(tmp_path: Path) -> None:
    """A storage of a number beyond 64 bits: the fuzz found it among 500,000 pickles."""
    content = b"\x80\x02ctorch.storage\nUntypedStorage\n((\x8a\x09" + bytes(7) + b"\x80\x00ttR."
    with pytest.raises(CheckpointError, match="SystemError"):
        load(tmp_path / "state.pt", content)


def test_a_short_pickle_cannot_fill_the_memory(tmp_path: Path) -> None:
    """A set of a range of 10^15 numbers."""
    size = b"\x8a\x07" + (10**15).to_bytes(7, "little")
    content = b"\x80\x02cbuiltins\nset\n(cbuiltins\nrange\n(" + size + b"tRtR."
    with pytest.raises(CheckpointError, match="range of more"):
        load(tmp_path / "state.pt", content)


def test_a_refused_file_does_not_spoil_the_next(tmp_path: Path) -> None:
    """torch keeps the sparse tensors of a file that it could not read to its end."""
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (1,))
    file = tmp_path / "state.pt"
    torch.save({"bad": sparse, "end": Path}, file)
    with pytest.raises(CheckpointError):
        Reader().load(file)
    assert not torch._utils._sparse_tensors_to_validate
    assert load(file, pickle.dumps({"a": 1}, 2)) == {"a": 1}


def test_a_pickle_does_not_change_the_members_of_an_enum(tmp_path: Path) -> None:
    """They are the process's: ZeRO's stage would be another one for all that follows."""
    pytest.importorskip("deepspeed")
    from trial_core.deepspeed.checkpoint_engine import CHECKPOINT_CLASSES, ZeroStageEnum

    reader = Reader(classes=CHECKPOINT_CLASSES)
    name = b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n"
    file = tmp_path / "state.pt"
    assert load(file, b"\x80\x02" + name + b"K\x02\x85R.", reader) is ZeroStageEnum(2)
    change = b"}X\x07\x00\x00\x00_value_K\x03sb."
    with pytest.raises(CheckpointError):
        load(file, b"\x80\x02" + name + b"K\x02\x85R" + change, reader)
    rebuild = b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n("
    arguments = name + name + b"K\x02\x85}X\x07\x00\x00\x00_value_K\x03stR."
    with pytest.raises(CheckpointError):
        load(file, rebuild + arguments, reader)
    assert [each.value for each in ZeroStageEnum] == [0, 1, 2, 3]
