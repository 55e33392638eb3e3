"""Which settings count after a restore: what a person has changed, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from tests.support.slots import build, drive, toy_config
from trial_core.config import ExperimentConfig
from trial_core.errors import CheckpointError
from trial_core.messages import (
    BuildLoadersAndRestore,
    FetchCheckpoint,
    Fetched,
    ReadyToTrain,
    RestoredSettings,
)
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.rank.state_files.built_settings import (
    UNCHANGED,
    BuiltSettings,
    SavedSettings,
    changes_of_data,
    read_settings,
)
from trial_core.rank.state_files.settings_parts import (
    OptimizerPart,
    SavedPart,
    ScalerPart,
    SchedulePart,
    SettingsPart,
)

Trial = tuple[list[Any], list[Any]]
"""Optimizers and schedulers."""


def parameters(count: int = 1) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2)) for _ in range(count)]


def settings_of(trial: Trial) -> BuiltSettings:
    optimizers, schedulers = trial
    parts: list[SettingsPart] = [OptimizerPart(each, schedulers) for each in optimizers]
    return BuiltSettings([*parts, *(SchedulePart(each, schedulers) for each in schedulers)])


def written(settings: BuiltSettings, folder: Path) -> SavedSettings:
    """The settings as a later run reads them."""
    settings.write(folder, {})
    saved = read_settings(folder)
    assert saved is not None
    return saved


def step(trial: Trial, times: int) -> list[Any]:
    """Step, as training does; return the settings of all groups after each step."""
    seen = []
    for _ in range(times):
        for each in trial[0]:
            each.step()
        for each in trial[1]:
            each.step(*([1.0] if isinstance(each, ReduceLROnPlateau) else []))
        seen.append(groups_of(trial))
    return seen


def groups_of(trial: Trial) -> list[Any]:
    groups = [group for each in trial[0] for group in each.param_groups]
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def resumed(
    folder: Path, saved: Trial, built: Trial, steps: int = 0, keep: tuple[str, ...] = ()
) -> tuple[list[str], list[str]]:
    """Train `saved`, restore its state to `built`, and return what counts and what stays."""
    before, now = settings_of(saved), settings_of(built)
    step(saved, steps)
    file = written(before, folder)
    for old, new in zip((*saved[0], *saved[1]), (*built[0], *built[1]), strict=True):
        new.load_state_dict(deepcopy(old.state_dict()))
    now.require_same_types(file)
    told = now.apply(file, keep)
    return told.new, [*told.kept, *told.not_kept]


# ------------------------------------------------------------------------------------ optimizers


def test_changed_settings_count(tmp_path: Path) -> None:
    """Numbers, pairs and flags; what was not changed stays as training has left it."""
    saved = AdamW(parameters(), lr=0.001, betas=(0.9, 0.999), weight_decay=0.01)
    built = AdamW(parameters(), lr=0.0001, betas=(0.8, 0.999), weight_decay=0.01)
    told = resumed(tmp_path, ([saved], []), ([built], []))
    text = "optimizer 0 (AdamW): lr 0.001 -> 0.0001, betas [0.9, 0.999] -> [0.8, 0.999]"
    assert told == ([text], [])
    group = built.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.0001, (0.8, 0.999), 0.01)


def test_of_an_unchanged_experiment_all_values_stay(tmp_path: Path) -> None:
    """The run says so, also the next time; once the experiment has changed, the value counts."""
    file, told = None, []
    for rate, why_all in ((0.1, UNCHANGED), (0.2, UNCHANGED), (0.2, UNCHANGED), (0.2, "")):
        optimizer = SGD(parameters(), lr=rate)
        now = settings_of(([optimizer], []))
        if file is not None:
            optimizer.param_groups[0]["lr"] = 0.1  # as the restore does
            told.append(
                now.apply(file, keep=["optimizer.momentum"] * bool(why_all), why_all=why_all)
            )
        file = written(now, tmp_path)
    (first, second, last), stays = (
        told,
        "optimizer 0 (SGD): lr stays 0.1 (not 0.2), because neither ",
    )
    assert [each.startswith(stays) for each in first.kept] == [True]
    assert (first, first.new, first.not_kept) == (second, [], [])
    assert (last.new, last.kept) == (["optimizer 0 (SGD): lr 0.1 -> 0.2"], [])
    assert optimizer.param_groups[0]["lr"] == 0.2


def test_what_the_trial_has_moved_stays_the_checkpoints(tmp_path: Path) -> None:
    """A rate that it has set itself is no change of a person, and another setting may be."""
    saved, built = (AdamW(parameters(), lr=0.1, weight_decay=each) for each in (0.0, 0.5))
    before, now = settings_of(([saved], [])), settings_of(([built], []))
    saved.param_groups[0]["lr"] = 0.025
    built.load_state_dict(saved.state_dict())
    told = now.apply(written(before, tmp_path))
    assert told == RestoredSettings(["optimizer 0 (AdamW): weight_decay 0 -> 0.5"])
    assert (built.param_groups[0]["lr"], built.param_groups[0]["weight_decay"]) == (0.025, 0.5)


@pytest.mark.parametrize("value", [0.1, torch.tensor(0.1), math.nan, math.inf, None, "a", True])
def test_nothing_changes_if_nothing_was_changed(tmp_path: Path, value: Any) -> None:
    """Also of values that equal nothing, as NaN, or have another type in the file."""

    def trial() -> Trial:
        return [SGD([{"params": parameters(), "of": deepcopy(value)}], lr=0.1)], []

    (saved, before), (built, now) = ((each, settings_of(each)) for each in (trial(), trial()))
    saved[0][0].param_groups[0]["lr"] = 0.7
    built[0][0].load_state_dict(saved[0][0].state_dict())
    assert now.apply(written(before, tmp_path)) == RestoredSettings()
    assert repr(built[0][0].state_dict()) == repr(saved[0][0].state_dict())


def test_a_rate_in_a_tensor_stays_in_it(tmp_path: Path) -> None:
    """A captured graph reads the tensor."""
    saved, built = (AdamW(parameters(), lr=torch.tensor(each)) for each in (0.5, 0.25))
    resumed(tmp_path, ([saved], []), ([built], []))
    rate = built.param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor)
    assert rate.item() == 0.25


@pytest.mark.parametrize("value", [torch.zeros(2), print, [torch.zeros(2)], 1j])
def test_a_value_that_is_no_setting_is_left_out(tmp_path: Path, value: Any) -> None:
    """A group may hold anything."""
    for one, other in ((1, value), (value, 1)):
        saved, built = (
            SGD([{"params": parameters(), "of": each}], lr=0.1) for each in (one, other)
        )
        assert resumed(tmp_path, ([saved], []), ([built], [])) == ([], [])


def test_what_an_optimizer_counts_in_its_groups_is_no_setting(tmp_path: Path) -> None:
    """A default that is no parameter of its constructor, such as a number of steps."""

    class Counting(SGD):
        def __init__(self, params: Any, steps_at_start: int) -> None:
            super().__init__(params, 0.1)
            self.defaults["steps"] = self.param_groups[0]["steps"] = steps_at_start

    saved, built = Counting(parameters(), 7), Counting(parameters(), 0)
    assert resumed(tmp_path, ([saved], []), ([built], [])) == ([], [])
    assert built.param_groups[0]["steps"] == 7


def test_many_groups_and_optimizers_are_few_lines(tmp_path: Path) -> None:
    """Equal changes are one; what only some groups have says how many."""

    def trial(lr: float, decay: float) -> Trial:
        last = {"params": parameters(), "weight_decay": decay}
        many = [{"params": parameters()} for _ in range(99)]
        return [
            AdamW([*many, last], lr=lr, weight_decay=0.2),
            *(Adam(parameters(), lr=lr) for _ in range(200)),
            SGD(parameters(), lr=1.0),
        ], []

    assert resumed(tmp_path, trial(0.1, 0.3), trial(0.2, 0.4))[0] == [
        "optimizer 0 (AdamW): lr 0.1 -> 0.2, weight_decay 0.3 -> 0.4 in 1 of 100 groups",
        "optimizers 1, 2, 3 and 197 more (Adam): lr 0.1 -> 0.2",
    ]


@pytest.mark.parametrize("keep", ["optimizer", "optimizer.lr"])
def test_values_that_are_kept(tmp_path: Path, keep: str) -> None:
    """All of an optimizer's, or one by its name; what is kept is told."""
    saved, built = (AdamW(parameters(), lr=lr, eps=lr / 10) for lr in (0.1, 0.2))
    new, kept = resumed(tmp_path, ([saved], []), ([built], []), keep=(keep,))
    assert built.param_groups[0]["lr"] == 0.1
    assert built.param_groups[0]["eps"] == (0.01 if keep == "optimizer" else 0.02)
    assert bool(new) is (keep == "optimizer.lr")
    assert "lr stays 0.1 (not 0.2)" in kept[0]


