"""Which settings of optimizers and schedulers a restore has overridden."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from tests.support.slots import build, drive, toy_config
from trial_core.config import ExperimentConfig
from trial_core.messages import BuildLoadersAndRestore, FetchCheckpoint, Fetched, ReadyToTrain
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.rank.state_files.overridden_settings import BuiltSettings

Build = Callable[[Optimizer], Any]


def parameters(count: int = 1) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2)) for _ in range(count)]


def restored(
    saved: list[Optimizer],
    built: list[Optimizer],
    saved_schedules: tuple[Any, ...] = (),
    schedules: tuple[Any, ...] = (),
) -> tuple[list[str], list[str]]:
    """What is overridden when `built` and `schedules` get the state of the saved ones."""
    settings = BuiltSettings(built, schedules)
    for before, after in zip([*saved, *saved_schedules], [*built, *schedules], strict=True):
        after.load_state_dict(deepcopy(before.state_dict()))
    return settings.overridden()


def scheduled(
    saved: Build, built: Build, lr: tuple[float, float] = (0.1, 0.1), steps: int = 2
) -> tuple[list[str], list[str]]:
    """Likewise, of an optimizer and its schedule, which has done `steps`."""
    before, after = (SGD(parameters(), each, momentum=0.9) for each in lr)
    old, new = saved(before), built(after)
    for _ in range(steps):
        before.step()
        old.step(*([1.0] if isinstance(old, ReduceLROnPlateau) else []))
    return restored([before], [after], (old,), (new,))


def test_an_optimizers_own_values_are_named_with_those_that_the_trial_gave() -> None:
    """Numbers, pairs and flags, as far as they differ."""
    saved = AdamW(parameters(), lr=0.001, betas=(0.9, 0.999), amsgrad=True)
    built = AdamW(parameters(), lr=0.0001, betas=(0.8, 0.999), amsgrad=False)
    assert restored([saved], [built]) == (
        [
            "optimizer 0 (AdamW): lr 0.001 (not 0.0001), betas [0.9, 0.999] (not [0.8, 0.999]), "
            "amsgrad True (not False)"
        ],
        [],
    )


@pytest.mark.parametrize(
    ("saved", "built"),
    [
        (0.1, 0.1),
        (torch.tensor(0.1), 0.1),
        (0.1, torch.tensor(0.1)),
        (math.nan, math.nan),
        (math.inf, math.inf),
    ],
)
def test_equal_values_are_not_overridden(saved: Any, built: Any) -> None:
    """Also as a tensor, which has the rounding of its type, and as NaN or infinite."""
    assert _of_values(saved, built) == ([], [])


@pytest.mark.parametrize(
    ("saved", "built", "text"),
    [
        (torch.tensor(0.1), torch.tensor(0.2), "of 0.1 (not 0.2)"),
        (math.nan, 0.5, "of nan (not 0.5)"),
        (math.inf, -math.inf, "of inf (not -inf)"),
        (None, "x" * 99, f"of None (not {'x' * 59}…)"),
        (0.1, 0.1000004, "of 0.1 (not 0.1000004)"),
        ("a", "", "of a (not '')"),
    ],
)
def test_values_that_differ_are_told_apart(saved: Any, built: Any, text: str) -> None:
    """With as many digits as it takes; a long one is shortened."""
    assert _of_values(saved, built) == ([f"optimizer 0 (SGD): {text}"], [])


@pytest.mark.parametrize("value", [torch.zeros(2), {"a": 1}, print, [torch.zeros(2)], 1j])
def test_a_value_that_is_no_setting_is_left_out(value: Any) -> None:
    """A group may hold anything."""
    assert _of_values(1, value) == ([], [])
    assert _of_values(value, 1) == ([], [])


def _of_values(saved: Any, built: Any) -> tuple[list[str], list[str]]:
    """Of a value in a group of its own kind, changed as a restore in place would."""
    optimizer = SGD([{"params": parameters(), "of": built}], lr=0.1)
    settings = BuiltSettings([optimizer], [])
    if isinstance(saved, torch.Tensor) and isinstance(built, torch.Tensor):
        if saved.shape == built.shape:
            built.copy_(saved)
    else:
        optimizer.param_groups[0]["of"] = saved
    return settings.overridden()


def test_what_an_optimizer_counts_in_its_groups_is_no_setting() -> None:
    """A default that is no parameter of its constructor, such as a number of steps."""

    class Counting(SGD):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, lr)
            self.defaults["steps"] = self.param_groups[0]["steps"] = 0

    saved, built = Counting(parameters()), Counting(parameters())
    saved.param_groups[0]["steps"] = 7
    assert restored([saved], [built]) == ([], [])


def test_many_groups_and_optimizers_are_few_lines() -> None:
    """Equal differences are one; what only some groups have says how many."""

    def optimizers(lr: float, decay: float) -> list[Optimizer]:
        last = {"params": parameters(), "weight_decay": decay}
        many = [{"params": parameters()} for _ in range(99)]
        return [
            AdamW([*many, last], lr=lr, weight_decay=0.2),
            *(Adam(parameters(), lr=lr) for _ in range(200)),
            SGD(parameters(), lr=1.0),
        ]

    assert restored(optimizers(0.1, 0.3), optimizers(0.2, 0.4))[0] == [
        "optimizer 0 (AdamW): lr 0.1 (not 0.2), weight_decay 0.3 (not 0.4) in 1 of 100 groups",
        "optimizers 1, 2, 3 and 197 more (Adam): lr 0.1 (not 0.2)",
    ]


SCHEDULES: dict[str, tuple[Build, Build, list[str]]] = {
    "StepLR": (
        lambda of: StepLR(of, 1, 0.5),
        lambda of: StepLR(of, 3, 0.9),
        ["scheduler 0 (StepLR): step_size 1 (not 3), gamma 0.5 (not 0.9)"],
    ),
    "CosineAnnealingLR": (
        lambda of: CosineAnnealingLR(of, 4),
        lambda of: CosineAnnealingLR(of, 8, eta_min=0.01),
        ["scheduler 0 (CosineAnnealingLR): T_max 4 (not 8), eta_min 0 (not 0.01)"],
    ),
    "OneCycleLR": (
        lambda of: OneCycleLR(of, 0.1, total_steps=4),
        lambda of: OneCycleLR(of, 0.1, total_steps=8),
        ["scheduler 0 (OneCycleLR): total_steps 4 (not 8)"],
    ),
    "MultiStepLR": (
        lambda of: MultiStepLR(of, [1, 3]),
        lambda of: MultiStepLR(of, [1, 5]),
        ["scheduler 0 (MultiStepLR): milestones [1, 3] (not [1, 5])"],
    ),
    "ReduceLROnPlateau": (
        lambda of: ReduceLROnPlateau(of, patience=0),
        lambda of: ReduceLROnPlateau(of, patience=9),
        ["scheduler 0 (ReduceLROnPlateau): patience 0 (not 9)"],
    ),
    "SequentialLR": (
        lambda of: SequentialLR(of, [StepLR(of, 1), CosineAnnealingLR(of, 4)], [1]),
        lambda of: SequentialLR(of, [StepLR(of, 1), CosineAnnealingLR(of, 8)], [2]),
        ["scheduler 0 (SequentialLR): milestones [1] (not [2]), schedulers.1.T_max 4 (not 8)"],
    ),
    "LambdaLR": (  # its functions are not saved: the trial's count
        lambda of: LambdaLR(of, lambda step: 0.5**step),
        lambda of: LambdaLR(of, lambda step: 0.9**step),
        [],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedules_own_values_are_named(name: str) -> None:
    """Those that its constructor was given; not how far it has come."""
    saved, built, expected = SCHEDULES[name]
    assert scheduled(saved, built) == ([], expected)


@pytest.mark.parametrize("name", [*SCHEDULES, "CosineAnnealingWarmRestarts"])
def test_a_schedule_that_has_moved_on_overrides_nothing(name: str) -> None:
    """Neither rates and momenta that it has set, nor its counters."""
    build = SCHEDULES[name][0] if name in SCHEDULES else _restarts
    for steps in (1, 3):
        assert scheduled(build, build, steps=steps) == ([], [])


def _restarts(optimizer: Optimizer) -> Any:
    return CosineAnnealingWarmRestarts(optimizer, 1, 2)


def test_the_rate_that_a_schedule_begins_with_is_named() -> None:
    """In the optimizer's group and in the schedule; not the rate of the moment."""

    def step(of: Optimizer) -> Any:
        return StepLR(of, 1)

    assert scheduled(step, step, lr=(0.1, 0.01)) == (
        ["optimizer 0 (SGD): initial_lr 0.1 (not 0.01)"],
        ["scheduler 0 (StepLR): base_lrs [0.1] (not [0.01])"],
    )


