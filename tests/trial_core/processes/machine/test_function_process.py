"""Calling a function of a code folder in a separate process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.prefect import ROOT
from tests.support.processes import alive, wait_until_gone
from tests.support.waiting import until
from trial_core.processes.machine.function_process import call_function

HOOKS = """
import asyncio, json, os, pathlib, subprocess, sys, time

class Nested:
    @staticmethod
    def deep(outcome):
        pathlib.Path("deep").touch()

def tell(outcome):
    seen = {"outcome": outcome, "cwd": os.getcwd(), "first": sys.path[0], "HUE": os.environ["HUE"]}
    pathlib.Path("told.json").write_text(json.dumps(seen))
    print("told them")

def raising(outcome):
    print("before the error")
    raise ValueError("no such channel")

def exiting(outcome):
    os._exit(7)

def exiting_with_0(outcome):
    sys.exit(0)

async def coroutine(outcome):
    await asyncio.sleep(0)
    pathlib.Path("awaited").touch()
    if outcome.get("fails"):
        raise ValueError("no such channel")

def generator(outcome):
    yield outcome

def hanging(outcome):
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path("pids.tmp").write_text(f"{os.getpid()} {child.pid}")
    os.rename("pids.tmp", "pids")
    time.sleep(600)
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A code folder with functions to call."""
    (tmp_path / "hooks.py").write_text(HOOKS)
    (tmp_path / "exits_on_import.py").write_text("raise SystemExit(0)\n")
    return tmp_path


def test_the_function_gets_the_argument(code: Path) -> None:
    """It runs in the code folder, first on the import path, with the given variables; a given
    PYTHONPATH does not hide this package. Its output is logged."""
    outcome = {"promoted": True, "why": "größer\n", "value": None}
    log, environment = code / "logs" / "tell.log", {"HUE": "blue", "PYTHONPATH": "/elsewhere"}
    assert call_function("hooks:tell", outcome, code=code, log=log, environment=environment) is None
    seen = json.loads((code / "told.json").read_text())
    assert seen == {"outcome": outcome, "cwd": str(code), "first": str(code), "HUE": "blue"}
    assert log.read_text() == "told them\n"


def test_a_nested_function(code: Path) -> None:
    """``module:Class.function`` is found."""
    assert call_function("hooks:Nested.deep", {}, code=code, log=code / "log") is None
    assert (code / "deep").exists()


def test_a_coroutine_function(code: Path) -> None:
    """It is awaited; its exception is the failure."""
    assert call_function("hooks:coroutine", {}, code=code, log=code / "log") is None
    assert (code / "awaited").exists()
    problem = call_function("hooks:coroutine", {"fails": True}, code=code, log=code / "log")
    assert problem is not None
    assert problem.startswith("ValueError: no such channel")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("hooks:raising", "ValueError: no such channel (exit code 1; output: "),
        ("hooks:exiting", "no output (exit code 7; output: "),
        ("hooks:exiting_with_0", "the process ended (sys.exit, os._exit) before the function ret"),
        ("exits_on_import:tell", "the process ended (sys.exit, os._exit) before the function ret"),
        ("hooks:absent", "AttributeError: module 'hooks' has no attribute 'absent' (exit code 1; "),
        ("absent:tell", "ModuleNotFoundError: No module named 'absent' (exit code 1; "),
        ("hooks:generator", "TypeError: hooks:generator is a generator function"),
    ],
)
def test_failures(code: Path, function: str, message: str) -> None:
    """The message has the last line of output, the exit code and the log file."""
    problem = call_function(function, {}, code=code, log=code / "log")
    assert problem is not None
    assert problem.startswith(message)
    assert str(code / "log") in problem


def test_import_without_a_call(code: Path) -> None:
    """Without an argument the function is only imported: missing ones are known in advance."""
    assert call_function("hooks:tell", None, code=code, log=code / "log") is None
    assert not (code / "told.json").exists()
    problem = call_function("hooks:__name__", None, code=code, log=code / "log")
    assert problem is not None
    assert problem.startswith("TypeError: hooks:__name__ is not callable")


def pids(code: Path) -> list[int]:
    until((code / "pids").exists, "the function's process")
    return [int(pid) for pid in (code / "pids").read_text().split()]


def test_cancel(code: Path) -> None:
    """The process is killed with all its children."""
    problem = call_function(
        "hooks:hanging", {}, code=code, log=code / "log", should_cancel=(code / "pids").exists
    )
    assert problem == "killed: the run was stopped"
    assert wait_until_gone(pids(code), 10) == []


def test_timeout(code: Path) -> None:
    """The process is killed after its timeout."""
    problem = call_function("hooks:hanging", {}, code=code, log=code / "log", timeout_seconds=0.1)
    assert problem == "killed: it took longer than 0.1 s"


def test_the_process_dies_with_its_caller(code: Path) -> None:
    """Also when the caller is killed by SIGKILL, and with all its children."""
    program = (
        "from pathlib import Path\n"
        "from trial_core.processes.machine.function_process import call_function\n"
        "call_function('hooks:hanging', {}, code=Path('.').absolute(), log=Path('log').absolute())"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", program], cwd=code, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    started = pids(code)
    assert alive(started) == started
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    assert wait_until_gone(started, 10) == []
