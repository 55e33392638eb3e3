"""The command of a Core API script as an entrypoint."""

from __future__ import annotations

import shlex
import warnings

import pytest

from trial_core.config import ExperimentConfig, IgnoredFieldWarning
from trial_core.config.lengths import OPEN_END
from trial_core.errors import ConfigError
from trial_core.schedule.command import ScriptCommand, command_of, without_values
from trial_core.schedule.units import Batch


def experiment(entrypoint: object, **searcher: object) -> ExperimentConfig:
    return ExperimentConfig.from_mapping(
        {"entrypoint": entrypoint, "searcher": {"metric": "loss", **searcher}}
    )


@pytest.mark.parametrize(
    ("entrypoint", "expected"),
    [
        ("python3 train.py --lr 1", ScriptCommand("train.py", False, ("--lr", "1"))),
        ("./train.py --lr 1", ScriptCommand("./train.py", False, ("--lr", "1"))),
        ("/usr/bin/python3.11 -u -u sub/train.py", ScriptCommand("sub/train.py", False, ())),
        (["python", "-m", "pkg.train", "a b"], ScriptCommand("pkg.train", True, ("a b",))),
    ],
)
def test_a_command_is_read(entrypoint: object, expected: ScriptCommand) -> None:
    """As text or as a list; it is stored as text, which gives the same command again."""
    config = experiment(entrypoint)
    assert config.is_script
    assert command_of(config.entrypoint) == expected
    again = ExperimentConfig.model_validate(config.model_dump(mode="json"))
    assert again == config


@pytest.mark.parametrize(
    "entrypoint",
    [
        "python3 -m determined.launch.torch_distributed python3 train.py --trial 3",
        "python3 -m determined.launch.torch_distributed --nnodes 1 -- python3 train.py --trial 3",
        "python3 -m determined.launch.deepspeed python3 train.py --trial 3",
        "python3 -m determined.launch.torch_distributed train.py --trial 3",
    ],
)
def test_a_launcher_before_the_command_is_left_out(entrypoint: str) -> None:
    """With a warning: trialflow starts the ranks."""
    with pytest.warns(IgnoredFieldWarning, match="is not used; trialflow starts the ranks"):
        config = experiment(entrypoint)
    assert config.entrypoint == "python train.py --trial 3"


@pytest.mark.parametrize(
    "entrypoint",
    [
        "torchrun train.py",
        "sh run.sh",
        "python train",
        "python -c 'print(1)'",
        "python -O train.py",
    ],
)
def test_other_commands_are_refused(entrypoint: str) -> None:
    """The message says which commands there are."""
    with pytest.raises(ConfigError) as error:
        experiment(entrypoint, max_length=5)
    (line,) = str(error.value).splitlines()
    assert line.startswith('entrypoint: expected "module:Class"')
    assert line.endswith('or "python -m module [arguments]", or names a trial by --trial')


def test_only_a_script_needs_no_length() -> None:
    """It ends itself; a length that is given is kept."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert experiment("python train.py").searcher.max_length == OPEN_END
        assert experiment("python train.py", max_length=5).searcher.max_length == Batch(5)
    with pytest.raises(ConfigError, match=r"searcher\.max_length: missing"):
        experiment("model_def:MyTrial")


def test_a_trial_is_no_script() -> None:
    """A class has no command."""
    config = experiment("model_def:MyTrial", max_length=5)
    assert not config.is_script
    assert command_of(config.entrypoint) is None


@pytest.mark.parametrize(
    ("arguments", "recorded"),
    [
        ("--wandb-key secret --fp16", "--wandb-key ... --fp16"),
        ("--wandb_key=se=cret", "--wandb_key=..."),
        ("-v -psecret -p secret -k=secret", "-v -p... -p ... -k=..."),
        ("secret=secret db.password=secret +secret", "... ... ..."),  # as Hydra takes them
        ("postgres://me:secret@host -- -5 -.5 ''", "... ... ... ... ''"),
        ("'--key=first\nsecond' '---- secret ----' '--name secret'", "--key=... ... --name..."),
    ],
)
def test_only_the_names_of_options_are_left(arguments: str, recorded: str) -> None:
    """A value may be a credential, wherever it is."""
    assert shlex.join(without_values(shlex.split(arguments))) == recorded