def test_a_schedule_that_the_trial_keeps_to_itself_has_moved_on() -> None:
    """An optimizer whose groups have an initial rate has a schedule, which changes the rate."""
    saved, built = SGD(parameters(), lr=0.1), SGD(parameters(), lr=0.1)
    schedule, _ = StepLR(saved, 1), StepLR(built, 1)
    saved.step()
    schedule.step()
    assert restored([saved], [built]) == ([], [])


def test_a_schedule_that_keeps_its_own_values_overrides_nothing() -> None:
    """DeepSpeed's ones restore a counter, and set the optimizer's rates anew."""

    class Warmup:
        def __init__(self, optimizer: Optimizer, max_lr: float, last_batch_iteration: int = -1):
            self.optimizer, self.max_lr = optimizer, max_lr
            self.last_batch_iteration = last_batch_iteration

        def step(self) -> None:
            self.last_batch_iteration += 1
            self.optimizer.param_groups[0]["lr"] = self.max_lr * self.last_batch_iteration

        def state_dict(self) -> dict[str, Any]:
            return {"last_batch_iteration": self.last_batch_iteration}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.last_batch_iteration = state["last_batch_iteration"]

    assert scheduled(lambda of: Warmup(of, 0.1), lambda of: Warmup(of, 0.2)) == ([], [])


