"""Mistakes in a trial, each with its message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.slots import TOY, drive, lines, toy_config, warm_group
from trial_core.errors import RankFailed, TrialError
from trial_core.processes.slots.fork_server import ForkServer
from trial_core.trainer.entrypoint import load_trial_class

BESIDE = ", ".join(sorted(path.stem for path in TOY.glob("*.py")))


@pytest.fixture
def beside_the_toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in the folder of the toy trials, as ranks do."""
    monkeypatch.chdir(TOY)
    monkeypatch.syspath_prepend(TOY)


@pytest.mark.usefixtures("beside_the_toys")
@pytest.mark.parametrize(
    ("entrypoint", "message"),
    [
        (
            "toy_trail:ToyTrial",
            f'entrypoint "toy_trail:ToyTrial": there is no module "toy_trail" in {TOY} '
            f'(modules there: {BESIDE}); did you mean "toy_trial"?',
        ),
        (
            "toy_trial:ToyTrail",
            'entrypoint "toy_trial:ToyTrail": module toy_trial has no "ToyTrail"; '
            'did you mean "ToyTrial"?',
        ),
        (
            "bad_trials:NotATrial",
            'entrypoint "bad_trials:NotATrial" is not a trial: NotATrial is a class derived from '
            "object, but must be a subclass of trial_core.pytorch.PyTorchTrial or "
            "trial_core.deepspeed.DeepSpeedTrial",
        ),
        (
            "bad_trials:samples",
            'entrypoint "bad_trials:samples" is not a trial: samples is function',
        ),
        (
            "bad_trials:Unfinished",
            'trial "bad_trials:Unfinished" does not define build_training_data_loader, '
            "build_validation_data_loader, train_batch",
        ),
    ],
)
def test_an_entrypoint_that_is_not_a_trial(entrypoint: str, message: str) -> None:
    """The message says what it is, and suggests a name."""
    with pytest.raises(TrialError, match=re.escape(message)):
        load_trial_class(entrypoint)


def test_a_trial_that_still_imports_determined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what to import instead."""
    (tmp_path / "not_ported.py").write_text("from determined.pytorch import PyTorchTrial")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TrialError, match=r"import trial_core\.pytorch for determined\.pytorch"):
        load_trial_class("not_ported:Trial")


@pytest.mark.long
@pytest.mark.slots
def test_a_trial_that_breaks_a_rule(warm_server: ForkServer, tmp_path: Path) -> None:
    """The driver reports the trial's mistake, not a crash."""
    config = toy_config(
        tmp_path, 2, entrypoint="bad_trials:StepsOnce", hyperparameters={"accumulation": 2}
    )
    with warm_group(warm_server, 1) as slots, pytest.raises(RankFailed) as failure:
        drive(slots, config, tmp_path)
    assert failure.value.is_trial_mistake
    assert str(failure.value.error_message).startswith(
        "DeepSpeed model engine did not train for gradient accumulation steps: 2 call(s) of "
        "train_batch led to 1 micro-step(s)"
    )


@pytest.mark.long
@pytest.mark.slots
def test_a_state_that_no_run_would_read_is_refused_when_it_is_saved(
    warm_server: ForkServer, tmp_path: Path
) -> None:
    """As the trial's mistake: a restart would fail again."""
    config = toy_config(tmp_path, 1, entrypoint="state_trials:UnreadableState")
    with warm_group(warm_server, 1) as slots, pytest.raises(RankFailed) as failure:
        drive(slots, config, tmp_path)
    assert failure.value.is_trial_mistake
    assert failure.value.during == "checkpoint-save"
    assert str(failure.value.error_message).startswith(
        "the checkpoint would hold an object of state_trials.Unreadable at callbacks.unreadable."
    )


@pytest.mark.slots
def test_a_trials_exception_shows_the_trials_code(warm_server: ForkServer, tmp_path: Path) -> None:
    """The traceback begins in the trial. The callbacks are shut down before the rank ends."""
    config = toy_config(
        tmp_path, 1, entrypoint="bad_trials:RaisesInEvaluation",
        hyperparameters={"record": str(tmp_path)},
    )  # fmt: skip
    with warm_group(warm_server, 1) as slots, pytest.raises(RankFailed) as failure:
        drive(slots, config, tmp_path)
    assert not failure.value.is_trial_mistake
    assert (failure.value.error_type, failure.value.during) == ("KeyError", "validate")
    frames = re.findall(r'File "(.*)", line', failure.value.rank_traceback or "")
    assert frames == [str(TOY / "bad_trials.py")]
    assert lines(tmp_path, "hooks", rank=0)[-1]["hook"] == "on_trial_shutdown"
