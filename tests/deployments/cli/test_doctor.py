"""`trialflow doctor`."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

import trial_core.slots.accelerators
from tests.support.cli import trialflow, write_experiment
from tests.support.faults.s3 import faulty_s3
from tests.support.gpus import fake_gpus
from tests.support.prefect import free_port, isolated
from tests.support.s3 import S3Server
from trialflow.deployments.cli import doctor
from trialflow.flows.server.prefect_settings import environment


def test_a_machine_that_can_train(tmp_path: Path) -> None:
    """On the machine that runs the tests, all checks are ok and the exit code is 0."""
    variables = {"PREFECT_API_URL": "", **isolated(tmp_path / "prefect")}
    done = trialflow(tmp_path, "doctor", "--json", variables=variables)
    assert (done.returncode, done.stderr) == (0, "")
    found = {check["subject"]: check for check in json.loads(done.stdout)}
    assert len(found) == 13
    assert {check["status"] for check in found.values()} == {"ok"}
    assert found["torch"]["found"] == importlib.metadata.version("torch")
    assert found["accelerators"]["found"] == "none: slots are CPU processes"
    assert found["create-only"]["found"] == "conditional writes"
    assert found["server"]["found"].startswith("none configured")


def test_a_failed_check(tmp_path: Path) -> None:
    """The exit code is 1. The text has one line per check, with the reason and the advice."""
    (tmp_path / "file").touch()
    storage = str(tmp_path / "file" / "folder")
    variables = {"PREFECT_API_URL": "", **isolated(tmp_path / "prefect")}
    done = trialflow(tmp_path, "doctor", "--storage", storage, variables=variables)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.startswith("ok    ")] == [
        line for line in lines if line.startswith("fail  storage")
    ]
    assert "a file, not a folder: correct the path" in done.stdout


def test_a_storage_without_conditional_writes(tmp_path: Path, moto_s3: S3Server) -> None:
    """It is a warning: runs and the registry take a lock, which needs correct clocks."""
    with faulty_s3(moto_s3) as endpoint:
        endpoint.ignored = frozenset({"if-none-match"})
        server = endpoint.server()
        place = {"url": server.new_bucket(), "options": server.options}
        config = write_experiment(tmp_path, checkpoint_storage=place)
        found = {check.subject: check for check in doctor.stored(config, None)}
    assert found["storage"].status == "ok"
    assert str(found["create-only"]).startswith("warn  create-only  the storage has no conditional")
    assert "runs and the registry take a lock: keep the clocks" in str(found["create-only"])


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    """The check fails with the server's address."""
    api_url = f"http://127.0.0.1:{free_port()}/api"
    with environment({**isolated(tmp_path), "PREFECT_API_URL": api_url}):
        check = doctor.prefect_server()
    assert check.status == "fail"
    assert api_url in check.found


def test_missing_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some optimizers need compiler and ninja; the advice says how to install them."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor.sys, "executable", str(tmp_path / "python"))
    compiler, ninja = doctor.compiler(), doctor.ninja()
    assert (compiler.status, ninja.status) == ("warn", "warn")
    assert "apt install g++" in str(compiler)
    assert "pip install ninja" in str(ninja)


def test_the_environments_own_ninja_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ranks prefer it to another one that PATH finds first."""
    for folder in ("environment", "system"):
        (tmp_path / folder).mkdir()
        ninja = tmp_path / folder / "ninja"
        ninja.write_text("#!/bin/sh\n")
        ninja.chmod(0o755)
    monkeypatch.setattr(doctor.sys, "executable", str(tmp_path / "environment" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "system"))
    assert doctor.ninja().found == str(tmp_path / "environment" / "ninja")


def test_missing_packages() -> None:
    """A missing required package fails; a missing optional one is a warning."""
    assert doctor.installed("trialflow-no-such-package").status == "fail"
    assert doctor.installed("trialflow-no-such-package", or_else="warn").status == "warn"


def test_accelerators_that_torch_cannot_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """GPUs with a CPU build of torch fail the check."""
    tool = fake_gpus(tmp_path, monkeypatch, 2, torch_build="cpu")
    assert doctor.accelerators().status == "fail"
    assert "computes on the CPU only" in str(doctor.accelerators())
    monkeypatch.setattr(trial_core.slots.accelerators, "_torch_build", lambda: "cu130")
    assert str(doctor.accelerators()) == "ok    accelerators 2 accelerators (cuda)"
    tool.unlink()
    assert doctor.accelerators().status == "fail"
    assert "nvidia-smi is not on PATH" in str(doctor.accelerators())
