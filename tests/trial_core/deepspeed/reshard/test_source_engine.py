"""What cannot be put together, or not shared out, is refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.toy.toy_trial import ToyTrial
from trial_core.controller.safe_load import Reader
from trial_core.deepspeed.deepspeed_engine import DeepSpeedTrialEngine
from trial_core.deepspeed.reshard import target_engine
from trial_core.deepspeed.reshard.parameter_state import MASTER
from trial_core.deepspeed.reshard.reshard import reshaped
from trial_core.deepspeed.reshard.source_engine import SavedEngine
from trial_core.deepspeed.reshard.target_engine import check_engine, partitions
from trial_core.errors import CheckpointDamaged, CheckpointError, TrialError

THREE = torch.Size([3])


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
    """Optimizer states of ZeRO-1, with one element of padding behind the last one."""
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


def saved(
    folder: Path,
    model_states: dict[str, Any],
    *shards: dict[str, Any],
    present: Sequence[Mapping[str, torch.Size]] = ({"weight": THREE},),
) -> SavedEngine:
    """What is found in such files."""
    held: dict[str, Any] = {"mp_rank_00_model_states.pt": model_states}
    for rank, each in enumerate(shards):
        held[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = each
    for name in held:
        (folder / name).touch()
    return SavedEngine(folder, 0, present, lambda path: held[path.name])


def test_a_parameter_is_put_together_of_its_pieces(tmp_path: Path) -> None:
    """Its elements lie on two ranks, padding aside; its steps are told once."""
    weight = saved(tmp_path, model(), shard(0), shard(1)).parameters["weight"]
    assert weight.whole(MASTER).tolist() == [0, 1, 2]
    assert weight.whole("exp_avg").tolist() == [5, 6, 7]
    assert weight.values == {"step": 4.0}


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """One of two data-parallel ranks' is not enough."""
    with pytest.raises(CheckpointDamaged, match="the shards of 1 data-parallel ranks, and 2"):
        saved(tmp_path, model(), shard(0))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"base_optimizer_state": []}, "elastic_checkpoint, which does not keep"),
        (
            {
                "base_optimizer_state": {
                    "state": {0: {"row": torch.zeros(1)}},
                    "param_groups": [{"params": [0]}],
                }
            },
            r"the optimizer's row has the shape \(1,\) for 2 elements: it is neither one value",
        ),
    ],
)
def test_a_state_that_does_not_go_by_element_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """No optimizer's state is cut where it cannot be."""
    with pytest.raises(CheckpointError, match=said):
        saved(tmp_path, model(), shard(0, **changes), shard(1, **changes))


@pytest.mark.parametrize(
    ("present", "said"),
    [
        ([{"weight": THREE}, {}], "1 groups of parameters when .* saved, and has 2 now"),
        ([{}], "weight was in group 0 of the optimizer when .* saved, and is not trained now"),
        ([{"weight": THREE, "bias": THREE}], "bias was not trained when .* saved, and is in"),
        ([{"weight": torch.Size([2])}], r"shape \(3,\) in the checkpoint, and \(2,\) now"),
    ],
)
def test_another_models_parameters_are_refused(
    tmp_path: Path, present: list[dict[str, torch.Size]], said: str
) -> None:
    """The optimizer has the same parameters in the same groups, or the first that differs is
    named."""
    with pytest.raises(CheckpointError, match=said):
        saved(tmp_path, model(), shard(0), shard(1), present=present)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"fp32_groups": []}, "saved without ZeRO and in 16 bits"),
        ({"param_groups": [{"params": [0, 1]}], "state": {}}, "had 2 parameters"),
        ({"param_groups": [], "state": {}}, "had 0 groups of parameters"),
        ({"param_groups": [{"params": [0]}], "state": {0: {"row": torch.zeros(1)}}},
         "the optimizer's row of weight is not of the shape"),
    ],
)  # fmt: skip
def test_a_state_without_zero_is_refused_where_it_is_not_understood(
    tmp_path: Path, optimizer: dict[str, Any], said: str
) -> None:
    """It has no names, so it is taken by the order of parameters, or not at all."""
    with pytest.raises(CheckpointError, match=said):
        saved(tmp_path, model(optimizer=optimizer))


