"""transformers knows the DeepSpeed config when it builds a model, and forgets it with the trial."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trial_core.deepspeed import DeepSpeedTrialContext
from trial_core.deepspeed.pretrained import divide_no_more
from trial_core.errors import TrialError
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.trial.context import RunInfo

pytest.importorskip("accelerate", reason="transformers needs it to divide a model")
integration = pytest.importorskip("transformers.integrations.deepspeed")

ZERO_3, ZERO_2 = ({"zero_optimization": {"stage": stage}} for stage in (3, 2))


@pytest.fixture(autouse=True)
def _whole_again() -> Any:
    yield
    divide_no_more()


def context_with(**hparams: Any) -> DeepSpeedTrialContext:
    info = RunInfo("toy-0000beef", {"hyperparameters": hparams})
    return DeepSpeedTrialContext(info, DistributedContext.from_environment({}))


def file_of(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "ds_config.json"
    file.write_text(json.dumps(config))
    return str(file)


@pytest.mark.parametrize(
    ("config", "changed", "divides"),
    [(ZERO_3, {}, True), (ZERO_2, {}, False), (ZERO_2, ZERO_3, True), (ZERO_3, ZERO_2, False)],
)
def test_a_config_that_the_experiment_names_is_in_place(
    tmp_path: Path, config: dict[str, Any], changed: dict[str, Any], divides: bool
) -> None:
    """Before the trial does anything, with changed values; the next trial's models are whole."""
    named = context_with(
        deepspeed_config=file_of(tmp_path, config), overwrite_deepspeed_args=changed
    )
    assert integration.is_deepspeed_zero3_enabled() is divides
    assert context_with(lr=1).models == named.models == []  # `named` is kept until here
    assert not integration.is_deepspeed_zero3_enabled()


@pytest.mark.parametrize("name", ["ds_config.json", 3, None])
def test_a_name_of_no_file_is_left_to_the_trial(name: Any) -> None:
    """It may mean something else there."""
    assert context_with(deepspeed_config=name).models == []
    assert not integration.is_deepspeed_zero3_enabled()


def test_one_line_puts_a_config_in_place(tmp_path: Path) -> None:
    """A path or a dictionary, of which batch sizes may be missing; None ends it."""
    context = context_with()
    for config in (ZERO_3, file_of(tmp_path, ZERO_3)):
        context.set_deepspeed_config(config)
        assert integration.is_deepspeed_zero3_enabled()
        assert integration.deepspeed_config()["train_micro_batch_size_per_gpu"] == 1
        context.set_deepspeed_config(None)
        assert not integration.is_deepspeed_zero3_enabled()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line that asks for ZeRO-3 says what to install; other stages need nothing."""
    context = context_with()
    context.set_deepspeed_config(ZERO_2)
    monkeypatch.setattr("trial_core.deepspeed.pretrained.find_spec", lambda name: None)
    with pytest.raises(TrialError, match=r"transformers and accelerate.*trialflow\[hf\]"):
        context.set_deepspeed_config(ZERO_3)
