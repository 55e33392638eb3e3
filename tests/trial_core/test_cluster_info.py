"""`get_cluster_info`, as scripts for Determined use it."""

from __future__ import annotations

import copy

import pytest

import trial_core
from trial_core.cluster_info import ClusterInfo, checkpoint_to_continue, trial_number


def test_outside_a_run_there_is_no_information() -> None:
    """So that a script can ask whether it runs in a cluster, as Determined's tutorials do."""
    assert trial_core.get_cluster_info() is None


@pytest.mark.parametrize(
    ("given", "variable", "expected"),
    [(None, None, None), (None, "latest", "latest"), (None, "", None), ("0a", "latest", "0a")],
)
def test_the_environment_names_what_a_script_continues(
    monkeypatch: pytest.MonkeyPatch, given: str | None, variable: str | None, expected: str | None
) -> None:
    """Unless the script does."""
    monkeypatch.delenv("DET_LATEST_CHECKPOINT", raising=False)
    if variable is not None:
        monkeypatch.setenv("DET_LATEST_CHECKPOINT", variable)
    assert checkpoint_to_continue(given) == expected


def test_other_names_say_what_to_use() -> None:
    """An AttributeError, so that `hasattr` works."""
    info = ClusterInfo.of("digits-0a", {"name": "digits"})
    assert (info.trial.trial_id, info.trial.trial_seed) == (10, 0)
    with pytest.raises(AttributeError, match=r"no attribute 'task_id'; use trial\.trial_id"):
        info.task_id  # noqa: B018 - the access raises
    assert not hasattr(info, "master_url")
    assert copy.deepcopy(info) == info


def test_a_script_knows_its_machines() -> None:
    """How many there are, and the slots of this one."""
    info = ClusterInfo.of("digits-0a", {"name": "digits"}, slots=3, machine=1, machines=2)
    assert (info.slot_ids, info.container_slot_counts) == ([0, 1, 2], [3, 3])
    assert (info.container_rank, len(info.container_addrs)) == (1, 2)
    assert info.trial._config == {"name": "digits"}


def test_a_script_may_change_what_it_is_told() -> None:
    """The experiment stays as it is."""
    experiment = {
        "name": "digits",
        "hyperparameters": {"layers": [1, 2]},
        "data": {"folders": ["a"]},
    }
    info = ClusterInfo.of("digits-0a", experiment, 7, "0b")
    assert (info.trial.trial_seed, info.latest_checkpoint) == (7, "0b")
    info.trial.hparams["layers"].append(3)
    info.user_data["folders"].append("b")
    assert experiment["hyperparameters"] == {"layers": [1, 2]}
    assert experiment["data"] == {"folders": ["a"]}


def test_ids_are_equal_for_equal_names() -> None:
    """Runs of an experiment have its number; each trial has another one."""
    one, two, other = (
        ClusterInfo.of(trial, {"name": name}).trial
        for trial, name in (("a-1f", "a"), ("a-2f", "a"), ("b-mine", "b"))
    )
    assert one.experiment_id == two.experiment_id != other.experiment_id
    assert (one.trial_id, two.trial_id) == (0x1F, 0x2F)
    assert other.trial_id == trial_number("b-mine") != trial_number("b-yours")
