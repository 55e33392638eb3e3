"""Every hook of a callback: where it runs, on which ranks, with what. On real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.fitting import fit_toys
from tests.support.hook_story import (
    CHECKPOINT,
    FRESH,
    FRESH_BATCHES,
    RESUMED,
    RESUMED_BATCHES,
    UPLOAD_END,
    VALIDATION,
    WORKLOAD,
    assert_uploads_end_in_time,
    calls,
    hparams,
    spelt,
    told,
    without_uploads,
)
from tests.support.slots import ONE_TWO_FOUR, Driven, drive, toy_config
from trial_core.pytorch.callback import HOOKS
from trial_core.slots.group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]


def config(folder: Path, batches: int, hyperparameters: dict[str, Any], trial: str = "Told") -> Any:
    return toy_config(
        folder, batches, entrypoint=f"hook_trials:{trial}", scheduling_unit=WORKLOAD,
        min_validation_period={"batches": VALIDATION}, perform_initial_validation=True,
        min_checkpoint_period={"batches": CHECKPOINT}, checkpoint_policy="none",
        hyperparameters=hyperparameters,
    )  # fmt: skip


class Runs(NamedTuple):
    """Two runs of one trial, the second from the first one's checkpoint."""

    folder: Path
    ranks: range
    first: Driven

    def told(self, rank: int, call: str, run: str = "fresh") -> list[dict[str, Any]]:
        return told(self.folder / run, rank, call)


