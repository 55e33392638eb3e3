"""Copies of a snapshot that a thread makes while training continues."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils.serialization import config as serialization

from tests.support.fake_accelerator import fake_accelerator
from trial_core.errors import CheckpointRefused, WeightsChanged
from trial_core.processes.machine.memory_files import MemoryFiles
from trial_core.rank import training as loop
from trial_core.rank.collectives import accelerator
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.state_files.late_copies import LateCopies, finish_copies, why_not_late
from trial_core.rank.state_files.tensor_files import write_tensors
from trial_core.rank.trial.callback import PyTorchCallback
from trial_core.rank.trial.context import RunInfo
from trial_core.rank.trial.optimizer_modes import with_modes
from trial_core.schedule.units import EpochLength


class Training:
    """A model with an optimizer that has stepped, and a snapshot of both.

    Attributes:
        file: the snapshot's file.
        second: another file, of the same tensors.
        seen: the file's content when it was written, before the thread's copies.
    """

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        self.model = torch.nn.Linear(300, 200)
        self.model.register_buffer("count", torch.ones(999))
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters())
        self.late, self.memory = LateCopies(), MemoryFiles(limit_bytes)
        self.file, self.second = folder / "state.pt", folder / "second.pt"
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

    @contextmanager
    def saving(self) -> Iterator[LateCopies]:
        """In the block, the file was written, and the thread has not begun."""
        self.late.begin_save()
        self.memory.begin()
        with self.late.collected(self.memory, [self.optimizer], [self.model]):
            for name in (self.file.name, self.second.name):
                self.memory.write(
                    self.file.parent, name, lambda file: write_tensors(self.state(), file)
                )
            yield self.late
        self.memory.end()

    def save(self) -> None:
        with self.saving():
            self.seen = self.file.read_bytes()


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


@pytest.fixture
def training(tmp_path: Path) -> Training:
    """After a first snapshot, which is copied at once."""
    made = Training(tmp_path)
    made.save()
    made.step()
    return made


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
        assert training.file.read_bytes() == training.second.read_bytes() == whole
        assert weight != bytes_of(training.model.weight)


def test_a_snapshot_is_copied_from_an_accelerator_beside_training(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a second stream, of the training thread's device, once all that came before is done;
    through one pinned buffer, and byte for byte what torch writes. The accelerator is a fake."""
    monkeypatch.setattr(accelerator, "HOST_BUFFER_BYTES", 4096)
    with fake_accelerator() as fake:
        fake.set_device(3)  # of this thread
        whole, weight = training.whole(), bytes_of(training.model.weight)
        with training.saving():
            at_once, fake.streams = fake.streams, []
            assert weight not in training.file.read_bytes()
        training.step()
        assert (at_once[0], {*at_once[1:]}) == ("all", {("first", 3)})  # buffers
        late = {*fake.streams[1:]}
        assert (fake.streams[0], late) == ("all", {(threading.main_thread().name, 3)})
        assert len(fake.streams) >= 2 * 3 * training.model.weight.nbytes // 2048
        assert fake.pinned_bytes == 4096
        assert fake.entered == [3]
        training.late.require_complete()
        assert training.file.read_bytes() == training.second.read_bytes() == whole
        training.save()
        training.model.weight.data.mul_(2)
        training.step()
        with pytest.raises(CheckpointRefused, match="the trial has changed weights"):
            training.late.require_complete()


def test_a_step_waits_for_the_copies(training: Training) -> None:
    stepped = threading.Event()
    weight, seen = bytes_of(training.model.weight), []

    def look() -> None:
        stepped.wait(0.5)  # is over before if the step does not wait
        seen.append(bytes_of(training.model.weight))

    with training.saving() as late:
        late.later(look, [])
    training.step()
    stepped.set()
    assert seen == [weight]
    assert training.late.waited_seconds > 0


@pytest.mark.parametrize("how", ["one element", "a version"])
def test_a_trial_that_changes_weights_between_steps_is_copied_at_once(
    tmp_path: Path, how: str
) -> None:
    """Its first snapshot, which is copied at once, is compared with its source before a step."""
    training = Training(tmp_path)
    for _ in range(2):
        whole, weight = training.whole(), training.model.weight
        training.save()
        assert training.file.read_bytes() == whole
        training.late.require_complete()
        assert not training.late.why_not
        # Before a validation or a hook, which may change weights, nothing can be learned.
        finish_copies()
        weight.data[3, 4] += 1
        training.step()
    training.save()
    if how == "one element":
        weight.data[3, 4] += 1
    else:
        with torch.no_grad():
            weight.mul_(1)
    training.step()
    assert "changes weights" in training.late.why_not


class AtEpochs(PyTorchCallback):
    def on_training_epoch_start(self, epoch_idx: int) -> None:
        pass


