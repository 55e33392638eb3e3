"""Reading a checkpoint's files without running what is hidden in them."""

from __future__ import annotations

import datetime
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trial_core.controller.safe_load import Reader, unreadable_classes
from trial_core.errors import CheckpointError


class Greeting:
    """A class that torch knows nothing of."""

    def __init__(self, words: str) -> None:
        self.words = words


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "state",
    [
        {"loss": np.float32(0.5), "history": np.arange(3), "names": {"a", "b"}},
        {"python": random.getstate(), "numpy": np.random.RandomState(1).get_state()},
        {"when": datetime.datetime(2031, 5, 9), "for": datetime.timedelta(1), "at": Path("a/b")},
        {"generator": np.random.default_rng(1).bit_generator.state, "tensor": torch.ones(2)},
    ],
    ids=["numpy", "random", "time", "generator"],
)
def test_plain_states_are_read(tmp_path: Path, state: dict[str, Any]) -> None:
    """What callbacks and loaders usually remember needs no trust."""
    torch.save(state, tmp_path / "state.pt")
    assert repr(Reader().load(tmp_path / "state.pt")) == repr(state)
    assert unreadable_classes(tmp_path / "state.pt") == []


def test_other_classes_are_refused_by_name(tmp_path: Path) -> None:
    """The error names the class and both ways of allowing it."""
    torch.save({"greeting": Greeting("hello")}, tmp_path / "state.pt")
    assert unreadable_classes(tmp_path / "state.pt") == [f"{__name__}.Greeting"]
    with pytest.raises(CheckpointError) as refusal:
        Reader().load(tmp_path / "state.pt")
    for words in ("state.pt", f"{__name__}.Greeting", "checkpointing.trusted: true"):
        assert words in str(refusal.value)


def test_a_trusted_checkpoint_may_hold_anything(tmp_path: Path) -> None:
    """Who has said so gets their objects back."""
    torch.save({"greeting": Greeting("hello")}, tmp_path / "state.pt")
    read = Reader(trusted=True).load(tmp_path / "state.pt")
    assert read["greeting"].words == "hello"


def test_nothing_hidden_in_a_file_is_run(tmp_path: Path) -> None:
    """Not even where it is named as something harmless."""
    torch.save({"callbacks": Trap(tmp_path / "sprung")}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match="can run code"):
        Reader().load(tmp_path / "state.pt")
    assert not (tmp_path / "sprung").exists()