def test_a_keep_without_effect_is_told(tmp_path: Path) -> None:
    """Of a setting that has not changed, or is a schedule's."""
    trials = [scheduled("StepLR", 8, lr) for lr in (0.1, 0.2)]
    new, not_kept = resumed(tmp_path, *trials, keep=("optimizer.lr", "scaler"))
    assert new == ["scheduler 0 (StepLR): lr 0.1 -> 0.2"]
    assert not_kept == [
        f"{each}, because it has not changed" for each in ("optimizer.lr", "scaler")
    ]


def test_another_number_of_groups_is_refused(tmp_path: Path) -> None:
    """Each has a state of its own."""
    saved, built = (
        SGD([{"params": parameters()} for _ in range(count)], lr=0.1) for count in (2, 3)
    )
    file = written(settings_of(([saved], [])), tmp_path)
    with pytest.raises(CheckpointError, match=r"optimizer 0 .* 2 parameter groups .* with 3 now"):
        settings_of(([built], [])).require_same_types(file)


@pytest.mark.parametrize("kind", ["optimizer", "scheduler"])
def test_another_class_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    """Its state means nothing to the other one; a scheduler would train at rate 0."""

    def trial(other: bool) -> Trial:
        of = (SGD if other and kind == "optimizer" else AdamW)(parameters(), lr=0.1)
        is_other = other and kind == "scheduler"
        return [of], [StepLR(of, 1) if is_other else CosineAnnealingLR(of, 4)]

    saved = written(settings_of(trial(False)), tmp_path)
    names = {"optimizer": ("AdamW", "SGD"), "scheduler": ("CosineAnnealingLR", "StepLR")}
    before, now = names[kind]
    with pytest.raises(CheckpointError, match=rf"{kind} 0 was of {before} .* built one of {now}"):
        settings_of(trial(True)).require_same_types(saved)