@pytest.mark.parametrize(
    ("callback", "why"),
    [(PyTorchCallback(), ""), (AtEpochs(), "on_training_epoch_start came between")],
)
def test_a_save_at_an_epochs_end_is_copied_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, callback: PyTorchCallback, why: str
) -> None:
    """The second one, since the first step after the first one has compared it. Unless a callback
    has the hook of an epoch's begin, which comes before that step."""
    monkeypatch.setattr(loop, "reduce_training", lambda *_: ({}, []))
    training, info, may_end = Training(tmp_path), RunInfo("toy-0000beef", {}), threading.Event()
    info.epoch = EpochLength(1, 1)
    adapter: Any = MagicMock(callbacks={"one": callback}, reports_training_metrics=False)
    adapter.train_batch = lambda *_: training.step()
    epochs = loop.TrainingLoop(
        adapter, info, None, DistributedContext.from_environment({}), False, MagicMock(),
        MagicMock(), MagicMock(), MagicMock(),
    )  # fmt: skip
    epochs.train(1)
    training.save()
    epochs.train(2)
    was_late = []
    with training.saving() as late:
        late.later(lambda: was_late.append(may_end.wait(0.5)), [])
    may_end.set()
    late.require_complete()
    assert was_late == [not why]
    assert why in late.why_unproven
    assert bool(why) == bool(late.why_unproven)


@pytest.mark.parametrize("how", ["a view", "data", "rows"])
def test_weights_that_are_changed_unseen_refuse_the_checkpoint(
    training: Training, how: str
) -> None:
    """Not by an optimizer's step. A write to some rows is known by the tensor's version."""
    weight = training.model.weight

    def change() -> None:
        with torch.no_grad():
            if how == "a view":
                weight.view(-1)[7] += 1
            elif how == "data":
                weight.data.mul_(2)
            else:
                weight[3:5] = 0

    with training.saving() as late:
        late.later(change, [])
    with pytest.raises(CheckpointRefused, match="the trial has changed weights"):
        late.require_complete()
    assert "changes weights" in training.late.why_not
    training.save()
    late.require_complete()


def test_a_small_tensor_of_a_shared_storage_is_watched(training: Training) -> None:
    """ZeRO has all weights in one; written to before they are copied, and without a version."""
    flat = torch.nn.Parameter(torch.randn(300_000))
    small = torch.nn.Parameter(flat.data[101_001:101_099])
    training.model.register_parameter("flat", flat)
    training.model.register_parameter("small", small)
    with training.saving() as late:
        small.data.mul_(0.999)
    with pytest.raises(CheckpointRefused, match="the trial has changed weights"):
        late.require_complete()


def test_trained_tensors_without_a_storage_are_copied_at_once(training: Training) -> None:
    """A sparse parameter, a layer that has not yet seen its input, and one without memory."""
    values = torch.eye(3).to_sparse()
    training.model.register_parameter("sparse", torch.nn.Parameter(values))
    training.model.add_module("lazy", torch.nn.LazyLinear(3))
    training.model.register_parameter("meta", torch.nn.Parameter(torch.empty(3, device="meta")))
    whole = training.whole()
    training.save()
    training.late.require_complete()
    assert training.file.read_bytes() == whole


@pytest.mark.parametrize("of_accelerator", [False, True])
def test_what_does_not_fit_into_memory_is_copied_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_accelerator: bool
) -> None:
    """Also the tensors whose room in memory had been reserved; from an accelerator through the
    buffer that they share with the one that did not fit."""
    monkeypatch.setattr(accelerator, "HOST_BUFFER_BYTES", 4096)
    training = Training(tmp_path, limit_bytes=400_000)
    training.model.register_buffer("longer", torch.randn(90_000))
    whole = training.whole()
    assert len(whole) > 400_000
    with fake_accelerator() if of_accelerator else nullcontext():
        for _ in range(2):
            training.save()
            assert training.file.read_bytes() == whole
            assert not training.file.is_symlink()
            training.late.require_complete()


def test_room_counts_as_taken_before_it_is_filled(tmp_path: Path) -> None:
    """Else ranks would reserve more than the machine has."""
    training = Training(tmp_path)
    size = len(training.whole())
    before = free_bytes_of(training)
    with training.saving():
        assert before - free_bytes_of(training) >= size


def free_bytes_of(training: Training) -> int:
    """Less the memory that the files of its snapshot take."""
    files = training.memory._files.values()
    return -sum(os.stat(file.path).st_blocks * 512 for file in files)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"step": lambda self: None}, "does not tell when Other steps"),
        ({"train": lambda self: None, "eval": lambda self: None}, "Other exchanges weights"),
    ],
)
def test_optimizers_whose_states_are_copied_at_once(changes: dict[str, Any], why: str) -> None:
    kind = type("Other", (torch.optim.SGD,), changes)
    weight = torch.nn.Parameter(torch.ones(2))
    other = kind([weight]) if "step" not in changes else kind.__new__(kind)
    found = why_not_late([other], with_modes([other]))
    assert why in found
    assert bool(found) == bool(why)
    assert "no optimizer" in why_not_late([], [])


def test_an_accelerator_without_streams_is_copied_from_at_once() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    with fake_accelerator() as fake:
        assert why_not_late([optimizer], []) == ""
        fake.has_streams = False
        assert "on this kind of accelerator" in why_not_late([optimizer], [])


def test_a_copy_that_fails_refuses_the_checkpoint_and_the_next_is_copied_at_once(
    training: Training,
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with training.saving() as late:
        late.later(fail, [])
    training.step()
    with pytest.raises(WeightsChanged, match="late copy has failed: RuntimeError: CUDA error"):
        late.require_complete()  # so the ranks save again
    assert "has failed" in late.why_not


def test_a_first_copy_that_fails_is_not_taken_for_a_change_by_the_trial(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: out of memory")

    training = Training(tmp_path)
    with training.saving() as late:
        late.later(fail, [])
    training.step()
    assert "out of memory" in late.why_not
