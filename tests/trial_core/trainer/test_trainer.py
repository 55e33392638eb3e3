"""`init` and `Trainer.fit` in scripts, with each launcher."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fitting import SCRIPT, fit_toys, start
from tests.support.slots import TOY, Driven, drive, lines, toy_config
from tests.support.tensors import differing, tensors
from tests.trial_core.trainer.fits import assert_same_end, every, files, hooks, run, store
from trial_core.checkpoint.transfer.checkpoint_source import CheckpointSource
from trial_core.checkpoint.transfer.trial_code import code_of_checkpoint
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]


# Of every run of the first two fixtures.
HPARAMS = {"accumulation": 3, "train_samples": 50, "zero_stage": 2}


@pytest.fixture(scope="module")
def straight_and_first(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """With deepspeed's launcher: a run of 12 batches, and one of 5."""
    folder = tmp_path_factory.mktemp("fits")
    straight, parts = folder / "straight", folder / "parts"
    outcomes = fit_toys(
        "deepspeed", folder / "launch",
        run(straight, every(4, 12), **HPARAMS), run(parts, every(4, 5), **HPARAMS),
    )  # fmt: skip
    return {"folder": folder, "straight": outcomes[0], "first": outcomes[1]}


def test_a_fit_equals_a_run_with_a_driver(
    straight_and_first: dict[str, Any], warm_slots: Warm, tmp_path: Path
) -> None:
    """Micro-batches, metrics, weights and random state are the same, bit for bit.

    Every rank returns the same result.
    """
    config = toy_config(
        tmp_path, 12, scheduling_unit=4, hyperparameters={**HPARAMS, "record": str(tmp_path)}
    )
    driven: Driven = drive(warm_slots(2), config, tmp_path, persist=True)
    straight = straight_and_first["folder"] / "straight"
    result, other = straight_and_first["straight"]
    assert result == other
    assert result["training_metrics"] == driven.training[-1]
    assert result["validation_metrics"] == driven.validation[-1]
    for rank in (0, 1):
        assert lines(straight, "samples", rank) == lines(tmp_path, "samples", rank)
    expected = tensors(files(tmp_path, driven.checkpoints[-1]))
    assert len(expected) > 10
    assert differing(expected, tensors(files(straight, result["checkpoint_uuid"]))) == []


def test_a_fits_checkpoint_has_a_complete_manifest(straight_and_first: dict[str, Any]) -> None:
    """And all files match it."""
    result = straight_and_first["straight"][0]
    where = store(straight_and_first["folder"] / "straight")
    (manifest,) = where.list(result["trial"])
    assert where.find_damage(manifest.uuid, manifest.files) == []
    assert manifest.uuid == result["checkpoint_uuid"]
    assert {entry.rank for entry in manifest.files} == {0, 1}
    assert (manifest.experiment, manifest.entrypoint) == ("toy", "toy_trial:ToyTrial")
    assert manifest.progress.batches_trained == 12
    assert manifest.metrics["validation"] == result["validation_metrics"]
    assert manifest.hyperparameters["accumulation"] == 3
    assert manifest.config["searcher"]["metric"] == "loss"
    assert {"checkpoint_storage", "environment", "code"}.isdisjoint(manifest.config)


def test_a_fits_checkpoint_names_the_code_of_its_trial(
    straight_and_first: dict[str, Any], tmp_path: Path
) -> None:
    """The folder that the trial's module was imported from."""
    where = store(straight_and_first["folder"] / "straight")
    (manifest,) = where.list(straight_and_first["straight"][0]["trial"])
    code = code_of_checkpoint(CheckpointSource(manifest, where), tmp_path / "code")
    assert (code.folder / "toy_trial.py").read_bytes() == (TOY / "toy_trial.py").read_bytes()


