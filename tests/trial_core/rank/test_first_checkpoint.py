"""A run's first checkpoint is loaded back before it is uploaded."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import skip_init

from tests.support.driving import drive as drive_run
from tests.support.slots import drive, lines, toy_config
from tests.support.tensors import differing, tensors
from tests.support.whole_state import whole_state
from tests.trial_core.deepspeed.reshard.resharding import config, contents, files, resharded
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.config.sections import CheckpointingConfig
from trial_core.errors import RankFailed
from trial_core.processes.slots.fork_server import ForkServer
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.first_checkpoint import _staged, load_back
from trial_core.rank.rank_state import capture_rng, rank_state, restore_rng, write_rank_state
from trial_core.rank.state_files.safe_load import Reader
from trial_core.rank.state_files.state_guard import StateGuard
from trial_core.rank.trial.callback import PyTorchCallback
from trial_core.schedule.units import Batch

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]
SAID = "the first checkpoint was loaded back"
DIFFERS = "value(s) come back otherwise"


def engine(stage: int, **changes: Any) -> dict[str, Any]:
    """The fields of an experiment with one engine; its zero_optimization and other sections."""
    zero = {"stage": stage, **changes.pop("zero", {})}
    return {
        "entrypoint": f"engine_trials:{changes.pop('entrypoint', 'OwnConfig')}",
        "hyperparameters": {"accumulation": 3, "ds_config": {"zero_optimization": zero, **changes}},
    }


UNTESTED = {"zero_allow_untested_optimizer": True}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CASES: dict[str, dict[str, Any]] = {
    "ZeRO 0": engine(0),
    "ZeRO 1": engine(1),
    "ZeRO 2": engine(2),
    "ZeRO 3": engine(3),
    "bf16": engine(1, bf16={"enabled": True}),
    "bf16 without ZeRO": engine(0, bf16={"enabled": True}),
    "bf16, ZeRO 3": engine(3, bf16={"enabled": True}),
    "offload, ZeRO 2": engine(2, zero=OFFLOAD),
    "offload, ZeRO 3": engine(3, zero=OFFLOAD),
    "several groups": {
        "entrypoint": "topology_trials:AnyTopology", "hyperparameters": {"zero_stage": 2}
    },
    "experts": {
        "entrypoint": "engine_trials:Experts", "hyperparameters": {"accumulation": 3, "experts": 2}
    },
    "a pipeline": {"entrypoint": "parallel_trials:PipelineTrial"},
    "PyTorch": {
        "entrypoint": "pytorch_state_trials:Everything",
        "optimizations": {"aggregation_frequency": 3},
        "hyperparameters": {"global_batch_size": 8, "shuffle": True, "validation_samples": 10},
    },
    "odd states, ZeRO 1": engine(1, **UNTESTED, entrypoint="OddStates"),
    "odd states, ZeRO 3": engine(3, **UNTESTED, entrypoint="OddStates"),
    "odd states, PyTorch": {
        "entrypoint": "pytorch_state_trials:OddStates", "hyperparameters": {"global_batch_size": 4}
    },
    "buffers of each rank": engine(2, entrypoint="RankBuffers"),
    "FSDP2": {
        "entrypoint": "sharded_trials:Sharded", "optimizations": {"sharding": "fsdp2"},
        "hyperparameters": {"global_batch_size": 8},
    },
}  # fmt: skip
DEFAULT = ("ZeRO 3", "PyTorch")


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=() if each in DEFAULT else pytest.mark.long) for each in CASES],
)
def test_it_changes_nothing(warm_slots: Warm, tmp_path: Path, case: str) -> None:
    """Weights, optimizers, schedules, loss scale, random numbers, data: bit for bit as without.

    The checkpoint that is loaded back lies between two steps of an optimizer, where there are such.
    """
    slots, seen = warm_slots(2), []
    said = slots.log_dir / "rank-0.log"
    for verify in (False, True):
        folder, before = tmp_path / str(verify), said.read_text().count(SAID)
        differing_before = said.read_text().count(DIFFERS)
        fields = dict(CASES[case])
        hparams = {**fields.pop("hyperparameters", {}), "record": str(folder)}
        folder.mkdir()
        config = toy_config(
            folder, 5, scheduling_unit=2, min_checkpoint_period={"batches": 2},
            min_validation_period={"batches": 4}, checkpointing={"verify_first": verify},
            hyperparameters=hparams, **fields,
        )  # fmt: skip
        run = drive(slots, config, folder, persist=True)
        assert len(run.checkpoints) == 3
        assert said.read_text().count(SAID) - before == verify  # the first one alone
        assert said.read_text().count(DIFFERS) == differing_before
        stored = folder / "checkpoints" / "checkpoints" / run.checkpoints[-1]
        if case == "FSDP2":
            whole = whole_state(stored).items()
            content = {name: torch.as_tensor(each) for name, each in whole if each is not None}
        else:
            content = tensors(stored)
        seen.append((content, [lines(folder, "samples", rank) for rank in (0, 1)], run))
    (expected, samples, without), (found, others, run) = seen
    assert len(expected) > 7
    assert differing(expected, found) == []
    assert samples == others
    assert (run.training, run.validation) == (without.training, without.validation)


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(1)])
def test_random_numbers_are_those_without_it(tmp_path: Path, draw: Callable[[], Any]) -> None:
    """A trial's `load` may draw some."""
    adapter: Any = SimpleNamespace(
        modules=[], optimizers=[], left_out={}, callbacks={}, loads_plainly=True,
        shares_buffers=False, topology=dict, read_hook_state=lambda *_: {},
        files_read=lambda entries, *_: entries, load=lambda *_: draw(),
    )  # fmt: skip
    alone = DistributedContext(
        rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1
    )
    write_rank_state(tmp_path, 0, rank_state(2, adapter, None), Reader())
    before = capture_rng()
    load_back(adapter, alone, Reader(), tmp_path, CheckpointingConfig(verify_first=True))
    seen = draw()
    restore_rng(before)
    assert draw() == seen