@pytest.mark.parametrize("counts", [(1, 0), (0, 1), (2, 1)])
def test_another_number_of_schedulers_is_refused(tmp_path: Path, counts: tuple[int, int]) -> None:
    """Without its schedule an optimizer would train on at the last rate; a new one has no state."""

    def trial(count: int) -> Trial:
        of = AdamW(parameters(), lr=0.1)
        return [of], [StepLR(of, 1) for _ in range(count)]

    saved = written(settings_of(trial(counts[0])), tmp_path)
    message = rf"saved with {counts[0]} schedulers?, and the trial has built {counts[1]}: .* Build "
    with pytest.raises(CheckpointError, match=message):
        settings_of(trial(counts[1])).require_same_counts(saved)
    settings_of(trial(counts[1])).require_same_counts(saved, ["scheduler"])


# ------------------------------------------------------------------------------------ schedulers

SCHEDULES: dict[str, Callable[[Optimizer, int], Any]] = {
    "CosineAnnealingLR": CosineAnnealingLR,
    "StepLR": lambda of, length: StepLR(of, max(1, length // 3)),
    "MultiStepLR": lambda of, length: MultiStepLR(of, [length // 4, length // 2]),
    "LinearLR": lambda of, length: LinearLR(of, total_iters=length),
    "PolynomialLR": PolynomialLR,
    "LambdaLR": lambda of, length: LambdaLR(of, lambda step: 1 / (1 + step / length)),
    "OneCycleLR": lambda of, length: OneCycleLR(of, of.param_groups[0]["lr"], total_steps=length),
    "CyclicLR": lambda of, length: CyclicLR(
        of, of.param_groups[0]["lr"] / 10, of.param_groups[0]["lr"], length, cycle_momentum=False
    ),
    "CosineAnnealingWarmRestarts": CosineAnnealingWarmRestarts,
    "SequentialLR": lambda of, length: SequentialLR(
        of, [LinearLR(of, total_iters=3), CosineAnnealingLR(of, length - 3)], [3]
    ),
    "ChainedScheduler": lambda of, length: ChainedScheduler(
        [LinearLR(of, total_iters=length), ExponentialLR(of, 0.9)]
    ),
}


def scheduled(name: str, length: int, lr: float = 0.1) -> Trial:
    optimizer = AdamW(parameters(), lr=lr)
    return [optimizer], [SCHEDULES[name](optimizer, length)]


@pytest.mark.parametrize("lr", [0.1, 0.05])
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "LambdaLR"])
def test_a_lengthened_schedule_is_as_if_it_had_always_been_so_long(
    tmp_path: Path, name: str, lr: float
) -> None:
    """Bit for bit, at its present step and after it, also with another rate to begin with."""
    resumed_trial = scheduled(name, 16, lr)
    new, kept = resumed(tmp_path, scheduled(name, 8), resumed_trial, steps=6)
    assert new, new
    assert not kept
    uninterrupted = scheduled(name, 16, lr)
    assert step(uninterrupted, 6)[-1] == groups_of(resumed_trial)
    assert step(uninterrupted, 8) == step(resumed_trial, 8)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_was_not_changed_goes_on(tmp_path: Path, name: str) -> None:
    """Bit for bit; what it has moved is no change."""
    resumed_trial = scheduled(name, 16)
    assert resumed(tmp_path, scheduled(name, 16), resumed_trial, steps=6) == ([], [])
    uninterrupted = scheduled(name, 16)
    step(uninterrupted, 6)
    assert step(uninterrupted, 8) == step(resumed_trial, 8)


@pytest.mark.parametrize("has_object", [False, True])
def test_what_a_schedule_keeps_in_mappings_counts_too(tmp_path: Path, has_object: bool) -> None:
    """The phases of a OneCycleLR; the values in an object that is a LambdaLR's function."""

    class Decay:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def __call__(self, at: int) -> float:
            return self.factor**at

    def trial(share: float) -> Trial:
        optimizer = AdamW(parameters(), lr=0.1)
        if has_object:
            return [optimizer], [LambdaLR(optimizer, Decay(share))]
        return [optimizer], [OneCycleLR(optimizer, 0.1, total_steps=16, pct_start=share)]

    resumed_trial = trial(0.6)
    (told,), kept = resumed(tmp_path, trial(0.3), resumed_trial, steps=6)
    assert ("object" if has_object else "phases") in told
    assert not kept
    uninterrupted = trial(0.6)
    assert step(uninterrupted, 6)[-1] == groups_of(resumed_trial)
    assert step(uninterrupted, 8) == step(resumed_trial, 8)


def test_a_schedule_that_is_given_its_epoch_keeps_its_constants(tmp_path: Path) -> None:
    """Its own steps would not lead to where it is."""
    (saved, before), (built, now) = (
        (each, settings_of(each))
        for each in (scheduled("CosineAnnealingWarmRestarts", length) for length in (4, 6))
    )
    for part in range(1, 8):
        saved[1][0].step(part / 4)
    built[1][0].load_state_dict(saved[1][0].state_dict())
    (told,) = now.apply(written(before, tmp_path)).kept
    assert "T_0 stays 4 (not 6)" in told
    assert "because the trial itself gives it its epoch" in told


def test_a_checkpoint_cannot_have_a_schedule_step_for_ever(tmp_path: Path) -> None:
    """The storage is not trusted."""
    saved, built = scheduled("StepLR", 8), scheduled("StepLR", 16)
    before, now = settings_of(saved), settings_of(built)
    built[1][0].load_state_dict({**saved[1][0].state_dict(), "last_epoch": 10**18})
    (told,) = now.apply(written(before, tmp_path)).kept
    assert "because it has stepped more than 10,000,000 times" in told


def test_a_schedule_that_is_over_keeps_its_length(tmp_path: Path) -> None:
    """A OneCycleLR that is made shorter than it has come cannot be brought to its step."""
    trial = scheduled("OneCycleLR", 4)
    new, (kept,) = resumed(tmp_path, scheduled("OneCycleLR", 8), trial, steps=6)
    assert new == []
    assert kept.startswith("scheduler 0 (OneCycleLR): total_steps stays 8 (not 4), phases, because")
    uninterrupted = scheduled("OneCycleLR", 8)
    step(uninterrupted, 6)
    assert step(uninterrupted, 1) == step(trial, 1)


def test_schedules_whose_past_is_unknown_keep_their_constants(tmp_path: Path) -> None:
    """One that depends on metrics, and several of one optimizer."""

    def plateau(patience: int) -> Trial:
        optimizer = SGD(parameters(), lr=0.1)
        return [optimizer], [ReduceLROnPlateau(optimizer, patience=patience)]

    def two(size: int) -> Trial:
        optimizer = SGD(parameters(), lr=0.1)
        return [optimizer], [StepLR(optimizer, size), ExponentialLR(optimizer, 0.9)]

    new, kept = resumed(tmp_path, plateau(0), plateau(9), steps=2)
    assert (new, kept) == (
        [],
        [
            "scheduler 0 (ReduceLROnPlateau): patience stays 0 (not 9), because it depends on "
            "metrics that are past"
        ],
    )
    new, (text,) = resumed(tmp_path, two(1), two(3), steps=2)
    assert new == []
    assert "step_size stays 1 (not 3), because the optimizer has several schedulers" in text


def test_a_schedule_that_the_trial_keeps_to_itself_has_moved_on(tmp_path: Path) -> None:
    """An optimizer whose groups have an initial rate has a schedule, which changes the rate."""
    saved, built = (SGD(parameters(), lr=0.1) for _ in range(2))
    schedule, _ = StepLR(saved, 1), StepLR(built, 1)
    before, now = settings_of(([saved], [])), settings_of(([built], []))
    saved.step()
    schedule.step()
    built.load_state_dict(saved.state_dict())
    assert now.apply(written(before, tmp_path)) == RestoredSettings()


# ----------------------------------------------------------------------------------- other parts


def test_a_scaler_keeps_its_scale(tmp_path: Path) -> None:
    """How it grows is the trial's; what it has found is the checkpoint's."""
    saved, built = (GradScaler("cpu", 8.0, growth_interval=each) for each in (100, 50))
    parts = [BuiltSettings([ScalerPart(each)]) for each in (saved, built)]
    saved.scale(torch.ones(1))
    saved.update(32.0)
    built.load_state_dict(saved.state_dict())
    told = parts[1].apply(written(parts[0], tmp_path))
    assert told == RestoredSettings(["scaler 0 (GradScaler): growth_interval 100 -> 50"])
    assert (built.get_scale(), built.get_growth_interval()) == (32.0, 50)


def test_a_scaler_that_is_off_has_no_settings() -> None:
    """As on a machine without an accelerator."""
    assert ScalerPart(GradScaler("cpu", enabled=False)).groups == [{}]


def test_a_switch_that_shapes_the_state_stays(tmp_path: Path) -> None:
    """With ``amsgrad`` the state of an Adam has entries that the checkpoint's has not."""
    saved, built = (Adam(parameters(), lr=0.1, amsgrad=each) for each in (False, True))
    new, kept = resumed(tmp_path, ([saved], []), ([built], []))
    assert (new, built.param_groups[0]["amsgrad"]) == ([], False)
    assert "amsgrad stays False (not True), because the optimizer's state depends" in kept[0]


@pytest.mark.parametrize("counts", [True, False])
def test_a_momentum_counts_if_there_was_one(tmp_path: Path, counts: bool) -> None:
    """Without one, the state has no momentum."""
    saved, built = (SGD(parameters(), 0.1, each) for each in (0.9 if counts else 0, 0.5))
    new, kept = resumed(tmp_path, ([saved], []), ([built], []))
    assert (bool(new), bool(kept)) == (counts, not counts)
    assert built.param_groups[0]["momentum"] == (0.5 if counts else 0)


def test_another_order_or_length_of_the_data_is_told() -> None:
    """`Loaders.count_on` tells another size of batches."""
    saved = SavedSettings([], {"batch size": 24, "samples": 240, "seed": 1})
    assert changes_of_data(saved, {"batch size": 48}) == []
    assert changes_of_data(saved, {"batch size": 24, "samples": 300, "seed": 1}) == [
        "training data: samples 240 -> 300, also for the rest of this epoch"
    ]
    assert changes_of_data(saved, {}) == []


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    """The storage is not trusted. A checkpoint without the file has no record."""
    assert read_settings(tmp_path) is None
    for content in ("[]", "{", '{"parts": [{"kind": 1}]}', '{"parts": 7}'):
        (tmp_path / "resume.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"resume\.json is not trialflow's"):
            read_settings(tmp_path)


def test_deepspeeds_classes_of_one_optimizer_continue_each_other() -> None:
    """An optimizer that is offloaded, or torch's own, has another class and the same state."""
    from trial_core.deepspeed.engine_settings import EngineOptimizer

    optimizer = AdamW(parameters())
    engine: Any = SimpleNamespace(
        basic_optimizer=optimizer, optimizer=optimizer, zero_optimization=lambda: False
    )
    part = EngineOptimizer(engine, [])
    for name in ("DeepSpeedCPUAdam", "FusedAdam", "Adam", "AdamW"):
        assert part.continues(name)
    for name in ("SGD", "DeepSpeedCPULion", "FusedLamb", "Adagrad"):
        assert not part.continues(name)


def test_parameters_that_deepspeed_copies_keep_their_places() -> None:
    """In 16 bits without ZeRO, its copies in fp32 have no names."""
    from trial_core.deepspeed.engine_settings import EngineOptimizer, require_same_order

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    first, second = ([*each.parameters()] for each in model)

    def names(*groups: Any) -> list[str]:
        copies = AdamW([torch.nn.Parameter(torch.zeros(12))])
        engine: Any = SimpleNamespace(
            basic_optimizer=copies, optimizer=SimpleNamespace(fp16_groups=groups),
            zero_optimization=lambda: False,
        )  # fmt: skip
        return [*EngineOptimizer(engine, [], [model]).parameters]

    saved = names(first, second)
    assert saved[0] == "0.weight of model 0"
    for then in (saved, [], [f"old.{each}" for each in saved]):
        require_same_order(names(first, second), then)
    with pytest.raises(CheckpointError, match=r"in another order .* loads its fp32 weights in 16"):
        require_same_order(names(second, first), saved)


@pytest.mark.parametrize("saved_norm", [1.0, "much"])
def test_clipping_is_kept_where_deepspeed_does_not_restore_it(
    tmp_path: Path, saved_norm: Any
) -> None:
    """As without ZeRO and with stage 3. What is in a checkpoint need not be a number."""
    from trial_core.deepspeed.engine_settings import engine_parts

    config, optimizer = SimpleNamespace(gradient_clipping=0.5), SimpleNamespace(clip_grad=0.5)
    engine: Any = SimpleNamespace(
        _config=config, optimizer=optimizer, fp16_enabled=lambda: False,
        gradient_clipping=lambda: config.gradient_clipping,
    )  # fmt: skip
    now = BuiltSettings(engine_parts([engine], []))
    saved = SavedPart("engine", "SimpleNamespace", [{"gradient_clipping": saved_norm}])
    told = now.apply(SavedSettings([saved]), keep=["engine"])
    is_kept = saved_norm == 1.0
    assert (config.gradient_clipping, optimizer.clip_grad) == (
        (1.0, 1.0) if is_kept else (0.5, 0.5)
    )
    assert (bool(told.kept), bool(told.not_kept)) == (is_kept, not is_kept)


@pytest.mark.slots
@pytest.mark.parametrize(
    "stage", [1, *(pytest.param(i, marks=pytest.mark.long) for i in (0, 2, 3))]
)
def test_engines_follow_the_same_rule_at_each_zero_stage(
    warm_slots: Callable[[int], SlotGroup], tmp_path: Path, stage: int
) -> None:
    """Optimizer, clipping, and a warmup's rates, which count at once."""
    slots = warm_slots(2)

    def run(decay: float, max_lr: float, clip: float) -> ExperimentConfig:
        ds_config = {
            "optimizer": {"type": "Adam", "params": {"weight_decay": decay, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": max_lr}},
            "gradient_clipping": clip,
            "zero_optimization": {"stage": stage},
        }
        return toy_config(
            tmp_path, 2, entrypoint="engine_trials:OwnConfig",
            hyperparameters={"ds_config": ds_config},
        )  # fmt: skip

    saved = drive(slots, run(0.1, 0.01, 1.0), tmp_path, persist=True)
    build(slots, run(0.3, 0.02, 0.5), tmp_path)
    uuid = saved.checkpoints[-1]
    slots.request(FetchCheckpoint(uuid=uuid, files=saved.files[uuid]), Fetched)
    ready = slots.request(BuildLoadersAndRestore(batches_trained=2, checkpoint=uuid), ReadyToTrain)
    for each in ready:
        assert each.settings.new == [
            "optimizer 0 (AdamW): weight_decay 0.1 -> 0.3",
            "scheduler 0 (WarmupLR): max_lrs 0.01 -> 0.02",
            "engine 0 (DeepSpeedEngine): gradient_clipping 1 -> 0.5",
        ]
        assert (each.settings.kept, each.settings.is_known) == ([], True)
