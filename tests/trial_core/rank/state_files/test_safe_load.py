"""Reading a checkpoint's files without running code that they hide."""

from __future__ import annotations

import datetime
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.devices import on_another_device
from trial_core.errors import CheckpointError
from trial_core.rank.state_files.safe_load import Reader


class Greeting:
    """A class that torch does not know."""

    def __init__(self, words: str) -> None:
        self.words = words


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.pt"


@pytest.mark.parametrize(
    "state",
    [
        {"loss": 0.5, "names": {"a"}, "left": range(3, 900, 7), "python": random.getstate()},
        {"when": datetime.datetime(2031, 5, 9), "for": datetime.timedelta(1), "at": Path("a/b")},
        {"generator": np.random.default_rng(1).bit_generator.state, "tensor": torch.ones(2)},
    ],
    ids=["random", "time", "generator"],
)
def test_plain_states_need_no_trust(path: Path, state: dict[str, Any]) -> None:
    """What callbacks and loaders usually save; for arrays see `test_stored_arrays`."""
    torch.save(state, path)
    assert repr(Reader().load(path)) == repr(state)
    assert Reader().unsafe_classes(path) == []


def test_the_error_names_the_unsafe_class(path: Path) -> None:
    """And both ways to allow it."""
    torch.save({"greeting": Greeting("hello")}, path)
    assert Reader().unsafe_classes(path) == [f"{__name__}.Greeting"]
    with pytest.raises(CheckpointError) as refusal:
        Reader().load(path)
    for part in ("state.pt", f"{__name__}.Greeting", "checkpointing.trusted: true", "globals(["):
        assert part in str(refusal.value)


@pytest.mark.parametrize("reader", [Reader(trusted=True), Reader(classes=[Greeting])])
def test_a_trusting_reader_constructs_other_classes(path: Path, reader: Reader) -> None:
    """All of them, or only the given ones."""
    torch.save({"greeting": Greeting("hello")}, path)
    assert reader.load(path)["greeting"].words == "hello"


def test_what_another_package_allows_is_not_numpys(path: Path) -> None:
    """torch then constructs it anywhere in the process; a checkpoint is read as before."""
    kind = np.dtype("f4")
    with torch.serialization.safe_globals([np.dtype, type(kind)]):
        torch.save({"kind": kind}, path)
        assert torch.load(path) == {"kind": kind}
        with pytest.raises(CheckpointError, match="numpy"):
            Reader().load(path)
        torch.save({"greeting": Greeting("hello"), "for": datetime.timedelta(1)}, path)
        state = Reader(classes=[Greeting]).load(path)
        assert (state["greeting"].words, state["for"]) == ("hello", datetime.timedelta(1))


def test_what_another_package_allows_stays(path: Path) -> None:
    """Also if the reader allows it itself."""
    torch.save({"for": datetime.timedelta(1)}, path)
    with torch.serialization.safe_globals([datetime.timedelta]):
        Reader().load(path)
        assert datetime.timedelta in torch.serialization.get_safe_globals()


def test_hidden_code_is_not_run(tmp_path: Path, path: Path) -> None:
    """Not even under a harmless name."""
    torch.save({"callbacks": Trap(tmp_path / "sprung")}, path)
    with pytest.raises(CheckpointError, match="can run code"):
        Reader().load(path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("trusted", [False, True])
def test_tensors_arrive_on_the_cpu(
    path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    """A rank that resumes may have saved them on another device, which is now another rank's."""
    on_another_device(monkeypatch)
    torch.save({"average": torch.tensor([1.5])}, path)
    assert Reader(trusted).load(path) == {"average": torch.tensor([1.5])}
    with pytest.raises(AssertionError, match="was loaded onto accelerator:1"):
        Reader(trusted).load(path, map_location=None)