@pytest.fixture(scope="module")
def second_start(straight_and_first: dict[str, Any]) -> dict[str, Any]:
    """With torchrun: several ways to continue after the run of 5 batches."""
    folder = straight_and_first["folder"]
    parts, uuid = folder / "parts", straight_and_first["first"][0]["checkpoint_uuid"]
    damaged = folder / "damaged"
    shutil.copytree(parts / "checkpoints", damaged / "checkpoints")
    victim = next(files(damaged, uuid).glob("model0/*rank_1*"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")

    def warm(name: str, **searcher: Any) -> dict[str, Any]:
        fit = {**every(4, 2), "step_zero_validation": True}
        one = run(folder / name, fit, **{**HPARAMS, "record": str(folder / name)})
        one["init"]["exp_conf"]["checkpoint_storage"] = f"file://{parts}/checkpoints"
        one["init"]["exp_conf"]["searcher"] |= {"source_checkpoint_uuid": uuid[:8], **searcher}
        return one

    in_memory = run(folder / "memory", every(4, 12), **HPARAMS)
    in_memory["init"]["exp_conf"]["checkpoint_storage"] = "memory://checkpoints"
    outcomes = fit_toys(
        "torchrun", folder / "second",
        run(parts, {**every(4, 12), "latest_checkpoint": "latest"}, **HPARAMS),
        run(damaged, {**every(4, 12), "latest_checkpoint": uuid}, **HPARAMS),
        run(folder / "none", {**every(4, 12), "latest_checkpoint": uuid}, **HPARAMS),
        warm("warm"),
        warm("weights", source_weights_only=True),
        in_memory,
    )  # fmt: skip
    names = ("rest", "damaged", "none", "warm", "weights", "memory")
    return {"victim": victim.name, "source": uuid, **dict(zip(names, outcomes, strict=True))}


def test_a_fit_resumes_bit_for_bit(
    straight_and_first: dict[str, Any], second_start: dict[str, Any]
) -> None:
    """5 + 7 batches equal 12."""
    folder = straight_and_first["folder"]
    whole, rest = straight_and_first["straight"], second_start["rest"]
    assert rest[0]["trial"] == straight_and_first["first"][0]["trial"]
    assert_same_end(folder / "straight", folder / "parts", whole, rest)


def test_a_damaged_checkpoint_is_an_error_on_every_rank(second_start: dict[str, Any]) -> None:
    """One byte of rank 1's file has changed: both ranks name the file."""
    first, second = second_start["damaged"]
    assert first == second
    assert first["error"].startswith("CheckpointDamaged: ")
    assert f"model0/{second_start['victim']}, written by rank 1, has digest" in first["error"]


def test_a_missing_checkpoint_is_an_error_on_every_rank(second_start: dict[str, Any]) -> None:
    """Although only one rank has looked for it."""
    first, second = second_start["none"]
    assert first == second
    assert first["error"].startswith("CheckpointNotFound: no checkpoint in file://")


def test_a_process_local_storage_is_refused(second_start: dict[str, Any]) -> None:
    """Every rank raises the error before anything is trained."""
    first, second = second_start["memory"]
    assert first == second
    assert first["error"].startswith(
        "ConfigError: checkpoint_storage: memory://checkpoints is in the memory of one process, "
        "and the driver of a script is another process; use a folder that all ranks see"
    )


@pytest.mark.parametrize("how", ["warm", "weights"])
def test_a_warm_start_begins_at_batch_0_with_the_sources_weights(
    straight_and_first: dict[str, Any], second_start: dict[str, Any], how: str
) -> None:
    """A new trial, whose first validation equals the source's last. Callbacks get the source."""
    folder, source = straight_and_first["folder"], straight_and_first["first"][0]
    started, *_ = hooks(folder / how)
    assert (started["hook"], started["first"]) == ("on_trial_startup", 0)
    assert started["uuid"] == second_start["source"]
    validations = [each for each in hooks(folder / how) if each["hook"] == "on_validation_end"]
    assert validations[0]["metrics"] == source["validation_metrics"]
    assert [line[0] for line in lines(folder / how, "samples", 0)[::3]] == [0, 1]
    assert second_start[how][0]["trial"] != source["trial"]


def test_a_warm_start_restores_the_optimizer_unless_weights_only(
    straight_and_first: dict[str, Any], second_start: dict[str, Any]
) -> None:
    """Adam counts its steps: 5 of the source and 2 of the new trial, or only these 2."""
    steps = {}
    for how in ("warm", "weights"):
        saved = files(
            straight_and_first["folder"] / "parts", second_start[how][0]["checkpoint_uuid"]
        )
        steps[how] = {int(t) for name, t in tensors(saved).items() if name.endswith("/step")}
    assert steps == {"warm": {7}, "weights": {2}}


@pytest.mark.long
def test_a_rank_that_raises_ends_the_others(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1 inside DeepSpeed: the launcher ends both and shows the error. A rank
    that still learns why it ends raises that."""
    spec = tmp_path / "spec.json"
    broken = run(tmp_path / "broken", every(5, 50), at_batch=3, do="raise", do_rank=1)
    spec.write_text(json.dumps([broken]))
    output = start("torchrun", tmp_path, 2, str(SCRIPT), str(spec))
    assert "RuntimeError: the toy was told to break" in output
    for outcome in tmp_path.glob("0-rank-*"):
        assert "the toy was told to break" in json.loads(outcome.read_text())["error"]
    assert len(lines(tmp_path / "broken", "samples", 0)) < 50


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """With torchrun and a trial that initialises torch.distributed: 9 batches, and 4 + 5."""
    folder = tmp_path_factory.mktemp("four")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIALFLOW_MANUAL_INIT_DISTRIBUTED", "1")
        outcomes = fit_toys(
            "torchrun", folder / "launch",
            run(folder / "straight", every(4, 9), **HPARAMS),
            run(folder / "parts", every(4, 4), **HPARAMS),
            run(folder / "parts", {**every(4, 9), "latest_checkpoint": "latest"}, **HPARAMS),
            ranks=4,
        )  # fmt: skip
    return {"folder": folder, **dict(zip(("straight", "first", "rest"), outcomes, strict=True))}


@pytest.mark.long
def test_the_trial_may_initialise_torch_distributed_on_four_ranks(four: dict[str, Any]) -> None:
    """The ranks still become one run, and each returns the same result."""
    result, *others = four["straight"]
    assert result["batches_trained"] == 9
    assert others == [result] * 3
    (manifest,) = store(four["folder"] / "straight").list()
    assert manifest.trial == result["trial"]
    assert {entry.rank for entry in manifest.files} == {0, 1, 2, 3}


@pytest.mark.long
def test_four_ranks_resume_bit_for_bit(four: dict[str, Any]) -> None:
    """4 + 5 batches equal 9."""
    assert four["rest"][0]["trial"] == four["first"][0]["trial"]
    assert_same_end(
        four["folder"] / "straight", four["folder"] / "parts", four["straight"], four["rest"]
    )