@pytest.mark.slots
@pytest.mark.parametrize("stage", [1, *(pytest.param(i, marks=pytest.mark.long) for i in (0, 3))])
def test_an_engines_optimizer(
    warm_slots: Callable[[int], SlotGroup], tmp_path: Path, stage: int
) -> None:
    """Its settings come back at each ZeRO stage; a warmup's rates are the new config's."""
    slots = warm_slots(2)

    def run(decay: float, max_lr: float) -> ExperimentConfig:
        ds_config = {
            "optimizer": {"type": "Adam", "params": {"weight_decay": decay, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": max_lr}},
            "zero_optimization": {"stage": stage},
        }
        return toy_config(
            tmp_path, 2, entrypoint="engine_trials:OwnConfig",
            hyperparameters={"ds_config": ds_config},
        )  # fmt: skip

    saved = drive(slots, run(0.1, 0.01), tmp_path, persist=True)
    build(slots, run(0.3, 0.02), tmp_path)
    uuid = saved.checkpoints[-1]
    slots.request(FetchCheckpoint(uuid=uuid, files=saved.files[uuid]), Fetched)
    ready = slots.request(BuildLoadersAndRestore(batches_trained=2, checkpoint=uuid), ReadyToTrain)
    assert [each.overridden_optimizers for each in ready] == [
        ["optimizer 0 (AdamW): weight_decay 0.1 (not 0.3)"]
    ] * 2
    assert [each.overridden_schedulers for each in ready] == [[], []]
