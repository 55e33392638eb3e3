"""Every hook of a callback: its place, its ranks and its arguments. On real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.fitting import fit_toys
from tests.support.hook_calls import (
    CHECKPOINT,
    FRESH,
    FRESH_BATCHES,
    RESUMED,
    RESUMED_BATCHES,
    UPLOAD_END,
    VALIDATION,
    WORKLOAD,
    assert_calls,
    calls,
    hparams,
    logged,
)
from tests.support.slots import ONE_TWO_FOUR, Driven, drive, toy_config
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.rank.trial.callback import HOOKS

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]


def config(
    folder: Path, batches: int, hyperparameters: dict[str, Any], trial: str = "LogsCalls"
) -> Any:
    return toy_config(
        folder, batches, entrypoint=f"hook_trials:{trial}", scheduling_unit=WORKLOAD,
        min_validation_period={"batches": VALIDATION}, perform_initial_validation=True,
        min_checkpoint_period={"batches": CHECKPOINT}, checkpoint_policy="none",
        hyperparameters=hyperparameters,
    )  # fmt: skip


class Runs(NamedTuple):
    """Two runs of one trial; the second resumes from the first one's checkpoint."""

    folder: Path
    ranks: range
    first: Driven

    def logged(self, rank: int, call: str, run: str = "fresh") -> list[dict[str, Any]]:
        return logged(self.folder / run, rank, call)


