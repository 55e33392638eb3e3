"""The entrypoint of a Core API script: the command ``python train.py [arguments]``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import Self

PYTHON = re.compile(r"(.*/)?python(3(\.\d+)?)?")
COMMAND_PATTERN = r"python .+"
"""The beginning of a command in normal form; see `ScriptCommand.text`."""

LAUNCHERS = ("determined.launch.torch_distributed", "determined.launch.deepspeed")
"""Modules of Determined that start ranks, which then run the command that follows them."""

_UNBUFFERED = "-u"
_OPTION = re.compile(r"(--[A-Za-z][\w.-]*=?|-[A-Za-z]=?)(.*)", re.DOTALL)
_LEFT_OUT = "..."


@dataclass(frozen=True)
class ScriptCommand:
    """The command that every rank runs: `target` is the script's path below the code folder, or the
    name of a module, and `arguments` its ``sys.argv[1:]``."""

    target: str
    is_module: bool
    arguments: tuple[str, ...]

    @classmethod
    def parse(cls, words: Sequence[str]) -> Self | None:
        """The command in the words of a command line; None if they are not such a command.

        A script may be named alone, as ``./train.py``.
        """
        if not words or not (PYTHON.fullmatch(words[0]) or words[0].endswith(".py")):
            return None
        rest = [*words] if words[0].endswith(".py") else [*words[1:]]
        while rest[:1] == [_UNBUFFERED]:  # ranks never buffer their output
            del rest[0]
        is_module = rest[:1] == ["-m"]
        if is_module:
            del rest[0]
        if not rest or rest[0].startswith("-") or (not is_module and not rest[0].endswith(".py")):
            return None
        return cls(rest[0], is_module, tuple(rest[1:]))

    @property
    def text(self) -> str:
        """The command as written in `ExperimentConfig.entrypoint`."""
        words = ["python", *(["-m"] if self.is_module else []), self.target, *self.arguments]
        return shlex.join(words)


def without_values(arguments: Sequence[str]) -> tuple[str, ...]:
    """The names of options, with ``...`` for each value: a value may be a credential.

    ``--lr 0.1 --key=secret -psecret data`` becomes ``--lr ... --key=... -p... ...``.
    """
    return tuple(map(_without_value, arguments))


def _without_value(argument: str) -> str:
    option = _OPTION.fullmatch(argument)
    name, value = option.groups() if option is not None else ("", argument)
    return f"{name}{_LEFT_OUT}" if value else name


def command_of(entrypoint: str) -> ScriptCommand | None:
    """The command in a validated entrypoint; None if it names a trial's class."""
    return ScriptCommand.parse(shlex.split(entrypoint)) if is_command(entrypoint) else None


def is_command(entrypoint: str) -> bool:
    """Return whether a validated entrypoint is a command, not ``module:Class``."""
    return re.match(COMMAND_PATTERN, entrypoint) is not None


def without_launcher(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The launcher at the beginning of a command line, if any, and the command after it.

    Options of the launcher are dropped: trialflow starts the ranks.
    """
    outer = ScriptCommand.parse(words)
    if outer is None or not outer.is_module or outer.target not in LAUNCHERS:
        return None, [*words]
    rest = [*outer.arguments]
    if "--" in rest:
        return outer.target, rest[rest.index("--") + 1 :]
    starts = (i for i, word in enumerate(rest) if PYTHON.fullmatch(word) or word.endswith(".py"))
    return outer.target, rest[next(starts, len(rest)) :]