def experiment(
    folder: Path, entrypoint: str, verifies: bool | None, **hparams: Any
) -> ExperimentConfig:
    """9 batches with checkpoints at 2, 4, 6, 8 and 9."""
    folder.mkdir(exist_ok=True)
    return toy_config(
        folder, 9, entrypoint=entrypoint, scheduling_unit=2, min_checkpoint_period={"batches": 2},
        checkpointing={"verify_first": verifies},
        hyperparameters={"record": str(folder), "train_samples": 50, **hparams},
    )  # fmt: skip


def test_only_the_first_one_is_loaded(warm_slots: Warm, tmp_path: Path) -> None:
    """And none by a run that has restored one."""
    entrypoint, slots = "restoring_trials:CountsLoads", warm_slots(2)
    settings = experiment(tmp_path / "a", entrypoint, None)
    first = drive(slots, settings, tmp_path / "a", persist=True)
    assert len(first.checkpoints) == 5
    assert lines(tmp_path / "a", "loads", 1) == [2]
    searcher = settings.searcher.model_copy(update={"max_length": Batch(13)})
    longer = settings.model_copy(update={"searcher": searcher})
    drive(slots, longer, tmp_path / "a", resume=first, persist=True)
    assert lines(tmp_path / "a", "loads", 1) == [2, 0]  # the restore, by an engine without steps


