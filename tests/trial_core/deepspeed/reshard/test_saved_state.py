"""Saved engines that cannot be assembled or resharded are refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from tests.support.fake_accelerator import Memory
from tests.support.toy.toy_trial import ToyTrial
from trial_core.deepspeed.deepspeed_adapter import DeepSpeedTrialAdapter
from trial_core.deepspeed.reshard import live_state as live_state_module
from trial_core.deepspeed.reshard.live_state import check_engine, zero_optimizer_state
from trial_core.deepspeed.reshard.parameter_state import MASTER
from trial_core.deepspeed.reshard.reshard_loader import is_ordered_otherwise, resharded
from trial_core.deepspeed.reshard.saved_state import SourceEngine
from trial_core.errors import CheckpointDamaged, CheckpointError, TrialError
from trial_core.rank.state_files.optimizer_load import optimizers_loaded_in_place
from trial_core.rank.state_files.parameter_order import names_of_model
from trial_core.rank.state_files.safe_load import Reader

THREE = torch.Size([3])
ONE_PARAMETER = {"param_groups": [{"params": [0]}], "state": {}}


def model(**changes: Any) -> dict[str, Any]:
    """Model states of a parameter with 3 elements, as two ranks save them."""
    return {
        "module": {"weight": torch.arange(3.0)},
        "param_shapes": [{"weight": THREE}],
        "dp_world_size": 2,
        "optimizer": None,
        **changes,
    }


def shard(rank: int, **changes: Any) -> dict[str, Any]:
    """Optimizer states of ZeRO-1; the last rank's state ends with one element of padding."""
    momentum = [torch.tensor([5.0, 6.0]), torch.tensor([7.0, 0.0])][rank]
    optimizer = {
        "group_paddings": [rank],
        "single_partition_of_fp32_groups": [[torch.arange(2.0), torch.tensor([2.0])][rank]],
        "base_optimizer_state": {
            "state": {0: {"step": torch.tensor(4.0), "exp_avg": momentum}},
            "param_groups": [{"lr": 0.5, "params": [0]}],
        },
        **changes,
    }
    return {"optimizer_state_dict": optimizer}


def source(
    folder: Path,
    model_states: dict[str, Any],
    *shards: dict[str, Any],
    target_groups: Sequence[Mapping[str, torch.Size]] = ({"weight": THREE},),
    names: Sequence[str] = (),
) -> SourceEngine:
    """The engine that saved such files."""
    contents: dict[str, Any] = {"mp_rank_00_model_states.pt": model_states}
    for rank, each in enumerate(shards):
        contents[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = each
    for name in contents:
        (folder / name).touch()
    return SourceEngine(folder, 0, target_groups, lambda path: contents[path.name], names)


def test_a_parameter_is_assembled_from_its_fragments(tmp_path: Path) -> None:
    """The elements of both ranks without padding, and the number of steps once."""
    weight = source(tmp_path, model(), shard(0), shard(1)).parameters["weight"]
    assert weight.full_tensor(MASTER).tolist() == [0, 1, 2]
    assert weight.full_tensor("exp_avg").tolist() == [5, 6, 7]
    assert weight.scalars == {"step": 4.0}


def test_a_missing_shard_is_damage(tmp_path: Path) -> None:
    """The error tells how many shards there are, and how many were saved."""
    with pytest.raises(CheckpointDamaged, match="the shards of 1 data-parallel ranks, but 2"):
        source(tmp_path, model(), shard(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_optimizer_state": []}, "elastic_checkpoint, which does not keep"),
        (
            {
                "base_optimizer_state": {
                    "state": {0: {"row": torch.zeros(1)}},
                    "param_groups": [{"params": [0]}],
                }
            },
            r"the optimizer's row has shape \(1,\) for 2 elements; only a scalar or one value",
        ),
    ],
)
def test_a_state_that_is_not_per_element_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """An optimizer's state is never cut where it cannot be."""
    with pytest.raises(CheckpointError, match=message):
        source(tmp_path, model(), shard(0, **changes), shard(1, **changes))


@pytest.mark.parametrize(
    ("target_groups", "message"),
    [
        ([{"weight": THREE}, {}], "had 1 groups of parameters when .* saved, and has 2 now"),
        ([{}], "weight was in group 0 of the optimizer when .* saved, and is not trained now"),
        ([{"weight": THREE, "bias": THREE}], "bias was not trained when .* saved, and is in"),
        ([{"weight": torch.Size([2])}], r"shape \(3,\) in the checkpoint, and \(2,\) now"),
    ],
)
def test_parameters_of_another_model_are_refused(
    tmp_path: Path, target_groups: list[dict[str, torch.Size]], message: str
) -> None:
    """The error names the first parameter whose group or shape differs."""
    with pytest.raises(CheckpointError, match=message):
        source(tmp_path, model(), shard(0), shard(1), target_groups=target_groups)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"fp32_groups": []}}, "saved without ZeRO in 16 bits"),
        ({"optimizer": {"param_groups": [{"params": [0, 1]}], "state": {}}}, "had 2 parameters"),
        ({"optimizer": {"param_groups": [], "state": {}}}, "had 0 groups of parameters"),
        (
            {"optimizer": {**ONE_PARAMETER, "state": {0: {"row": torch.zeros(1)}}}},
            "the optimizer's row of weight does not have the parameter's shape",
        ),
        ({"optimizer": ONE_PARAMETER, "module": {}}, "the checkpoint has no parameter weight"),
        ({"optimizer": ONE_PARAMETER, "module": None}, "saved without ZeRO by a pipeline"),
    ],
)
def test_a_state_without_zero_that_does_not_match_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """This state has indices in place of names, so it must match the parameters' order."""
    with pytest.raises(CheckpointError, match=message):
        source(tmp_path, model(**changes))


