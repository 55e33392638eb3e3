"""`trialflow export` of models of Hugging Face's, opened with their own libraries."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.manifests import new_manifest
from tests.support.slots import drive, toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.common.text_format import first_few
from trial_core.processes.slots.slot_group import SlotGroup
from trialflow.deployments.cli.main import main

pytestmark = pytest.mark.slots
for needed in ("transformers", "peft"):  # importing them takes seconds
    if find_spec(needed) is None:
        pytest.skip(f"needs {needed}", allow_module_level=True)


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.fixture(scope="module")
def run(
    warm_slots: Callable[[int], SlotGroup], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """The folder of a run of three batches; a PyTorchTrial's if there is no ZeRO stage."""

    @functools.cache
    def run(lora: bool, zero_stage: int | None, bf16: bool, excludes_frozen: bool = False) -> Path:
        folder = tmp_path_factory.mktemp("hf")
        config = toy_config(
            folder,
            3,
            entrypoint=f"hf_trials:{'TorchCausalLM' if zero_stage is None else 'CausalLM'}",
            hyperparameters={
                "lora": lora, "zero_stage": zero_stage, "bf16": bf16, "record": str(folder),
                "accumulation": 1,
            },
            checkpointing={"exclude_frozen_parameters": excludes_frozen},
        )  # fmt: skip
        driven = drive(warm_slots(2), config, folder, persist=True)
        uuid = driven.checkpoints[-1]
        store = CheckpointStore(config.checkpoint_storage.url)
        store.commit(new_manifest(3, uuid=uuid, trial="hf-0000beef", files=driven.files[uuid]))
        return folder

    return run


def export(folder: Path, to: Path, *options: str) -> int:
    storage = str(folder / "checkpoints")
    return main(
        ["export", "--trial", "hf-0000beef", "--to", str(to), "--storage", storage, *options]
    )


def state(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


def assert_equal(seen: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert seen.keys() == expected.keys()
    for name, tensor in expected.items():
        assert seen[name].dtype == tensor.dtype, name
        assert torch.equal(seen[name], tensor), name


@pytest.mark.parametrize(
    ("zero_stage", "bf16"), [(3, True), (None, False), long(1, False), long(0, True)]
)
def test_a_model_opens_with_from_pretrained(
    run: Callable[..., Path], tmp_path: Path, zero_stage: int | None, bf16: bool
) -> None:
    """In its own precision, in shards, with its ties, generation config and tokenizer."""
    from transformers import AutoModelForCausalLM

    folder = run(False, zero_stage, bf16)
    options = ["--format", "hf", "--max-shard-size", "2KB"]
    if bf16:
        options += ["--dtype", "16bit"]
    assert export(folder, tmp_path / "model", *options) == 0
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = AutoModelForCausalLM.from_pretrained(folder / "saved")
    assert opened.dtype == (torch.bfloat16 if bf16 else torch.float32)
    assert_equal(state(opened), state(expected))
    assert opened.lm_head.weight is opened.transformer.wte.weight
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]  # which from_pretrained ties
    names = {file.name for file in (tmp_path / "model").iterdir()}
    assert {"model.safetensors.index.json", "tokenizer.json", "generation_config.json"} <= names


@pytest.mark.parametrize("zero_stage", [1, long(3)])
def test_an_adapter_is_exported_alone_or_merged(
    run: Callable[..., Path], tmp_path: Path, zero_stage: int
) -> None:
    """As peft itself saves and merges it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = run(True, zero_stage, False)
    assert export(folder, tmp_path / "adapter", "--format", "adapter") == 0
    assert export(folder, tmp_path / "model", "--format", "hf") == 0

    def adapted(adapter: Path) -> Any:
        base = AutoModelForCausalLM.from_pretrained(folder / "base")
        return PeftModel.from_pretrained(base, adapter)

    ours, theirs = adapted(tmp_path / "adapter"), adapted(folder / "saved")
    assert_equal(state(ours), state(theirs))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert_equal(state(merged), state(theirs.merge_and_unload()))


def test_what_the_checkpoint_does_not_hold_is_said(
    run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Excluded frozen weights are counted and named; there is no model without them."""
    folder = run(True, 1, False, excludes_frozen=True)
    assert export(folder, tmp_path / "adapter", "--format", "adapter") == 0
    assert export(folder, tmp_path / "model", "--format", "hf") == 2
    assert not (tmp_path / "model").exists()
    capsys.readouterr()
    assert export(folder, tmp_path / "model.safetensors", "--json") == 0
    said = capsys.readouterr()
    missing = json.loads(said.out)["missing"]
    assert len(missing) == 17
    assert f"does not hold 17 frozen weights ({first_few(missing)})" in " ".join(said.err.split())
