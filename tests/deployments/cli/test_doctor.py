"""`trialflow doctor`."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import trialflow, write_experiment
from tests.support.faults.s3 import faulty_s3
from tests.support.prefect import free_port, isolated
from tests.support.s3 import S3Server
from trialflow.deployments.cli import doctor


def examined(folder: Path, *arguments: str, **variables: str) -> tuple[int, dict[str, Any]]:
    """Exit code and findings by subject, where no server is configured but by `variables`."""
    done = trialflow(
        folder, "doctor", "--json", *arguments,
        variables={"PREFECT_API_URL": "", **isolated(folder / "prefect"), **variables},
    )  # fmt: skip
    assert done.stderr == ""
    return done.returncode, {check["subject"]: check for check in json.loads(done.stdout)}


def test_a_machine_that_has_it_all(tmp_path: Path) -> None:
    """Where tests run everything is there: exit code 0, with the versions installed."""
    code, found = examined(tmp_path)
    assert code == 0
    assert {check["status"] for check in found.values()} == {"ok"}
    assert found["torch"]["found"] == importlib.metadata.version("torch")
    assert found["accelerators"]["found"] == "none: slots are CPU processes"
    assert found["registry"]["found"] == "conditional writes"
    assert found["server"]["found"].startswith("none configured")


def test_a_line_for_each_finding(tmp_path: Path) -> None:
    """A person reads a line a subject: how it is, what it is, what was found."""
    done = trialflow(tmp_path, "doctor", variables=isolated(tmp_path / "prefect"))
    lines = done.stdout.splitlines()
    assert len(lines) == 13
    assert all(line.startswith("ok    ") for line in lines)


def test_a_storage_that_cannot_be_written(tmp_path: Path) -> None:
    """It fails the examination, with the reason and what to do."""
    (tmp_path / "file").touch()
    code, found = examined(tmp_path, "--storage", str(tmp_path / "file" / "folder"))
    assert code == 1
    assert found["storage"]["status"] == "fail"
    assert "a file, not a folder: correct the path" in found["storage"]["found"]
    assert found["server"]["status"] == "ok"


def test_a_storage_without_conditional_writes(tmp_path: Path, moto_s3: S3Server) -> None:
    """That is a warning: the registry works with a lock, which asks something of the clocks."""
    with faulty_s3(moto_s3) as endpoint:
        endpoint.ignored = frozenset({"if-none-match"})
        server = endpoint.server()
        place = {"url": server.new_bucket(), "options": server.options}
        config = write_experiment(tmp_path, checkpoint_storage=place)
        found = {check.subject: check for check in doctor.stored(config, None)}
    assert found["storage"].status == "ok"
    assert str(found["registry"]).startswith("warn  registry     the storage has no conditional")
    assert "uses a lock: keep the clocks" in str(found["registry"])


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    """A server that is configured and not there is said, with its address."""
    api_url = f"http://127.0.0.1:{free_port()}/api"
    code, found = examined(tmp_path, PREFECT_API_URL=api_url)
    assert code == 1
    assert found["server"]["status"] == "fail"
    assert api_url in found["server"]["found"]


def test_missing_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without compiler and ninja DeepSpeed cannot start; how to get them is said."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor.sys, "executable", str(tmp_path / "python"))
    compiler, ninja = doctor.compiler(), doctor.ninja()
    assert (compiler.status, ninja.status) == ("fail", "fail")
    assert "apt install g++" in str(compiler)
    assert "pip install ninja" in str(ninja)


def test_missing_packages() -> None:
    """A package that all needs fails the examination, one that some need is a warning."""
    assert doctor.installed("trialflow-no-such-package").status == "fail"
    assert doctor.installed("trialflow-no-such-package", or_else="warn").status == "warn"


def test_accelerators_that_torch_cannot_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """GPUs beside a CPU build of torch are no use, and nobody would guess why."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: a'\necho 'GPU 1: b'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    versions = {"torch": "2.13.0+cpu"}
    monkeypatch.setattr(doctor.importlib.metadata, "version", versions.__getitem__)
    assert doctor.accelerators().found == "2 accelerators, but torch 2.13.0+cpu"
    assert doctor.accelerators().status == "fail"
    versions["torch"] = "2.13.0"
    assert doctor.accelerators().status == "ok"
