"""`overwrite_deepspeed_config`: values of one configuration replace those of another."""

from __future__ import annotations

import copy
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from trial_core.deepspeed import overwrite_deepspeed_config
from trial_core.errors import TrialError

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


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (
            {"optimizer": {"params": {"learning_rate": 0.3}}},
            '"optimizer.params.learning_rate" is not in the base config',
        ),
        ({"train_batchsize": 64}, '"train_batchsize" is not in the base config'),
        (
            {"zero_optimization": 3},
            '"zero_optimization" is a section in the base config, got 3',
        ),
    ],
)
def test_a_key_that_overwrites_nothing_is_logged(
    caplog: pytest.LogCaptureFixture, source: dict[str, Any], problem: str
) -> None:
    """A misspelt learning rate causes a warning; sections are not overwritten."""
    with caplog.at_level(logging.WARNING):
        assert overwrite_deepspeed_config(BASE, source) == BASE
    assert [record.getMessage() for record in caplog.records] == [
        f"overwrite_deepspeed_config ignored a key: {problem}"
    ]


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