def test_a_module_without_a_parameter_is_refused(tmp_path: Path) -> None:
    """The optimizer's parameters are the module's."""
    whole = {"param_groups": [{"params": [0]}], "state": {}}
    with pytest.raises(CheckpointError, match="the checkpoint has no weight"):
        saved(tmp_path, model(module={}, optimizer=whole))


def test_a_pipeline_without_zero_is_refused(tmp_path: Path) -> None:
    """Its weights lie in files of its layers, without the optimizer's names for them."""
    whole = {"param_groups": [{"params": [0]}], "state": {}}
    with pytest.raises(CheckpointError, match="saved without ZeRO by a pipeline"):
        saved(tmp_path, model(module=None, optimizer=whole))


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"has_moe_layers": True}, "a mixture of experts"),
        ({"zero_nvme_offload_optimizer": lambda: True}, "optimizer states on NVMe"),
        ({"zero_elastic_checkpoint": lambda: True}, "zero_optimization.elastic_checkpoint"),
        ({"optimizer": object()}, "DeepSpeed's object resumes only with as many ranks"),
    ],
)
def test_an_engine_of_another_kind_is_refused(facts: dict[str, Any], said: str) -> None:
    """Its state lies in a way that is not known here."""
    engine: Any = SimpleNamespace(
        **{
            "has_moe_layers": False,
            "zero_nvme_offload_optimizer": lambda: False,
            "zero_elastic_checkpoint": lambda: False,
            "zero_optimization": lambda: True,
            "optimizer": None,
            **facts,
        }
    )
    with pytest.raises(CheckpointError, match=said):
        check_engine(engine)


def test_parameters_that_were_trained_for_different_numbers_of_steps_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ZeRO each parameter counts its own steps; ZeRO has one count for a group."""
    names = ("weight", "bias")
    shapes = dict.fromkeys(names, THREE)
    zero = SimpleNamespace(single_partition_of_fp32_groups=[torch.zeros(6)])
    engine: Any = SimpleNamespace(optimizer=zero, _get_zero_param_shapes=lambda: [shapes])
    monkeypatch.setattr(target_engine, "_place", lambda engine: (0, 1))
    present = {"base_optimizer_state": {"param_groups": [{"params": [0]}]}}

    def shared_out(*steps: float) -> Any:
        states = {i: {"step": torch.tensor(step)} for i, step in enumerate(steps)}
        optimizer = {"param_groups": [{"params": [0, 1]}], "state": states}
        module = dict.fromkeys(names, torch.arange(3.0))
        whole = saved(tmp_path, model(module=module, optimizer=optimizer), present=[shapes])
        return partitions(engine, present, whole)["base_optimizer_state"]["state"]

    assert shared_out(4.0, 4.0) == {0: {"step": 4.0}}
    with pytest.raises(
        CheckpointError, match=r"has gone \{'step': .*4.* with some .* resume with ZeRO stage 0"
    ):
        shared_out(4.0, 2.0)


def test_nothing_is_saved_where_a_trial_loads(tmp_path: Path) -> None:
    """While engines are given what nobody has saved, a trial's load cannot save; afterwards they
    save as before."""
    own = object()
    engine: Any = SimpleNamespace(
        has_moe_layers=False,
        zero_nvme_offload_optimizer=lambda: False,
        zero_optimization=lambda: False,
        checkpoint_engine=own,
    )
    with reshaped([engine], tmp_path, lambda path: None):
        while_loading = engine.checkpoint_engine
        for save in (lambda: while_loading.save({}, "a.pt"), lambda: while_loading.commit("a")):
            with pytest.raises(TrialError, match="the trial's load saves a checkpoint; let its sa"):
                save()
    assert engine.checkpoint_engine is own


@pytest.mark.parametrize("overridden", ["save", "load"])
def test_a_trial_that_saves_by_itself_is_refused(tmp_path: Path, overridden: str) -> None:
    """What it saves may be anything."""
    own = type("Own", (ToyTrial,), {overridden: lambda *_: None})
    engine: Any = object.__new__(DeepSpeedTrialEngine)
    engine._trial, engine._context = object.__new__(own), SimpleNamespace(models=[])
    with pytest.raises(CheckpointError, match=f"Own overrides {overridden}: how what it saves"):
        engine.load(tmp_path, Reader(), reshape=True)
