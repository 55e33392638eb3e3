"""The image, and what an installed package brings along for `trialflow deploy`."""

from __future__ import annotations

import fnmatch
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
# Beside the Python that runs the tests, whose folder need not be on the path.
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
# Keywords of a Dockerfile, in the order they come, without what follows them on further lines.
LINES = [
    line.split(maxsplit=1)
    for line in (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    if line and not line.startswith("#")
]


def told(keyword: str) -> list[str]:
    """What the Dockerfile says with a keyword."""
    return [" ".join(rest.split()) for word, rest in LINES if word == keyword]


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="hadolint has no binary for this machine"
)
def test_hadolint_has_nothing_to_say() -> None:
    """Not even a remark on style."""
    assert HADOLINT, "hadolint is not installed: pip install -e '.[test]'"
    done = subprocess.run(
        [HADOLINT, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_signals_reach_what_the_image_runs() -> None:
    """An init that hands them on, and no shell between it and the command."""
    (entrypoint,), (command,) = told("ENTRYPOINT"), told("CMD")
    assert json.loads(entrypoint) == ["/usr/bin/tini", "--"]
    assert isinstance(json.loads(command), list)


def test_the_image_does_not_run_as_root() -> None:
    """Its user has a number, which Kubernetes can check, and a home to write runs to."""
    assert told("USER") == ["10001"]
    assert any("useradd --create-home --uid 10001" in run for run in told("RUN"))
    assert told("WORKDIR")[-1] == "/home/trialflow"


def test_the_image_takes_the_versions_that_were_tested() -> None:
    """All that pip installs is held by the constraints."""
    installs = [run for run in told("RUN") if "pip install" in run]
    assert installs
    assert all("-c constraints.txt" in run for run in installs)


def test_the_context_holds_what_is_copied() -> None:
    """`.dockerignore` lets through what the Dockerfile copies, which is there."""
    copied = {source for copy in told("COPY") for source in copy.split()[:-1]}
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
    assert all((ROOT / source).exists() for source in copied)


def test_data_files_are_part_of_the_package() -> None:
    """What lies beside the modules of `deployments` is installed with them, from a wheel too."""
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = described["tool"]["setuptools"]["package-data"]["deployments"]
    folder = ROOT / "deployments"
    data = [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    assert {"prefect.yaml", "work_pools/kubernetes.json"} <= set(data)
    assert [
        name for name in data if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    ] == []
