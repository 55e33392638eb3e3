"""Rules of the trial API, and the message for each mistake."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.slots import build, toy_config
from tests.support.toy.toy_trial import samples
from tests.trial_core.deepspeed.resuming import assert_resuming_is_bit_identical
from trial_core.checkpoint.store import CheckpointStore
from trial_core.deepspeed.load_engine import load_engine
from trial_core.errors import CheckpointDamaged, TrialError
from trial_core.messages import PersistCheckpoint, Persisted
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.pytorch import DataLoader, PyTorchCallback
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.controller import Controller
from trial_core.rank.data.loaders import build_loaders
from trial_core.rank.rank_state import read_rank_state, restore_callbacks
from trial_core.rank.training import reduce_training
from trial_core.rank.trial.context import RunInfo
from trial_core.rank.trial.custom_reducers import ReducerRegistry
from trial_core.rank.trial.metric_reduction import BatchMetrics
from trial_core.rank.validation import reduce_validation
from trial_core.trainer.entrypoint import build_adapter

Warm = Callable[[int], SlotGroup]


def alone() -> DistributedContext:
    return DistributedContext.from_environment({})


def adapter(**more: Any) -> Any:
    """The adapter of a trial on one rank that needs data and reports metrics."""
    return SimpleNamespace(
        **{
            "needs_data": True,
            "requires_reproducible_loaders": True,
            "reports_metrics": True,
            "reports_training_metrics": True,
            "micro_batches_per_batch": 1,
            "micro_batches_per_evaluation": 1,
            "data_parallel_rank": 0,
            "data_parallel_size": 1,
            "evaluates_in_lockstep": False,
            "pads_evaluation": True,
            "training_loader": lambda: DataLoader(samples(4)),
            "validation_loader": lambda: DataLoader(samples(3)),
            **more,
        }
    )


# ------------------------------------------------------------------------------------- loaders


@pytest.mark.parametrize("which", ["training", "validation"])
@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            None,
            "build_{}_data_loader returned None on a rank that needs data; return a "
            "trial_core.pytorch.DataLoader",
        ),
        (
            torch.utils.data.DataLoader(samples(3)),
            "build_{}_data_loader returned torch.utils.data.dataloader.DataLoader; return a "
            "trial_core.pytorch.DataLoader, which shards, shuffles and resumes reproducibly, or "
            "call context.disable_dataset_reproducibility_checks() to take care of that yourself",
        ),
        (
            DataLoader(samples(3), batch_size=5, drop_last=True),
            "the {} loader is empty: it has no batch at all; its dataset has no samples, or fewer "
            "than one batch with drop_last=True",
        ),
    ],
    ids=["none", "torch", "empty"],
)
def test_an_unusable_loader(which: str, loader: Any, message: str) -> None:
    """None on a rank that needs data, a loader that does not shard, and one without a batch."""
    with pytest.raises(TrialError) as refusal:
        build_loaders(adapter(**{f"{which}_loader": lambda: loader}), alone(), seed=0)
    assert str(refusal.value) == message.format(which)


@pytest.mark.parametrize(
    ("loader", "name"),
    [(itertools.cycle([1]), "cycle"), ((each for each in [1]), "generator")],
    ids=["endless", "generator"],
)
def test_a_validation_loader_that_is_an_iterator_without_a_length(loader: Any, name: str) -> None:
    """It may never end: it is refused before training, not waited for."""
    own: Any = adapter(validation_loader=lambda: loader, requires_reproducible_loaders=False)
    with pytest.raises(TrialError) as refusal:
        build_loaders(own, alone(), seed=0)
    assert str(refusal.value) == (
        f"build_validation_data_loader returned an iterator ({name}) without a length. It may "
        "never end, and a second validation would find it used up. Return an object whose __iter__ "
        "begins a new pass, such as a DataLoader or a list, or give the iterator a __len__"
    )


class Sized:
    """An iterator with a length, which is that of one pass."""

    def __init__(self, source: Any, length: int) -> None:
        self.source, self.length = source, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.source)


def test_a_validation_takes_as_many_batches_of_an_endless_loader_as_its_length() -> None:
    """And the next validation continues with the loader's next batches."""
    endless = Sized(itertools.count(), 3)
    own: Any = adapter(validation_loader=lambda: endless, requires_reproducible_loaders=False)
    validation = build_loaders(own, alone(), seed=0).validation
    for expected in ([0, 1, 2], [3, 4, 5]):
        batches = validation.begin()
        assert batches is not None
        assert [next(batches) for _ in validation.evaluations(batches, alone())] == expected


