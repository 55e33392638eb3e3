"""How a rank reports an exception to the driver, and ends if it has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from tests.support.prefect import ROOT
from tests.support.versions import set_version
from trial_core.errors import ConfigError, TrialError
from trial_core.messages import Answer, encode
from trial_core.processes.slots import rank_main
from trial_core.processes.slots.announcer import Announcer
from trial_core.processes.slots.framing import ProtocolError
from trial_core.processes.slots.rank_main import Rank
from trial_core.processes.slots.rank_server import to_rank_error


class TrialErrorOfTheUser(Exception):
    """A user's class with the name of one of ours."""


TrialErrorOfTheUser.__name__ = "TrialError"


@pytest.mark.parametrize(
    ("error", "error_type", "is_ours"),
    [
        (TrialError("x"), "TrialError", True),
        (ConfigError("x"), "ConfigError", True),
        (TrialErrorOfTheUser("x"), "TrialError", False),
        (KeyError("x"), "KeyError", False),
    ],
)
def test_is_ours_depends_on_the_class(error: Exception, error_type: str, is_ours: bool) -> None:
    """Not on the class's name, which a user may reuse."""
    rank_error = to_rank_error(error)
    assert (rank_error.error_type, rank_error.is_ours) == (error_type, is_ours)


def test_an_error_without_a_message_says_so() -> None:
    """As a MemoryError of Python's own has none."""
    assert to_rank_error(MemoryError()).message == "without a message"


def test_an_error_message_with_invalid_unicode_can_be_sent() -> None:
    """A lone surrogate, from an undecodable file name, is replaced."""
    error = to_rank_error(OSError("no file \udcff"))
    assert error.message == "no file ?"
    assert encode(Answer(number=1, error=error))


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("Torch not compiled with CUDA enabled", "This rank has no GPU"),
        ("mat1 and mat2 must have the same dtype, but got Float and BFloat16", "A model with bf16"),
        ("Input type (float) and bias type (c10::Half) should be the same", "A model with bf16"),
        ("expected m1 and m2 to have the same dtype, but got: float != c10::Half", "A model with"),
        ("Input type (double) and bias type (float) should be the same", ""),
        ("CUDA out of memory", ""),
    ],
)
def test_known_errors_of_torch_are_followed_by_advice(text: str, advice: str) -> None:
    """After torch's own line."""
    message = to_rank_error(RuntimeError(text)).message
    assert message.startswith(f"{text}. {advice}" if advice else text)
    assert advice or message == text


def test_a_failed_import_is_shown_without_importlib(tmp_path: Path) -> None:
    """From the user's first line that is executed to the one that fails."""
    (tmp_path / "outer_module.py").write_text("import inner_module\n")
    (tmp_path / "inner_module.py").write_text("import no_such_module\n")
    program = (
        "import importlib; from trial_core.processes.slots.rank_server import to_rank_error\n"
        "try: importlib.import_module('outer_module')\n"
        "except ImportError as error: print(to_rank_error(error).traceback)"
    )
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", program]
    shown = subprocess.run(
        command, env={**os.environ, **path}, capture_output=True, text=True, check=True
    ).stdout
    assert "importlib" not in shown
    assert [line.split(", ")[0] for line in shown.splitlines() if "_module.py" in line] == [
        f'  File "{tmp_path}/{name}_module.py"' for name in ("outer", "inner")
    ]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (EOFError("closed"), "the driver is gone"),
        (ProtocolError("too long"), "the driver sent an invalid message: too long"),
        (msgspec.DecodeError("no tag"), "the driver sent an invalid message: no tag"),
    ],
)
def test_a_rank_without_a_driver_ends(error: Exception, why: str) -> None:
    """Its main thread would wait for requests for ever."""
    connection = mock.Mock()
    connection.receive.side_effect = error
    with mock.patch.object(rank_main, "end_rank") as end_rank:
        Rank(connection, 0)._server._receive()
    end_rank.assert_called_once_with(why)


def test_a_deepspeed_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """If its parts cannot be imported: the installed version, and the one that is needed."""
    bounds = "deepspeed<0.20,>=0.19.8"
    monkeypatch.setitem(sys.modules, "trial_core.trainer.entrypoint", None)  # so its import fails
    rank: Any = object.__new__(Rank)
    rank._announcer = Announcer(lambda message: None, is_silent=True)
    with pytest.raises(ModuleNotFoundError, match=r"trial_core\.trainer\.entrypoint"):
        rank._trials()
    set_version(monkeypatch, "deepspeed", "0.18.3", bounds)
    with pytest.raises(TrialError, match=f"deepspeed 0.18.3 is installed, and .* needs {bounds}"):
        rank._trials()