@pytest.fixture(scope="module", params=ONE_TWO_FOUR)
def runs(
    warm_slots: Warm, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Runs:
    """With two callbacks, which the second run names in the other order."""
    folder, world_size = tmp_path_factory.mktemp("hooks"), request.param
    slots = warm_slots(world_size)
    fresh = hparams(world_size, folder / "fresh", callbacks=["one", "two"])
    resumed = hparams(world_size, folder / "resumed", callbacks=["two", "one"])
    first = drive(slots, config(folder, FRESH_BATCHES, fresh), folder, persist=True)
    drive(slots, config(folder, RESUMED_BATCHES, resumed), folder, resume=first, persist=True)
    return Runs(folder, range(world_size), first)


def calls_of(record: Path, rank: int, callback: str) -> list[str]:
    """The calls of a rank without those of other callbacks."""
    everything = zip(logged(record, rank), calls(record, rank), strict=True)
    return [call for line, call in everything if line.get("callback", callback) == callback]


@pytest.mark.parametrize("callback", ["one", "two"])
def test_every_callback_gets_every_hook_at_its_place(runs: Runs, callback: str) -> None:
    """On every rank, in a new run and in a resumed one."""
    for rank in runs.ranks:
        assert calls_of(runs.folder / "fresh", rank, callback) == FRESH
        assert calls_of(runs.folder / "resumed", rank, callback) == RESUMED


def test_the_expected_calls_include_every_hook() -> None:
    """None of the reference's hooks is missing."""
    assert {call.split()[0] for call in FRESH + RESUMED} >= {
        *HOOKS, "state_dict", "load_state_dict"
    }  # fmt: skip


def test_callbacks_are_called_in_the_order_of_their_names_in_the_trial(runs: Runs) -> None:
    """One hook of all callbacks, then the next hook."""
    for run, order in (("fresh", ["one", "two"]), ("resumed", ["two", "one"])):
        lines = [line for line in logged(runs.folder / run, 0) if "callback" in line]
        assert [line["callback"] for line in lines] == order * (len(lines) // 2)


def test_on_training_workload_end_gets_averages_of_ranks(runs: Runs) -> None:
    """Over batches and ranks, reduced once; and for each micro-batch over ranks."""
    for rank in runs.ranks:
        ends = runs.logged(rank, "on_training_workload_end")[::2]
        assert [[each["batch"] for each in end["batches"]] for end in ends] == [
            [0, 0, 1, 1, 2, 2], [3, 3], [4, 4], [5, 5]
        ]  # fmt: skip
        middle = (len(runs.ranks) - 1) / 2
        assert {each["rank"] for end in ends for each in end["batches"]} == {middle}
        assert {end["average"]["rank"] for end in ends} == {(len(runs.ranks) - 1) / 2}
        assert [end["average"]["batch"] for end in ends] == [1, 3, 4, 5]
        assert [end["average"] for end in ends] == runs.first.training


def test_on_validation_end_gets_reduced_metrics(runs: Runs) -> None:
    """Custom reducers included; on_validation_epoch_end gets this rank's own metrics."""
    samples = 4 * len(runs.ranks)
    means = []
    for rank in runs.ranks:
        ends = runs.logged(rank, "on_validation_end")[::2]
        assert [end["metrics"] for end in ends] == runs.first.validation
        assert ends[0]["metrics"]["mean_index"] == (samples - 1) / 2
        assert ends[0]["metrics"]["indices"] == list(range(samples))
        outputs = runs.logged(rank, "on_validation_epoch_end")[0]["outputs"]
        assert [sorted(output) for output in outputs] == [["loss", "mean_index"]] * 2
        means += [output["mean_index"] for output in outputs]
    # Micro-batches of two neighbouring samples: each mean occurs once over all ranks.
    assert sorted(means) == [2 * pair + 0.5 for pair in range(samples // 2)]


def test_checkpoint_hooks_get_this_ranks_folder(runs: Runs) -> None:
    """`checkpoint_dir` is the same in both hooks, and holds the rank's shards and state."""
    folders = set()
    for rank in runs.ranks:
        written, ended = (
            runs.logged(rank, f"on_checkpoint_{end}")[-1] for end in ("write_end", "end")
        )
        assert (written["folder"], written["files"]) == (ended["folder"], ended["files"])
        assert f"trialflow/rank-{rank:05d}.pt" in written["files"]
        assert any(name.startswith("model0/") for name in written["files"])
        folders.add(written["folder"])
    assert len(folders) == len(runs.ranks)


def test_on_trial_startup_gets_the_uuid_of_the_last_upload(runs: Runs) -> None:
    """Or None in a new trial."""
    for rank in runs.ranks:
        uploaded = [line["uuid"] for line in runs.logged(rank, UPLOAD_END)[::2]]
        assert uploaded == runs.first.checkpoints
        assert runs.logged(rank, "on_trial_startup")[0]["uuid"] is None
        (started, _) = runs.logged(rank, "on_trial_startup", "resumed")
        assert started["uuid"] == uploaded[-1]


def test_callback_state_is_restored_by_name_on_each_rank(runs: Runs) -> None:
    """In any order of callbacks, and as on_checkpoint_load_start has changed it."""
    for rank in runs.ranks:
        restored = runs.logged(rank, "load_state_dict", "resumed")
        assert [line["callback"] for line in restored] == ["two", "one"]
        for line in restored:
            assert line["state"] == {
                "name": line["callback"], "rank": rank, "ended": [0], "changed": True
            }  # fmt: skip


def test_on_checkpoint_save_start_may_add_to_a_ranks_state(runs: Runs) -> None:
    """on_checkpoint_load_start gets the same state back."""
    for rank in runs.ranks:
        before, after = runs.logged(rank, "on_checkpoint_save_start")[-2:]
        assert before["keys"] == ["batches_trained", "callbacks", "rng", "training_data"]
        assert after["keys"] == ["added", *before["keys"]]
        (loaded, _) = runs.logged(rank, "on_checkpoint_load_start", "resumed")
        assert loaded["keys"] == after["keys"]
        assert loaded["added"] == [["one", rank], ["two", rank]]


VALIDATED = [
    "on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end",
    "on_validation_end",
]  # fmt: skip


def test_evaluate_full_dataset_runs_on_rank_0_and_the_hooks_on_all(
    warm_slots: Warm, tmp_path: Path
) -> None:
    """Other ranks have no outputs, but get all metrics."""
    drive(warm_slots(2), config(tmp_path, 1, hparams(2, tmp_path), "FullDataset"), tmp_path)
    validations = [
        [call for call in calls(tmp_path, rank) if "valid" in call or "evaluate" in call][1:]
        for rank in (0, 1)
    ]
    evaluating = [*VALIDATED[:2], "evaluate_full_dataset", *VALIDATED[2:]]
    assert validations == [evaluating * 2, VALIDATED * 2]
    outputs = [logged(tmp_path, rank, "on_validation_epoch_end")[0]["outputs"] for rank in (0, 1)]
    assert [len(each) for each in outputs] == [1, 0]
    metrics = [logged(tmp_path, rank, "on_validation_end")[0]["metrics"] for rank in (0, 1)]
    assert metrics[0] == metrics[1] == {**outputs[0][0], "indices": list(range(8))}


def test_a_rank_without_data_and_metrics_runs_every_hook(warm_slots: Warm, tmp_path: Path) -> None:
    """Rank 1 of a split model gets the reduced metrics, and has none of its own."""
    drive(
        warm_slots(2), config(tmp_path, 5, hparams(1, tmp_path), "Silent"), tmp_path, persist=True
    )
    first, second = (calls(tmp_path, rank) for rank in (0, 1))
    assert first == second
    assert {call.split()[0] for call in first} >= {*HOOKS} - {"on_checkpoint_load_start"}
    for hook, reduced in (
        ("on_training_workload_end", "average"),
        ("on_training_workload_end", "batches"),
        ("on_validation_end", "metrics"),
    ):
        reporting, silent = (logged(tmp_path, rank, hook)[0] for rank in (0, 1))
        assert reporting[reduced] == silent[reduced]
        assert len(reporting[reduced]) > 0
    outputs = [logged(tmp_path, rank, "on_validation_epoch_end")[0]["outputs"] for rank in (0, 1)]
    assert len(outputs[0]) > 0
    assert outputs[1] == []


def test_hooks_between_batches_see_the_last_batch(warm_slots: Warm, tmp_path: Path) -> None:
    """As in the reference. An epoch has 3 batches; its first hook may have no parameter."""
    own = toy_config(
        tmp_path, 5, entrypoint="hook_trials:LogsPositions", perform_initial_validation=True,
        min_validation_period={"batches": 3},
        hyperparameters={"record": str(tmp_path), "train_samples": 12},
    )  # fmt: skip
    drive(warm_slots(2), own, tmp_path)
    for rank in (0, 1):
        assert [(line["call"], line["batch"]) for line in logged(tmp_path, rank)] == [
            ("on_training_start", 0),
            ("on_validation_start", 0),
            ("on_training_epoch_start", 0),
            ("on_training_workload_end", 2),
            ("on_validation_start", 2),
            ("on_training_epoch_start", 3),
            ("on_training_workload_end", 4),
            ("on_validation_start", 4),
        ]


@pytest.fixture(scope="module", params=[1, 2, 4])
def fits(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, range]:
    """Fits in a script: a new one, a resumed one, and one that the last rank stops."""
    folder, ranks = tmp_path_factory.mktemp("fits"), request.param

    def fit(name: str, batches: int, more: dict[str, Any], **hyper: Any) -> dict[str, Any]:
        exp_conf = {
            "name": "toy", "searcher": {"metric": "loss"},
            "checkpoint_storage": f"file://{folder}/checkpoints",
        }  # fmt: skip
        arguments = {
            "max_length": {"batches": batches}, "reporting_period": {"batches": WORKLOAD},
            "validation_period": {"batches": VALIDATION}, "checkpoint_policy": "none",
            "checkpoint_period": {"batches": CHECKPOINT}, "step_zero_validation": True,
        }  # fmt: skip
        return {
            "trial": "hook_trials:LogsCalls", "fit": {**arguments, **more},
            "init": {"hparams": hparams(ranks, folder / name, **hyper), "exp_conf": exp_conf},
        }  # fmt: skip

    fit_toys(
        "torchrun", folder,
        fit("fresh", FRESH_BATCHES, {}),
        fit("resumed", RESUMED_BATCHES, {"latest_checkpoint": "latest"}),
        fit("stopped", RESUMED_BATCHES, {}, stop_in="on_training_epoch_end"),
        ranks=ranks,
    )  # fmt: skip
    return folder, range(ranks)


@pytest.mark.long
@pytest.mark.parametrize(("run", "expected"), [("fresh", FRESH), ("resumed", RESUMED)])
def test_a_fit_calls_every_hook_at_its_place(
    fits: tuple[Path, range], run: str, expected: list[str]
) -> None:
    """On every rank of a script."""
    folder, ranks = fits
    for rank in ranks:
        assert_calls(calls(folder / run, rank), expected)


@pytest.mark.long
def test_a_stopped_fit_saves_and_shuts_down_on_every_rank(fits: tuple[Path, range]) -> None:
    """The last rank requests the stop within batch 3: nothing is trained or validated after it."""
    folder, ranks = fits
    for rank in ranks:
        assert calls(folder / "stopped", rank)[-9:] == [
            "on_training_epoch_end 0", "on_training_workload_end",
            "state_dict", "on_checkpoint_save_start", "save", "on_checkpoint_write_end",
            "on_checkpoint_end", "on_checkpoint_upload_end", "on_trial_shutdown",
        ]  # fmt: skip
