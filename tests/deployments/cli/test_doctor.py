"""`trialflow doctor`."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from tests.support.cli import EITHER_WAY, Called, trialflow, write_experiment
from tests.support.faults.s3 import faulty_s3
from tests.support.gpus import fake_gpus
from tests.support.json_types import check_json
from tests.support.prefect import free_port, isolated
from tests.support.s3 import S3Server
from tests.support.versions import set_version
from trial_core.processes.machine import accelerators
from trialflow.deployments.cli import doctor
from trialflow.deployments.cli.check import Check, CheckStatus
from trialflow.deployments.cli.experiment_options import StoragePlace
from trialflow.flows.server.prefect_settings import environment


@pytest.mark.parametrize("called", EITHER_WAY)
def test_a_machine_that_can_train(tmp_path: Path, called: Called) -> None:
    """On the machine that runs the tests, all checks are ok and the exit code is 0."""
    variables = {"PREFECT_API_URL": "", **isolated(tmp_path / "prefect")}
    done = called(tmp_path, "doctor", "--json", variables=variables)
    assert (done.returncode, done.stderr) == (0, "")
    found = {check["subject"]: check for check in check_json(json.loads(done.stdout))["checks"]}
    assert len(found) == 12
    assert {check["status"] for check in found.values()} == {"ok"}
    assert found["torch"]["found"] == importlib.metadata.version("torch")
    assert found["accelerators"]["found"] == "none: slots are CPU processes"
    assert found["storage"]["found"].endswith("is writable, and its writes can be create-only")
    assert found["server"]["found"].startswith("none configured")


@pytest.mark.long
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
    """Runs would be refused."""
    with faulty_s3(moto_s3) as endpoint:
        endpoint.ignored = frozenset({"if-none-match"})
        server = endpoint.server()
        place = {"url": server.new_bucket(), "options": server.options}
        config = write_experiment(tmp_path, checkpoint_storage=place)
        found = {check.subject: check for check in doctor.stored(StoragePlace(config))}
    assert found["storage"].status == "fail"
    assert "ignores the condition of a write" in found["storage"].found


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


@pytest.mark.parametrize(
    ("package", "version", "status", "bounds"),
    [
        ("deepspeed", "0.18.3", "fail", "deepspeed<0.20,>=0.19.8"),
        ("deepspeed", "0.20.1", "warn", "deepspeed<0.20,>=0.19.8"),
        ("starlette", "0.9", "fail", "starlette<1.4,>=0.40"),
    ],
)
def test_versions_out_of_bounds(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str, status: CheckStatus, bounds: str
) -> None:
    """Too old a version of any dependency fails, one newer than what was tried is a warning."""
    set_version(monkeypatch, package, version, bounds)
    found = takewhile(lambda check: check.subject != "compiler", doctor.examine(StoragePlace(), []))
    assert [check for check in found if check.status != "ok"] == [
        Check(
            package, status,
            f"{package} {version} is installed, and trialflow needs {bounds}",
            f'pip install "{bounds}"',
        )
    ]  # fmt: skip


def test_accelerators_that_torch_cannot_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """GPUs with a CPU build of torch fail the check."""
    tool = fake_gpus(tmp_path, monkeypatch, 2, torch_build="cpu")
    (check,) = doctor.accelerators()
    assert check.status == "fail"
    assert "computes on the CPU only" in str(check)
    tool.unlink()
    (check,) = doctor.accelerators()
    assert check.status == "fail"
    assert "nvidia-smi is not on PATH" in str(check)


def test_the_accelerators_that_a_run_would_use_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not those that the environment hides from it."""
    fake_gpus(tmp_path, monkeypatch, 2, torch_build="cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    (check,) = doctor.accelerators()
    assert check.found == "1 × cuda (Model 1, driver 580.65)"


OLD_DRIVER = "this rank should train on cuda device 1, but torch finds none: driver is too old"
TWO = "accelerators 2 × cuda (Model 0, driver 580.65; Model 1, driver 580.65)"
WRONG_NVCC = "nvcc is of CUDA 12.8, but torch is built for CUDA 13.0"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "import os, sys; print('a library says hello');"
            "assert (sys.argv[1], os.environ['DS_ACCELERATOR']) == ('2', 'cuda');"
            "print('null'); print('null')",
            [f"ok    {TWO}", "ok    nvcc         of the same CUDA"],
        ),
        (
            f"print('\"{OLD_DRIVER}\"'); print('null')",
            [f"fail  {TWO}: {OLD_DRIVER}"],
        ),
        (
            f"print('null'); print('\"{WRONG_NVCC}\"')",
            [f"ok    {TWO}", f"warn  nvcc         {WRONG_NVCC}: needed for optim"],
        ),
        (
            "raise SystemExit('libcudart.so.13: cannot open shared object file')",
            [f"fail  {TWO}: a process like a rank's ended with code 1: "
             "libcudart.so.13: cannot"],
        ),
    ],
    ids=["fine", "old driver", "other nvcc", "broken torch"],
)  # fmt: skip
def test_what_a_rank_would_find(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, expected: list[str]
) -> None:
    """GPUs are counted, and a process like a rank's tries to use them, before any training."""
    fake_gpus(tmp_path, monkeypatch, 2, torch_build="cu130")
    monkeypatch.setattr(accelerators, "ACCELERATOR_CHECK", (sys.executable, "-c", script))
    found = [str(check) for check in doctor.accelerators()]
    assert [line[: len(start)] for line, start in zip(found, expected, strict=True)] == expected


@pytest.mark.long
def test_the_check_of_accelerators_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the installed torch, in a separate process: it has no support for the GPUs."""
    fake_gpus(tmp_path, monkeypatch, 2, torch_build="cu130")
    (check,) = doctor.accelerators()
    assert check.status == "fail"
    assert "this rank should train on cuda device 1, but torch" in str(check)


def test_a_deepspeed_config_with_obsolete_keys(tmp_path: Path) -> None:
    """The config that a hyperparameter names: what takes their place, before a run is started."""
    ds_config = {"elasticity": {}, "checkpoint": {"writer": {"type": "fast"}}}
    (tmp_path / "ds.json").write_text(json.dumps(ds_config))
    hyperparameters = {"deepspeed_config": "ds.json", "other": "not_there.json", "lr": 0.1}
    config = write_experiment(tmp_path, code=str(tmp_path), hyperparameters=hyperparameters)
    checks = list(doctor.deepspeed_configs(config))
    assert [check.status for check in checks] == ["fail", "fail"]
    assert f"{tmp_path}/ds.json: the DeepSpeed config's checkpoint.writer" in checks[0].found
    assert "removed elasticity: give train_batch_size" in checks[1].found
    (tmp_path / "ds.json").write_text("{")
    (check,) = doctor.deepspeed_configs(config)
    assert "is not valid JSON" in check.found
