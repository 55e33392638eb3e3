"""A script runs as ``python train.py`` would run it."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import pytest

from trial_core.errors import TrialError
from trial_core.processes.slots.rank_server import to_rank_error
from trial_core.rank.core_api.script_controller import run_script
from trial_core.schedule.command import ScriptCommand


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(code: Path, text: str, *arguments: str) -> None:
    (code / "sub").mkdir(exist_ok=True)
    (code / "sub" / "train.py").write_text(text)
    run_script(ScriptCommand("sub/train.py", False, arguments))


def test_it_is_the_main_program(code: Path) -> None:
    """Name, arguments, current folder and import path; all are as before afterwards."""
    (code / "sub").mkdir()
    (code / "sub" / "beside_the_script.py").write_text("VALUE = 7\n")
    before = sys.argv, sys.path, sys.modules["__main__"]
    run(
        code,
        "import json, os, sys, beside_the_script\n"
        "seen = [__name__, sys.argv[1:], os.getcwd(), beside_the_script.VALUE]\n"
        "seen.append(sys.modules['__main__'].__file__)\n"
        "open('seen.json', 'w').write(json.dumps(seen))\n",
        "--lr", "1",
    )  # fmt: skip
    assert (code / "seen.json").read_text() == (
        f'["__main__", ["--lr", "1"], "{code}", 7, "{code}/sub/train.py"]'
    )
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


def test_a_module_runs_as_the_main_program(code: Path) -> None:
    """As ``python -m`` does."""
    (code / "counting_module.py").write_text("open(__name__ + '.txt', 'w').write('ran')\n")
    run_script(ScriptCommand("counting_module", True, ()))
    assert (code / "__main__.txt").read_text() == "ran"


@pytest.mark.parametrize("text", ["", "import sys; sys.exit()", "raise SystemExit(0)"])
def test_exit_code_0_is_a_success(code: Path, text: str) -> None:
    """As is the script's end."""
    run(code, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys\nsys.exit(3)", "sub/train.py exited with code 3"),
        ("raise SystemExit('no data')", "sub/train.py exited with code 1: no data"),
    ],
)
def test_another_exit_code_is_a_failure(code: Path, text: str, message: str) -> None:
    """The message has the code, and what the script said."""
    with pytest.raises(SystemExit, match=message) as error:
        run(code, text)
    assert error.value.__suppress_context__
    assert traceback.extract_tb(error.value.__traceback__)[-1].filename == f"{code}/sub/train.py"


def test_the_traceback_of_an_error_begins_in_the_script(code: Path) -> None:
    """The driver shows it first, without our frames and runpy's."""
    with pytest.raises(ValueError, match="no such layer") as error:
        run(code, "def build():\n    raise ValueError('no such layer')\nbuild()\n")
    frames_of_this_test = 2  # a rank has none of them
    trace = error.value.__traceback__
    for _ in range(frames_of_this_test):
        trace = trace.tb_next if trace is not None else None
    lines = to_rank_error(error.value.with_traceback(trace)).traceback.splitlines()
    frames = [line for line in lines if line.startswith("  File")]
    assert frames[0] == f'  File "{code}/sub/train.py", line 3, in <module>'


def test_a_missing_script_is_named_with_those_there_are(code: Path) -> None:
    """So that a typing mistake is seen at once."""
    (code / "train.py").touch()
    with pytest.raises(TrialError, match=r"no script trian\.py in .*scripts there: train\.py"):
        run_script(ScriptCommand("trian.py", False, ()))


@pytest.mark.parametrize("name", ["no_such_module", "no_such_package.train", "package_here.train"])
def test_a_missing_module_is_named(code: Path, name: str) -> None:
    """Without a traceback through our frames and runpy's."""
    (code / "package_here").mkdir()
    (code / "package_here" / "__init__.py").touch()
    with pytest.raises(TrialError, match=f'there is no module "{name}" in {code} '):
        run_script(ScriptCommand(name, True, ()))


def test_a_script_that_is_named_as_a_module_is_recognised(code: Path) -> None:
    """``python -m train.py`` is a usual mistake."""
    (code / "as_a_module.py").touch()
    with pytest.raises(TrialError, match=r'no module "as_a_module\.py".*mean "as_a_module"\?'):
        run_script(ScriptCommand("as_a_module.py", True, ()))


def test_a_package_that_imports_what_is_missing_says_so_itself(code: Path) -> None:
    """The module is there: the error is the package's."""
    (code / "broken_package").mkdir()
    (code / "broken_package" / "__init__.py").write_text("import not_installed\n")
    (code / "broken_package" / "train.py").touch()
    with pytest.raises(ModuleNotFoundError, match="not_installed"):
        run_script(ScriptCommand("broken_package.train", True, ()))