@pytest.fixture(scope="module", params=[1, 2, 4])
def runs(
    warm_slots: Warm, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Runs:
    """On so many ranks, with two callbacks, which the second run names in the other order."""
    folder, world_size = tmp_path_factory.mktemp("hooks"), request.param
    slots = warm_slots(world_size)
    fresh = hparams(world_size, folder / "fresh", callbacks=["one", "two"])
    resumed = hparams(world_size, folder / "resumed", callbacks=["two", "one"])
    first = drive(slots, config(folder, FRESH_BATCHES, fresh), folder, persist=True)
    drive(slots, config(folder, RESUMED_BATCHES, resumed), folder, resume=first, persist=True)
    return Runs(folder, range(world_size), first)


def of_callback(record: Path, rank: int, name: str) -> list[str]:
    """The story as it is when there is no other callback."""
    everything = zip(told(record, rank), calls(record, rank), strict=True)
    return [call for line, call in everything if line.get("callback", name) == name]


@pytest.mark.parametrize("name", ["one", "two"])
def test_every_hook_has_its_place_on_every_rank(runs: Runs, name: str) -> None:
    """The whole story of a fresh run and of one that goes on from it, for each callback."""
    for rank in runs.ranks:
        assert of_callback(runs.folder / "fresh", rank, name) == spelt(FRESH)
        assert of_callback(runs.folder / "resumed", rank, name) == spelt(RESUMED)


def test_the_story_has_every_hook_in_it() -> None:
    """None of the reference's hooks is missing from what is expected."""
    assert {call.split()[0] for call in spelt(FRESH) + spelt(RESUMED)} >= {
        *HOOKS, "state_dict", "load_state_dict"
    }  # fmt: skip


def test_callbacks_take_turns_in_the_order_in_which_they_are_named(runs: Runs) -> None:
    """One hook of all callbacks, then the next hook."""
    for run, order in (("fresh", ["one", "two"]), ("resumed", ["two", "one"])):
        lines = [line for line in told(runs.folder / run, 0) if "callback" in line]
        assert [line["callback"] for line in lines] == order * (len(lines) // 2)


def test_a_workloads_end_is_told_everybodys_average_and_each_ranks_own(runs: Runs) -> None:
    """The average over batches and ranks, once; and a dict for each batch, of this rank's."""
    for rank in runs.ranks:
        ends = runs.told(rank, "on_training_workload_end")[::2]
        assert [[own["batch"] for own in end["batches"]] for end in ends] == [
            [0, 1, 2], [3], [4], [5]
        ]  # fmt: skip
        assert {own["rank"] for end in ends for own in end["batches"]} == {rank}
        assert {end["average"]["rank"] for end in ends} == {(len(runs.ranks) - 1) / 2}
        assert [end["average"]["batch"] for end in ends] == [1, 3, 4, 5]
        assert [end["average"] for end in ends] == runs.first.training


def test_a_validations_end_is_told_everybodys_metrics(runs: Runs) -> None:
    """Reduced over all ranks, custom ones included; its epoch's end is told this rank's own."""
    samples = 4 * len(runs.ranks)
    means = []
    for rank in runs.ranks:
        ends = runs.told(rank, "on_validation_end")[::2]
        assert [end["metrics"] for end in ends] == runs.first.validation
        assert ends[0]["metrics"]["mean_index"] == (samples - 1) / 2
        assert ends[0]["metrics"]["indices"] == list(range(samples))
        outputs = runs.told(rank, "on_validation_epoch_end")[0]["outputs"]
        assert [sorted(output) for output in outputs] == [["loss", "mean_index"]] * 2
        means += [output["mean_index"] for output in outputs]
    # Micro-batches of two neighbours: every mean is there once, none on two ranks.
    assert sorted(means) == [2 * pair + 0.5 for pair in range(samples // 2)]


def test_what_was_written_is_there_when_hooks_are_told(runs: Runs) -> None:
    """`checkpoint_dir` is this rank's own, with its shards and state; both hooks are told it."""
    folders = set()
    for rank in runs.ranks:
        written, ended = (
            runs.told(rank, f"on_checkpoint_{end}")[-1] for end in ("write_end", "end")
        )
        assert (written["folder"], written["files"]) == (ended["folder"], ended["files"])
        assert f"trialflow/rank-{rank:05d}.pt" in written["files"]
        assert any(name.startswith("model0/") for name in written["files"])
        folders.add(written["folder"])
    assert len(folders) == len(runs.ranks)


def test_the_checkpoint_that_is_restored_is_the_one_that_was_uploaded(runs: Runs) -> None:
    """`on_trial_startup` is told the uuid of the last `on_checkpoint_upload_end`, or None."""
    for rank in runs.ranks:
        uploaded = [line["uuid"] for line in runs.told(rank, UPLOAD_END)[::2]]
        assert uploaded == runs.first.checkpoints
        assert runs.told(rank, "on_trial_startup")[0]["uuid"] is None
        (told_one, _) = runs.told(rank, "on_trial_startup", "resumed")
        assert told_one["uuid"] == uploaded[-1]


def test_state_comes_back_to_each_rank_by_name(runs: Runs) -> None:
    """Each rank's own, whatever the order; changed where `on_checkpoint_load_start` changed it."""
    for rank in runs.ranks:
        restored = runs.told(rank, "load_state_dict", "resumed")
        assert [line["callback"] for line in restored] == ["two", "one"]
        for line in restored:
            assert line["state"] == {
                "name": line["callback"], "rank": rank, "ended": [0], "changed": True
            }  # fmt: skip


def test_what_is_added_to_a_checkpoint_is_there_when_it_is_loaded(runs: Runs) -> None:
    """Each rank finds in its own state what its callbacks have added to it."""
    for rank in runs.ranks:
        before, after = runs.told(rank, "on_checkpoint_save_start")[-2:]
        assert before["keys"] == ["batches_trained", "callbacks", "rng", "training_data"]
        assert after["keys"] == ["added", *before["keys"]]
        (loaded, _) = runs.told(rank, "on_checkpoint_load_start", "resumed")
        assert loaded["keys"] == after["keys"]
        assert loaded["added"] == [["one", rank], ["two", rank]]


VALIDATED = [
    "on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end",
    "on_validation_end",
]  # fmt: skip


def test_only_one_rank_validates_in_one_go_but_all_run_the_hooks(
    warm_slots: Warm, tmp_path: Path
) -> None:
    """With evaluate_full_dataset, on rank 0: the others have no outputs, and all the metrics."""
    drive(warm_slots(2), config(tmp_path, 1, hparams(2, tmp_path), "InOneGo"), tmp_path)
    validations = [
        [call for call in calls(tmp_path, rank) if "valid" in call or "evaluate" in call][1:]
        for rank in (0, 1)
    ]
    evaluating = [*VALIDATED[:2], "evaluate_full_dataset", *VALIDATED[2:]]
    assert validations == [evaluating * 2, VALIDATED * 2]
    outputs = [told(tmp_path, rank, "on_validation_epoch_end")[0]["outputs"] for rank in (0, 1)]
    assert [len(each) for each in outputs] == [1, 0]
    metrics = [told(tmp_path, rank, "on_validation_end")[0]["metrics"] for rank in (0, 1)]
    assert metrics[0] == metrics[1] == {**outputs[0][0], "indices": list(range(8))}


def test_ranks_that_load_and_report_nothing_run_every_hook(
    warm_slots: Warm, tmp_path: Path
) -> None:
    """Rank 1 of a split model: the same hooks as rank 0, with everybody's metrics, none its own."""
    drive(
        warm_slots(2), config(tmp_path, 5, hparams(1, tmp_path), "Silent"), tmp_path, persist=True
    )
    first, second = (calls(tmp_path, rank) for rank in (0, 1))
    assert first == second
    assert {call.split()[0] for call in first} >= {*HOOKS} - {"on_checkpoint_load_start"}
    for hook, everybodys, own in (
        ("on_training_workload_end", "average", "batches"),
        ("on_validation_epoch_end", None, "outputs"),
        ("on_validation_end", "metrics", None),
    ):
        reporting, silent = (told(tmp_path, rank, hook)[0] for rank in (0, 1))
        assert everybodys is None or reporting[everybodys] == silent[everybodys] != {}
        assert own is None or (len(reporting[own]) > 0 and silent[own] == [])


@pytest.fixture(scope="module", params=ONE_TWO_FOUR)
def fits(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, range]:
    """In a script, on so many ranks: a fit, one that goes on with it, and one that the last rank
    stops; where they have told of it, and the ranks."""
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
            "trial": "hook_trials:Told", "fit": {**arguments, **more},
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


@pytest.mark.parametrize(("run", "story"), [("fresh", FRESH), ("resumed", RESUMED)])
def test_a_script_tells_the_same_story(fits: tuple[Path, range], run: str, story: str) -> None:
    """`Trainer.fit` has every hook at the same place on every rank; uploads end beside training."""
    folder, ranks = fits
    for rank in ranks:
        seen = calls(folder / run, rank)
        assert without_uploads(seen) == without_uploads(spelt(story))
        assert_uploads_end_in_time(seen)


def test_a_stop_is_saved_and_shut_down_on_every_rank(fits: tuple[Path, range]) -> None:
    """Asked for by the last rank within batch 3: no validation any more, nor training."""
    folder, ranks = fits
    for rank in ranks:
        assert calls(folder / "stopped", rank)[-9:] == [
            "on_training_epoch_end 0", "on_training_workload_end",
            "state_dict", "on_checkpoint_save_start", "save", "on_checkpoint_write_end",
            "on_checkpoint_end", "on_checkpoint_upload_end", "on_trial_shutdown",
        ]  # fmt: skip