def test_a_validation_without_a_length_says_that_it_is_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No rank can know whether such a loader ever ends."""

    class Endless:
        def __iter__(self) -> Any:
            return itertools.repeat(7)

    own: Any = adapter(validation_loader=Endless, requires_reproducible_loaders=False)
    validation = build_loaders(own, alone(), seed=0).validation
    evaluations = validation.evaluations(validation.begin(), alone())
    with caplog.at_level(logging.WARNING):
        assert all(itertools.islice(evaluations, 10_000))
        assert caplog.messages == []
        assert next(evaluations)
    (message,) = caplog.messages
    assert message.startswith("this validation has evaluated 10000 batches of a loader without a")


def test_a_validation_loader_that_can_be_read_only_once() -> None:
    """A rank that needs padding reads the loader again, for one more batch."""
    read_once = Sized(iter(DataLoader(samples(3))), 3)
    own: Any = adapter(validation_loader=lambda: read_once, requires_reproducible_loaders=False)
    validation = build_loaders(own, alone(), seed=0).validation
    assert len(list(validation.begin() or ())) == 3
    with pytest.raises(TrialError, match="no validation batch left to keep in step with"):
        validation.padding_micro_batch()


# ------------------------------------------------------------------------------------- metrics


def reduce_one_batch(kind: str, metrics: BatchMetrics, of: Any) -> None:
    if kind == "training":
        reduce_training(metrics, of, alone(), with_calls=False)
    else:
        reduce_validation(metrics, of, alone())


@pytest.mark.parametrize("kind", ["training", "validation"])
def test_a_reducer_with_the_name_of_a_metric(kind: str) -> None:
    """One would hide the other."""
    reducers, metrics = ReducerRegistry(), BatchMetrics()
    reducers.wrap(len, name="accuracy")
    metrics.add_call({"loss": 1.5, "accuracy": 0.5})
    message = f"{kind} metric(s) accuracy are both returned by the trial and given by a wrapped"
    with pytest.raises(TrialError, match=re.escape(message)):
        reduce_one_batch(kind, metrics, adapter(reducers=reducers))


# ------------------------------------------------------------------------------------- engines


@pytest.mark.slots
@pytest.mark.long
def test_a_trial_may_have_two_pipelines_with_the_same_stages(
    warm_slots: Warm, tmp_path: Path
) -> None:
    """Both are trained, saved and restored."""
    stored = assert_resuming_is_bit_identical(
        warm_slots(2), tmp_path, "parallel_trials:TwoPipelines"
    )
    assert len({shard.parent.name for shard in stored.rglob("layer_*-model_states.pt")}) == 2


@pytest.mark.slots
def test_unequal_micro_batch_sizes_are_warned_of(warm_slots: Warm, tmp_path: Path) -> None:
    """They are allowed; the first engine counts."""
    slots = warm_slots(2)
    logs = [slots.log_dir / f"rank-{rank}.log" for rank in (0, 1)]
    before = [log.stat().st_size for log in logs]
    config = toy_config(tmp_path, entrypoint="bad_trials:UnequalEngines")
    assert build(slots, config, tmp_path).batch_samples == 2 * 2
    for log, offset in zip(logs, before, strict=True):
        assert (
            "engine 1 has a micro-batch size of 5, the first one has 2; batches and samples are "
            "counted by the first"
        ) in log.read_text()[offset:]


# --------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_that_deepspeed_does_not_load_is_an_error(tmp_path: Path) -> None:
    """DeepSpeed then returns None for the path, and raises nothing."""
    (tmp_path / "model0").mkdir()
    (tmp_path / "model0" / "mp_rank_00_model_states.pt").touch()
    nothing: Any = SimpleNamespace(
        load_checkpoint=lambda folder, tag: (None, {}), module=torch.nn.Identity(),
        _config=SimpleNamespace(load_universal_checkpoint=False),
        optimizer=None,
    )  # fmt: skip
    with pytest.raises(TrialError, match="DeepSpeed found no checkpoint"):
        load_engine(nothing, tmp_path, "model0")


def test_a_checkpoint_without_a_ranks_state_is_damaged(tmp_path: Path) -> None:
    """The message names the file, and says how many slots to use."""
    unused: Any = None
    with pytest.raises(CheckpointDamaged) as refusal:
        read_rank_state(tmp_path, rank=3, reader=unused)
    assert str(refusal.value) == (
        "the checkpoint has no trialflow/rank-00003.pt: was it saved with fewer ranks? Resume with "
        "the slots_per_trial that it was saved with"
    )


def test_files_that_no_checkpoint_can_have_do_not_end_the_rank(tmp_path: Path) -> None:
    """The rank reports a mistake, not a storage problem, which would be retried."""
    store = CheckpointStore(f"file://{tmp_path}/checkpoints")
    controller = Controller(build_adapter, emit=lambda _: None, distributed=alone())
    trial: Any = SimpleNamespace(
        callbacks={},
        topology=lambda: None,
        batch_samples=1,
        checkpoint_classes=(),
        setting_parts=list,
    )
    controller.attach(trial, RunInfo("toy-0000beef", {}), tmp_path, store)
    staging = tmp_path / "staging" / "some-uuid" / "rank-0"
    staging.mkdir(parents=True)
    (staging / "manifest.json").touch()
    result = controller.carry_out(PersistCheckpoint(uuid="some-uuid"))
    assert isinstance(result, Persisted)
    assert (result.files, result.problem) == ([], None)
    assert str(result.mistake).startswith("rank 0 saved a file 'manifest.json' at the top of its")


class Counts(PyTorchCallback):
    """Restores a state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("there is no state to restore")


def test_a_callback_without_saved_state_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Unless the callback restores no state."""
    saved = {"callbacks": {"other": {}}}
    restore_callbacks(saved, {"new": Counts(), "plain": PyTorchCallback()})
    assert [record.getMessage() for record in caplog.records] == [
        "the checkpoint has no state of a callback called 'new'"
    ]


# ----------------------------------------------------------------------------------- distributed


def test_torch_distributed_of_another_number_of_ranks() -> None:
    """The trial initialised it with another size: the message has both numbers."""
    two = DistributedContext(rank=0, size=2, local_rank=0, local_size=2, cross_rank=0, cross_size=1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(TrialError, match=r"was initialised for 1 ranks, but WORLD_SIZE is 2"):
            two.connect()
    finally:
        dist.destroy_process_group()
