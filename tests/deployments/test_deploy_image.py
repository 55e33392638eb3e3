"""The Dockerfile, and the data files of the installed package."""

from __future__ import annotations

import fnmatch
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
from torch._appdirs import user_cache_dir

ROOT = Path(__file__).parents[2]
# The folder of the Python that runs the tests may not be on the path.
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
# The instructions of the Dockerfile: keyword and arguments.
TEXT = re.sub(r"^ *#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
LINES = [line.split(maxsplit=1) for line in TEXT.replace("\\\n", " ").splitlines() if line]


def instructions(keyword: str) -> list[str]:
    """The arguments of the Dockerfile's instructions with that keyword."""
    return [" ".join(rest.split()) for word, rest in LINES if word == keyword]


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="hadolint has no binary for this machine"
)
def test_hadolint_finds_nothing() -> None:
    """Not even a style issue."""
    assert HADOLINT, "hadolint is not installed: pip install -e '.[test]'"
    done = subprocess.run(
        [HADOLINT, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_signals_reach_the_command() -> None:
    """The entrypoint is an init that forwards signals, without a shell."""
    (entrypoint,), (command,) = instructions("ENTRYPOINT"), instructions("CMD")
    assert json.loads(entrypoint) == ["/usr/bin/tini", "--"]
    assert isinstance(json.loads(command), list)


def test_the_image_does_not_run_as_root() -> None:
    """Its user is a number, which Kubernetes can verify, and has a home folder for runs."""
    assert instructions("USER") == ["10001"]
    assert any("useradd --create-home --uid 10001" in run for run in instructions("RUN"))
    assert instructions("WORKDIR")[-1] == "/home/trialflow"


def test_the_image_installs_the_tested_versions() -> None:
    """Every pip install uses the constraints."""
    installs = [run for run in instructions("RUN") if "pip install" in run]
    assert installs
    assert all("-c constraints.txt" in run for run in installs)


def test_base_image_and_torch_are_of_the_same_cuda() -> None:
    """One argument chooses both, and the build fails if nvcc does not fit torch."""
    assert instructions("ARG")[0] == "TORCH=cpu"
    assert "TORCH_INDEX=https://download.pytorch.org/whl/${TORCH}" in instructions("ARG")
    *bases, chosen = instructions("FROM")
    assert chosen == "${TORCH}"
    pattern = r"nvidia/cuda:(\d+)\.(\d)\.\d-devel-\S+ AS cu(\d+)"
    cuda = [re.fullmatch(pattern, base) for base in bases]
    versions = [match.groups() for match in cuda if match is not None]
    assert [major + minor for major, minor, _ in versions] == [name for *_, name in versions]
    assert {name for *_, name in versions} == {"126", "130"}
    assert instructions("RUN")[-1].endswith('nvcc_problem as problem; sys.exit(problem())"')


def test_the_image_has_a_folder_for_compiled_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one where torch looks, which belongs to the image's user: so does a volume there."""
    home, folder = "/home/trialflow", "/home/trialflow/.cache/torch_extensions"
    (install,) = (run for run in instructions("RUN") if "install --directory" in run)
    assert f"--owner=trialflow --group=trialflow {home}/.cache {folder}" in install
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache_dir(appname="torch_extensions") == folder


def test_the_build_context_has_what_is_copied() -> None:
    """`.dockerignore` admits exactly what the Dockerfile copies, and it exists."""
    copied = {source for copy in instructions("COPY") for source in copy.split()[:-1]}
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
    assert all((ROOT / source).exists() for source in copied)


def test_data_files_are_part_of_the_package() -> None:
    """A wheel contains every data file in the folders of `trialflow`."""
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = {
        f"{package.removeprefix('trialflow.').replace('.', '/')}/{pattern}"
        for package, each in described["tool"]["setuptools"]["package-data"].items()
        for pattern in each
    }
    data = [
        path.relative_to(ROOT).as_posix()
        for folder in ("deployments", "flows", "tasks")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    assert {"deployments/prefect.yaml", "deployments/work_pools/kubernetes.json"} <= set(data)
    assert [
        name for name in data if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    ] == []