@pytest.mark.parametrize(
    ("names", "moments"),
    [
        (["frozen", "b", "a"], {"a": 2, "b": 1}),
        (["frozen", "old", "a"], {"a": 2, "b": 1}),
        ([], {"a": 1, "b": 2}),
        (["a"], {"a": 1, "b": 2}),
    ],
)
def test_a_state_without_zero_goes_by_names(
    tmp_path: Path, names: list[str], moments: dict[str, int]
) -> None:
    """If they are known: the parameters may have another order now."""
    states = {i: {"exp_avg": torch.full((3,), float(i))} for i in (1, 2)}
    optimizer = {"param_groups": [{"params": [0, 1, 2]}], "state": states}
    saved = model(module=dict.fromkeys("ab", torch.zeros(3)), optimizer=optimizer)
    found = source(
        tmp_path, saved, target_groups=[dict.fromkeys("ab", THREE)], names=names
    ).parameters
    assert {name: int(found[name].full_tensor("exp_avg")[0]) for name in found} == moments


def test_names_are_those_of_one_model() -> None:
    """A trial may have several, not all of them with an optimizer."""
    saved = [["a of model 1", "b of model 1"], [], ["a of model 11"]]
    assert [names_of_model(saved, i) for i in (0, 1, 11)] == [[], ["a", "b"], ["a"]]


ORDERS: list[tuple[list[str], list[str], bool]] = [
    (["ab", "c"], ["ab", "c"], False),
    (["ab", "c"], ["ba", "c"], True),
    (["ab", "c"], ["ax", "c"], False),  # renamed
    (["ab", "c"], ["xa", "c"], True),
    (["ab", "c"], ["af", "c"], False),
    (["af", "c"], ["ab", "c"], True),  # f is frozen now, and b no more
    (["ab", "c"], ["a", "bc"], True),  # other groups, or sub-groups of ZeRO-3
    (["ab", "c"], ["abc"], True),
]


@pytest.mark.parametrize(
    "kind", [DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3, BF16_Optimizer]
)
@pytest.mark.parametrize(("then", "now", "expected"), ORDERS)
def test_flat_buffers_go_by_places(
    tmp_path: Path, kind: Any, then: list[str], now: list[str], expected: bool
) -> None:
    """With each of ZeRO's optimizers, so that another order is seen. Without all shards, as on
    several machines, it is refused."""
    prefix = "zero_pp_rank_0_" if kind is DeepSpeedZeroOptimizer_Stage3 else ""
    (tmp_path / f"{prefix}mp_rank_00_model_states.pt").touch()
    (shard := tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    engine: Any = SimpleNamespace(
        checkpoint_mp_rank=0, zero_optimization=lambda: True, optimizer=object.__new__(kind),
        _get_zero_param_shapes=lambda: [dict.fromkeys(each, THREE) for each in now],
        param_names={name: name for name in "f" + "".join(now)}, seq_dp_world_size=1,
    )  # fmt: skip
    saved = {"param_shapes": [dict.fromkeys(each, THREE) for each in then]}
    assert is_ordered_otherwise(engine, tmp_path, lambda _: saved) == expected
    shard.unlink()
    if expected:
        with pytest.raises(CheckpointError, match="or define the layers, and give them to the opt"):
            is_ordered_otherwise(engine, tmp_path, lambda _: saved)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (
            {"has_moe_layers": True, "module": torch.nn.Linear(1, 1)},
            r"experts that the ranks divide \(ep_size > 1, or AutoEP\)",
        ),
        ({"optimizer": object()}, "DeepSpeed's object resumes only with as many ranks"),
    ],
)
def test_an_unsupported_engine_is_refused(facts: dict[str, Any], message: str) -> None:
    """The error names the feature that cannot be resharded."""
    engine: Any = SimpleNamespace(
        **{
            "has_moe_layers": False,
            "zero_optimization": lambda: True,
            "optimizer": None,
            **facts,
        }
    )
    with pytest.raises(CheckpointError, match=message):
        check_engine(engine)


