"""A function of a code folder, called in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.prefect import ROOT
from tests.support.processes import alive, wait_until_gone
from tests.support.waiting import until
from trial_core.models.callback_process import call

HOOKS = """
import asyncio, json, os, pathlib, subprocess, sys, time

class Nested:
    @staticmethod
    def deep(outcome):
        pathlib.Path("deep").touch()

def tell(outcome):
    known = {"outcome": outcome, "cwd": os.getcwd(), "first": sys.path[0], "HUE": os.environ["HUE"]}
    pathlib.Path("told.json").write_text(json.dumps(known))
    print("told them")

def broken(outcome):
    print("so far so good")
    raise ValueError("no such channel")

def leaving(outcome):
    os._exit(7)

def sneaking(outcome):
    sys.exit(0)

async def waiting(outcome):
    await asyncio.sleep(0)
    pathlib.Path("waited").touch()
    if outcome.get("fails"):
        raise ValueError("no such channel")

def yielding(outcome):
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
    return tmp_path


def test_it_is_given_the_outcome(code: Path) -> None:
    """In the code folder, which comes first on its path, with the variables that it is given; what
    it prints is kept."""
    outcome = {"promoted": True, "why": "größer\n", "value": None}
    log = code / "logs" / "tell.log"
    assert call("hooks:tell", outcome, code=code, log=log, environment={"HUE": "blue"}) is None
    told = json.loads((code / "told.json").read_text())
    assert told == {"outcome": outcome, "cwd": str(code), "first": str(code), "HUE": "blue"}
    assert log.read_text() == "told them\n"
    assert call("hooks:Nested.deep", {}, code=code, log=log) is None
    assert (code / "deep").exists()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("hooks:broken", "ValueError: no such channel (exit code 1; its output: "),
        ("hooks:leaving", "it said nothing (exit code 7; its output: "),
        ("hooks:absent", "AttributeError: module 'hooks' has no attribute 'absent' (exit code 1; "),
        ("absent:tell", "ModuleNotFoundError: No module named 'absent' (exit code 1; "),
        ("hooks:sneaking", "it ended its process (sys.exit, os._exit) instead of returning (exit "),
        ("hooks:yielding", "TypeError: hooks:yielding is a generator"),
    ],
)
def test_what_went_wrong(code: Path, function: str, said: str) -> None:
    """The last that it said, how it ended, and where the rest is."""
    problem = call(function, {}, code=code, log=code / "log")
    assert problem is not None
    assert problem.startswith(said)
    assert str(code / "log") in problem


def test_it_may_only_be_found(code: Path) -> None:
    """Without being called: whether it is there is known before there is anything to tell."""
    assert call("hooks:tell", None, code=code, log=code / "log") is None
    assert not (code / "told.json").exists()
    problem = call("hooks:absent", None, code=code, log=code / "log")
    assert problem is not None
    problem = call("hooks:__name__", None, code=code, log=code / "log")
    assert problem is not None
    assert problem.startswith("TypeError: hooks:__name__ is no function")


def test_a_module_that_leaves_while_it_is_imported(code: Path) -> None:
    """Holds no function, whatever its exit code says."""
    (code / "leaver.py").write_text("raise SystemExit(0)\n")
    problem = call("leaver:tell", None, code=code, log=code / "log")
    assert problem is not None
    assert problem.startswith("it ended its process")


def test_a_coroutine(code: Path) -> None:
    """Is run to its end; what it raises is what went wrong."""
    assert call("hooks:waiting", {}, code=code, log=code / "log") is None
    assert (code / "waited").exists()
    problem = call("hooks:waiting", {"fails": True}, code=code, log=code / "log")
    assert problem is not None
    assert problem.startswith("ValueError: no such channel")


def test_a_path_of_its_own(code: Path) -> None:
    """Is added to that on which this package is found, and does not take its place."""
    log, environment = code / "log", {"PYTHONPATH": "/elsewhere", "HUE": "blue"}
    assert call("hooks:tell", {}, code=code, log=log, environment=environment) is None


def pids(code: Path) -> list[int]:
    until((code / "pids").exists, "the function's process")
    return [int(pid) for pid in (code / "pids").read_text().split()]


def test_one_that_hangs_is_broken_off(code: Path) -> None:
    """As soon as it is unwanted, with all that it has started."""
    problem = call(
        "hooks:hanging", {}, code=code, log=code / "log", is_unwanted=(code / "pids").exists
    )
    assert problem == "it was broken off: the run was to end"
    assert wait_until_gone(pids(code), 10) == []


def test_one_that_takes_too_long_is_broken_off(code: Path) -> None:
    """Nobody needs to ask for that."""
    problem = call("hooks:hanging", {}, code=code, log=code / "log", timeout_seconds=0.5)
    assert problem == "it was broken off: it took longer than 0.5 s"


def test_it_outlives_nobody(code: Path) -> None:
    """Its caller is killed: it is gone, with all that it has started."""
    program = (
        "from pathlib import Path; from trial_core.models.callback_process import call; "
        "call('hooks:hanging', {}, code=Path('.').absolute(), log=Path('log').absolute())"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", program], cwd=code, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    begun = pids(code)
    assert alive(begun) == begun
    began = time.monotonic()
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    assert wait_until_gone(begun, 10) == []
    assert time.monotonic() - began < 10
