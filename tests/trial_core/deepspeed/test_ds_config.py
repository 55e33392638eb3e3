"""`overwrite_deepspeed_config`: values of one configuration replace those of another."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from trial_core.deepspeed import overwrite_deepspeed_config
from trial_core.deepspeed.dsat import (
    dsat_reporting_context,
    get_ds_config_from_hparams,
    get_hf_args_with_overwrites,
)
from trial_core.errors import TrialError
from trial_core.util import merge_dicts

BASE: dict[str, Any] = {
    "train_batch_size": 32,
    "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.9, 0.999]}},
    "zero_optimization": {"stage": 1},
}


@pytest.fixture(params=["dict", "text", "path"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The same configuration as a dict, and as the path of a file."""
    if request.param == "dict":
        return copy.deepcopy(BASE)
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(BASE))
    return path if request.param == "path" else str(path)


def test_leaves_are_overwritten_at_any_depth(base: Any) -> None:
    """Values of the source replace those of the base; all others stay."""
    source = {"train_batch_size": 64, "optimizer": {"params": {"lr": 0.3, "betas": [0.8, 0.9]}}}
    assert overwrite_deepspeed_config(base, source) == {
        "train_batch_size": 64,
        "optimizer": {"type": "Adam", "params": {"lr": 0.3, "betas": [0.8, 0.9]}},
        "zero_optimization": {"stage": 1},
    }


def test_neither_configuration_is_changed() -> None:
    """The result is a deep copy."""
    base, source = copy.deepcopy(BASE), {"optimizer": {"params": {"betas": [0.5, 0.6]}}}
    result = overwrite_deepspeed_config(base, source)
    result["optimizer"]["params"]["betas"].append(0.7)
    result["zero_optimization"]["stage"] = 3
    assert base == BASE
    assert source == {"optimizer": {"params": {"betas": [0.5, 0.6]}}}


@pytest.mark.parametrize("base", [{"train_batch_size": 8}, {"zero_optimization": {}}])
def test_keys_that_the_base_lacks_are_added(base: dict[str, Any]) -> None:
    """A section that only the experiment's YAML has counts, too, as in the reference."""
    source = {"zero_optimization": {"stage": 2, "offload": {"device": "cpu"}}, "steps": 10}
    assert overwrite_deepspeed_config(base, source) == {**base, **source}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"zero_optimization": None}, {**BASE, "zero_optimization": None}),
        ({"train_batch_size": {"auto": 1}}, {**BASE, "train_batch_size": {"auto": 1}}),
    ],
)
def test_a_section_and_a_value_replace_each_other(
    source: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Only a section is merged into a section."""
    assert overwrite_deepspeed_config(BASE, source) == expected


def test_a_mapping_of_another_class_is_merged() -> None:
    """`AttrDict` and the like, as trials make of hyperparameters."""
    source = MappingProxyType({"optimizer": MappingProxyType({"type": "SGD"})})
    merged = overwrite_deepspeed_config(MappingProxyType(BASE), source)
    assert merged["optimizer"] == {"type": "SGD", "params": BASE["optimizer"]["params"]}


@pytest.mark.parametrize(
    "content", ['{"lr": 1, "lr": 2}', '{"optimizer": {"params": {"lr": 1, "lr": 2}}}']
)
def test_a_key_that_a_file_gives_twice_is_refused(tmp_path: Path, content: str) -> None:
    """Python would silently use the last one. A ValueError, as in the reference."""
    path = tmp_path / "ds.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r'ds\.json gives "lr" twice in one section: 1 and 2; '):
        overwrite_deepspeed_config(str(path), {})


@pytest.mark.parametrize("wrong", [None, 3, ["train_batch_size"]])
def test_a_base_must_be_a_path_or_a_dict(wrong: Any) -> None:
    """TypeError, as in the reference."""
    message = f"base_ds_config must be a path or a dictionary, got {type(wrong).__name__}: {wrong}"
    with pytest.raises(TypeError, match=re.escape(message)):
        overwrite_deepspeed_config(wrong, {})


@pytest.mark.parametrize("wrong", [None, "ds_config.json", [("train_batch_size", 64)]])
def test_a_source_must_be_a_dict(wrong: Any) -> None:
    """Only the base may be a file."""
    message = f"source_ds_dict must be a dictionary, got {type(wrong).__name__}: {wrong!r}"
    with pytest.raises(TypeError, match=re.escape(message)):
        overwrite_deepspeed_config(BASE, wrong)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot read the DeepSpeed config .*ds\.json in the folder .*: No such file"),
        ("{,}", r"the DeepSpeed config .*ds\.json is not valid JSON: .* line 1 column 2"),
        ("[1]", r"the DeepSpeed config .*ds\.json must hold a JSON object, got list"),
    ],
)
def test_a_file_without_a_config_is_refused(
    tmp_path: Path, content: str | None, message: str
) -> None:
    """The error names the file and the problem."""
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TrialError, match=message):
        overwrite_deepspeed_config(str(path), {})


def test_the_folder_of_a_relative_path_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial's working folder is the experiment's code folder, not the user's."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrialError, match=re.escape(f"conf/ds.json in the folder {tmp_path}/conf:")):
        overwrite_deepspeed_config("conf/ds.json", {})


def test_the_config_that_hyperparameters_name(tmp_path: Path) -> None:
    """As Determined's dsat reads it: a file below a folder, and what they change in it."""
    (tmp_path / "ds.json").write_text(json.dumps(BASE))
    hparams: dict[str, Any] = {"deepspeed_config": "ds.json"}
    assert get_ds_config_from_hparams(hparams, tmp_path) == BASE
    hparams["overwrite_deepspeed_args"] = {"zero_optimization": {"stage": 2}}
    assert get_ds_config_from_hparams(hparams, tmp_path)["zero_optimization"] == {"stage": 2}
    with pytest.raises(TrialError, match=r'expected "deepspeed_config", .* got None; .* are: lr$'):
        get_ds_config_from_hparams({"lr": 1}, tmp_path)


def test_the_arguments_of_a_script_of_hugging_face_have_the_changes(tmp_path: Path) -> None:
    """As JSON, which its Trainer reads as a config; without changes they stay."""
    (tmp_path / "ds.json").write_text(json.dumps(BASE))
    arguments = ["--do_train", "--deepspeed", str(tmp_path / "ds.json"), "--fp16"]
    changes = {"overwrite_deepspeed_args": {"train_batch_size": 8}}
    assert get_hf_args_with_overwrites(arguments, {}) == arguments
    assert get_hf_args_with_overwrites(["--deepspeed"], changes) == ["--deepspeed"]
    changed = get_hf_args_with_overwrites(arguments, changes)
    assert json.loads(changed.pop(2)) == {**BASE, "train_batch_size": 8}
    assert changed == ["--do_train", "--deepspeed", "--fp16"]
    with dsat_reporting_context(None, op=None):
        pass


def test_merged_dicts_are_new() -> None:
    """Neither argument changes, at any depth."""
    base: dict[str, Any] = {"a": {"b": [1]}, "c": 2}
    merged = merge_dicts(base, {"a": {"d": 3}, "c": {"e": 4}})
    assert merged == {"a": {"b": [1], "d": 3}, "c": {"e": 4}}
    merged["a"]["b"].append(5)
    assert base == {"a": {"b": [1]}, "c": 2}