def test_parameters_with_different_numbers_of_steps_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ZeRO each parameter counts its own steps; ZeRO has one count for a group."""
    names = ("weight", "bias")
    shapes = dict.fromkeys(names, THREE)
    zero = SimpleNamespace(single_partition_of_fp32_groups=[torch.zeros(6)])
    engine: Any = SimpleNamespace(optimizer=zero, _get_zero_param_shapes=lambda: [shapes])
    monkeypatch.setattr(live_state_module, "_data_parallel_place", lambda engine: (0, 1))
    live_state = {"base_optimizer_state": {"param_groups": [{"params": [0]}]}}

    def state_after(*steps: float) -> Any:
        states = {i: {"step": torch.tensor(step)} for i, step in enumerate(steps)}
        optimizer = {"param_groups": [{"params": [0, 1]}], "state": states}
        module = dict.fromkeys(names, torch.arange(3.0))
        saved = source(tmp_path, model(module=module, optimizer=optimizer), target_groups=[shapes])
        return zero_optimizer_state(engine, live_state, saved)["base_optimizer_state"]["state"]

    assert state_after(4.0, 4.0) == {0: {"step": 4.0}}
    with pytest.raises(CheckpointError, match=r"different numbers of steps .*4.* and .*2.*stage 0"):
        state_after(4.0, 2.0)


@pytest.mark.parametrize("is_new", [True, False], ids=["without state", "with state"])
def test_resharding_does_not_double_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """One rank loads what two saved into the tensors that it has, or will have: no others."""
    flat = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.Adam([flat])
    adam.state[flat] = {} if is_new else {"exp_avg": torch.ones(3)}
    zero = SimpleNamespace(single_partition_of_fp32_groups=[flat], optimizer=adam)
    engine: Any = SimpleNamespace(
        optimizer=zero, _get_zero_param_shapes=lambda: [{"weight": THREE}]
    )
    monkeypatch.setattr(live_state_module, "_data_parallel_place", lambda engine: (0, 1))
    live_state = {"base_optimizer_state": {"param_groups": [{"params": [0]}]}}
    saved = source(tmp_path, model(), shard(0), shard(1))
    with Memory() as memory, optimizers_loaded_in_place([adam]):
        state = zero_optimizer_state(engine, live_state, saved)
        adam.load_state_dict(state["base_optimizer_state"])
        (master,) = state["single_partition_of_fp32_groups"]
        flat.data.copy_(master)
    scalar_bytes = 4  # the number of steps
    assert memory.peak_bytes <= scalar_bytes * 2 + (flat.nbytes if is_new else 0)
    assert flat.tolist() == [0.0, 1.0, 2.0]
    assert adam.state[flat]["exp_avg"].tolist() == [5.0, 6.0, 7.0]


def test_a_trials_load_method_cannot_save(tmp_path: Path) -> None:
    """Inside `resharded`, saving and committing are refused; afterwards engines save as before."""
    previous = object()
    engine: Any = SimpleNamespace(
        has_moe_layers=False,
        zero_optimization=lambda: False,
        checkpoint_engine=previous,
    )
    with resharded([engine], tmp_path, lambda path: None):
        loading = engine.checkpoint_engine
        for save in (lambda: loading.save({}, "a.pt"), lambda: loading.commit("a")):
            with pytest.raises(TrialError, match="the trial's load method saves a checkpoint"):
                save()
    assert engine.checkpoint_engine is previous


def test_a_trial_with_its_own_format_is_refused(tmp_path: Path) -> None:
    """Files that a trial writes itself cannot be resharded."""
    own = type("Own", (ToyTrial,), {"save": lambda *_: None})
    adapter: Any = object.__new__(DeepSpeedTrialAdapter)
    engine = SimpleNamespace(
        checkpoint_engine=None, basic_optimizer=None, module=torch.nn.Linear(1, 1)
    )
    adapter._trial, adapter._context = object.__new__(own), SimpleNamespace(models=[engine])
    adapter._required_grad = adapter.optimizers = adapter.whole_models = []
    with pytest.raises(CheckpointError, match=r"Own.save does not call super\(\).save, so"):
        adapter.load(tmp_path, Reader(), {}, reshape=True)
