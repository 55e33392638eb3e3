"""`get_cluster_info`, as scripts for Determined use it."""

from __future__ import annotations

import copy

import pytest

import trial_core
from trial_core.cluster_info import ScriptInfo, trial_number


@pytest.mark.parametrize(("variable", "expected"), [(None, "latest"), ("0a1b", "0a1b"), ("", None)])
def test_the_latest_checkpoint_is_an_argument_of_fit(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, expected: str | None
) -> None:
    """By default a script that runs again continues; the environment may name a checkpoint."""
    monkeypatch.delenv("DET_LATEST_CHECKPOINT", raising=False)
    if variable is not None:
        monkeypatch.setenv("DET_LATEST_CHECKPOINT", variable)
    assert trial_core.get_cluster_info().latest_checkpoint == expected


def test_other_names_say_what_to_use() -> None:
    """An AttributeError, so that `hasattr` works."""
    info = trial_core.get_cluster_info()
    with pytest.raises(AttributeError, match=r"no 'user_data' .* use context.get_data_config\(\)"):
        info.user_data  # noqa: B018 - the access raises
    assert not hasattr(info, "master_url")


def test_a_scripts_information_says_what_to_use_for_other_names() -> None:
    """As does that without `trial_core.init`."""
    info = ScriptInfo.of("digits-0a", {"name": "digits"})
    assert (info.trial.trial_id, info.trial.trial_seed) == (10, 0)
    with pytest.raises(AttributeError, match=r"no 'slot_ids' .* use context.distributed.local"):
        info.slot_ids  # noqa: B018 - the access raises
    assert copy.deepcopy(info) == info


def test_a_script_may_change_what_it_is_told() -> None:
    """The experiment stays as it is."""
    experiment = {
        "name": "digits",
        "hyperparameters": {"layers": [1, 2]},
        "data": {"folders": ["a"]},
    }
    info = ScriptInfo.of("digits-0a", experiment, 7, "0b")
    assert (info.trial.trial_seed, info.latest_checkpoint) == (7, "0b")
    info.trial.hparams["layers"].append(3)
    info.user_data["folders"].append("b")
    assert experiment["hyperparameters"] == {"layers": [1, 2]}
    assert experiment["data"] == {"folders": ["a"]}


def test_ids_are_equal_for_equal_names() -> None:
    """Runs of an experiment have its number; each trial has another one."""
    one, two, other = (
        ScriptInfo.of(trial, {"name": name}).trial
        for trial, name in (("a-1f", "a"), ("a-2f", "a"), ("b-mine", "b"))
    )
    assert one.experiment_id == two.experiment_id != other.experiment_id
    assert (one.trial_id, two.trial_id) == (0x1F, 0x2F)
    assert other.trial_id == trial_number("b-mine") != trial_number("b-yours")