@pytest.mark.parametrize(
    ("wanted", "fields", "hooks", "staged_bytes", "reason"),
    [
        (None, {}, (), 10, None),
        (None, {}, (), 257 * 2**20, "it has more than 256 MiB per rank"),
        (None, {}, ("large",), 10, "it has more than 256 MiB per rank"),
        (True, {}, (), 257 * 2**20, None),
        (None, {"loads_plainly": False}, (), 10, "the trial overrides load"),
        (True, {"loads_plainly": False}, (), 10, None),
        (True, {"local_size": 1}, (), 10, "its files are on several machines"),
        (True, {}, ("on_checkpoint_save_start",), 10, "may change the state in on_checkpoint_save"),
        (True, {}, ("on_checkpoint_load_start",), 10, "may change the state in on_checkpoint_load"),
    ],
)
def test_when_it_is_left_out(
    tmp_path: Path,
    wanted: bool | None,
    fields: dict[str, Any],
    hooks: tuple[str, ...],
    staged_bytes: int,
    reason: str | None,
) -> None:
    """By itself, it is small and runs no code of the trial. Some cases cannot be loaded at all."""
    with (tmp_path / "shard").open("wb") as file:
        file.truncate(staged_bytes)
    callback = type("Own", (PyTorchCallback,), {hook: lambda *_: None for hook in hooks})()
    ranks: Any = SimpleNamespace(local_size=2, get_size=lambda: 2, get_rank=lambda: 0)
    adapter: Any = SimpleNamespace(callbacks={"own": callback}, loads_plainly=True)
    for name, value in fields.items():
        setattr(ranks if hasattr(ranks, name) else adapter, name, value)
    modules = [skip_init(torch.nn.Linear, 1, 2**26)] if hooks == ("large",) else []
    guard = StateGuard(modules, [])
    found = _staged(adapter, ranks, tmp_path, wanted, guard)
    if reason is None:
        assert [file.path for file in found] == ["shard"]  # type: ignore[union-attr]
    else:
        assert reason in found


@pytest.fixture
def runs(warm_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for all files of runs. The warm fork server starts their ranks, and stays."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(
        "trial_core.driver.placement.ForkServer", lambda *_: nullcontext(warm_server)
    )
    return tmp_path


def test_a_checkpoint_that_cannot_be_restored_ends_the_run(runs: Path) -> None:
    """At the first one, without a restart and without storing it, and says what is wrong."""
    config = toy_config(
        runs, 9, entrypoint="restoring_trials:Unrestorable", max_restarts=3, scheduling_unit=2,
        min_checkpoint_period={"batches": 2},
    )  # fmt: skip
    with pytest.raises(
        RankFailed, match=r"the first checkpoint of this run cannot be restored.*AssertionError"
    ):
        drive_run(config)
    assert CheckpointStore(config.checkpoint_storage.url).list() == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), (1, 2)],
    ids=["2 to 1", "1 to 2"],
)
def test_a_trial_that_adds_files_is_resharded(
    warm_slots: Warm, tmp_path: Path, before: int, after: int
) -> None:
    """Its overrides of save and load call super, and read their own files after that."""
    settings = config(tmp_path, 3, 2).model_copy(
        update={"entrypoint": "restoring_trials:AddsFiles"}
    )
    run = drive(warm_slots(before), settings, tmp_path / "first", persist=True)
    again = resharded(warm_slots(after), settings, tmp_path / "again", run)
    expected, seen = (
        contents(files(tmp_path, each.checkpoints[-1]), tmp_path / f"named-{index}")
        for index, each in enumerate((run, again))
    )
    assert differing(expected[0], seen[0]) == []
    assert differing(expected[1], seen[1]) == []


@pytest.mark.long
def test_a_load_without_super_is_refused(runs: Path) -> None:
    """On another number of ranks, with the method that has to call it."""
    for slots, batches in ((2, 3), (1, 6)):
        settings = toy_config(
            runs, batches, entrypoint="restoring_trials:LoadsAlone",
            resources={"slots_per_trial": slots},
        )  # fmt: skip
        if slots == 2:
            drive_run(settings)
        else:
            with pytest.raises(RankFailed, match=r"LoadsAlone\.load does not call super"):
                drive_run(settings)
