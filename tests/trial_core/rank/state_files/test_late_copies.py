"""Copies of a snapshot that a thread makes while training continues."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.serialization import config as serialization

from trial_core.errors import CheckpointRefused
from trial_core.processes.machine.memory_files import MemoryFiles
from trial_core.rank.state_files.late_copies import LateCopies, finish_copies
from trial_core.rank.state_files.tensor_files import write_tensors


class Training:
    """A model with an optimizer that has stepped, and a snapshot of both.

    Attributes:
        file: the snapshot's file.
        seen: the file's content when it was written, before the thread's copies.
    """

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        self.model = torch.nn.Linear(300, 200)
        self.model.register_buffer("count", torch.ones(999))
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters())
        self.late, self.memory = LateCopies(), MemoryFiles(limit_bytes)
        self.file = folder / "state.pt"
        self.seen = b""
        self.step()

    def step(self) -> None:
        self.model(torch.randn(5, 300)).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def whole(self) -> bytes:
        """What torch writes."""
        file = io.BytesIO()
        with serialization.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]
            torch.save(self.state(), file)
        return file.getvalue()

    def save(self) -> None:
        finish_copies()
        self.memory.begin()
        with self.late.collected(self.memory, [self.optimizer], [self.model]):
            self.memory.write(
                self.file.parent, self.file.name, lambda file: write_tensors(self.state(), file)
            )
            self.seen = self.file.read_bytes()
        self.memory.end()


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


def test_a_snapshot_has_the_state_of_its_save(training: Training) -> None:
    """Byte for byte what torch writes, though the optimizer steps at once; in reused memory, too.

    What a forward pass changes was copied before, and weights and moments were not.
    """
    for _ in range(2):
        whole, weight = training.whole(), bytes_of(training.model.weight)
        training.save()
        assert bytes_of(training.model.count) in training.seen
        assert weight not in training.seen
        training.model.count += 1
        training.step()
        training.late.require_complete()
        assert training.file.read_bytes() == whole
        assert weight != bytes_of(training.model.weight)


def test_a_step_waits_for_the_copies(training: Training) -> None:
    stepped = threading.Event()
    weight, seen = bytes_of(training.model.weight), []

    def look() -> None:
        stepped.wait(0.5)  # is over before if the step does not wait
        seen.append(bytes_of(training.model.weight))

    finish_copies()
    with training.late.collected(training.memory, [training.optimizer], [training.model]):
        training.late.later(look)
    training.step()
    stepped.set()
    assert seen == [weight]
    assert training.late.waited_seconds > 0


def test_weights_that_are_changed_unseen_refuse_the_checkpoint(training: Training) -> None:
    """Not by an optimizer's step. The next snapshot is copied at once."""
    weight = training.model.weight
    finish_copies()
    training.memory.begin()
    with training.late.collected(training.memory, [training.optimizer], [training.model]):
        training.memory.write(
            training.file.parent, "first.pt", lambda file: write_tensors({"w": torch.ones(2)}, file)
        )
        training.memory.write(
            training.file.parent, "state.pt", lambda file: write_tensors(training.state(), file)
        )
        weight.data.mul_(2)
    training.memory.end()
    with pytest.raises(CheckpointRefused, match=r"snapshot: eager"):
        training.late.require_complete()
    whole = training.whole()
    training.save()
    assert training.seen == whole
    training.late.require_complete()


def test_what_does_not_fit_into_memory_is_copied_at_once(tmp_path: Path) -> None:
    """Also the tensors whose room in memory had been reserved."""
    training = Training(tmp_path, limit_bytes=400_000)
    whole = training.whole()
    assert len(whole) > 400_000
    training.save()
    assert training.file.read_bytes() == whole
    assert not training.file.is_symlink()


def test_an_optimizer_whose_steps_are_unseen(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    class Own:
        param_groups = training.optimizer.param_groups
        state = training.optimizer.state
        state_dict = training.optimizer.state_dict

        def step(self) -> None:
            """Steps by itself."""

    training.optimizer = Own()
    whole = training.whole()
    training.save()
    training.save()
    assert training.seen == whole
    (told,) = [each.message for each in caplog.records if "Own" in each.message]
    assert "before training continues" in told
