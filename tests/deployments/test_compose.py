"""The values of `compose.yaml`: versions, ports, secrets, settings and commands."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from typing import Any

import prefect.settings
import pytest
import yaml

from tests.support.snippets import ROOT, SNIPPETS
from trialflow.deployments.cli.main import app

TEXT = (ROOT / "compose.yaml").read_text()
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(TEXT)["services"]
SECRETS = ("POSTGRES_PASSWORD", "PREFECT_PASSWORD", "S3_SECRET_KEY")
HAS_COMPOSE = shutil.which("docker") is not None and (
    subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode
    == 0
)


def constraint(package: str) -> str:
    found = re.search(rf"^{package}==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def variables() -> dict[str, str]:
    found = (each.get("environment", {}) for each in SERVICES.values())
    return {name: value for each in found for name, value in each.items()}


def test_the_images_have_the_tested_versions() -> None:
    """Of Prefect and MLflow those of the constraints; each other image names one version."""
    images = {each["image"].rpartition(":")[0]: each["image"].rpartition(":")[2]
              for each in SERVICES.values() if "build" not in each}  # fmt: skip
    assert images["prefecthq/prefect"].startswith(f"{constraint('prefect')}-python3.")
    assert images["ghcr.io/mlflow/mlflow"] == f"v{constraint('mlflow')}"
    assert all(re.fullmatch(r"v?\d+\.\d+(\.\d+)?(-python3\.\d+)?", tag) for tag in images.values())


def test_ports_are_open_to_this_machine_alone() -> None:
    """Also those of services with a password."""
    ports = [port for each in SERVICES.values() for port in each.get("ports", [])]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_no_secret_has_a_default() -> None:
    """All come from .env, which is in no image and in no commit; without one, nothing starts."""
    secret = [value for name, value in variables().items()
              if re.search("PASSWORD|SECRET|AUTH_STRING|CONNECTION_URL", name)]  # fmt: skip
    assert len(secret) >= 5
    named = rf"\$\{{({'|'.join(SECRETS)})(:\?[^}}]+)?\}}"
    for value in secret:
        assert re.fullmatch(rf"(trialflow:|postgresql\+asyncpg://prefect:)?{named}(@\S+)?", value)
    assert all(f"${{{name}:?" in TEXT for name in SECRETS)
    assert not re.search(r"\$\{\w+:?-", TEXT), "a default"
    assert "/.env" in (ROOT / ".gitignore").read_text().splitlines()
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"


def test_the_server_is_set_up_as_that_of_a_service() -> None:
    """It has the settings of the guide's systemd unit, but for addresses; all are Prefect's."""
    unit = next(s.text for s in SNIPPETS if s.title == "/etc/systemd/system/prefect-server.service")
    settings = SERVICES["prefect"]["environment"]
    assert [name for name in settings if not hasattr(prefect.settings, name)] == []
    wanted = dict(re.findall(r"^(?:Environment=|# )(PREFECT_\w+)=(.*)$", unit, re.MULTILINE))
    assert wanted.keys() <= settings.keys()
    assert all(
        settings[name] == value for name, value in wanted.items() if re.search("LEASE|EVENTS", name)
    )


def test_the_worker_saves_when_it_is_stopped() -> None:
    """It has the time that a systemd unit gives it, and no capabilities; the commands are ours."""
    worker = SERVICES["worker"]
    assert worker["stop_grace_period"] == "90s"
    for service in ("worker", "setup"):
        assert SERVICES[service]["cap_drop"] == ["ALL"]
    _, _, setup = SERVICES["setup"]["command"]
    for command in (worker["command"], setup.rpartition("&& ")[2]):
        program, *words = shlex.split(command)
        assert program == "trialflow"
        app.parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.skipif(not HAS_COMPOSE, reason="needs Docker's compose")
def test_docker_reads_the_file() -> None:
    """With the secrets; without them it says how they are made."""

    def config(**secrets: str) -> subprocess.CompletedProcess[str]:
        plain = {name: value for name, value in os.environ.items() if name not in SECRETS}
        return subprocess.run(
            ["docker", "compose", "--env-file", "/dev/null", "config", "--quiet"],
            cwd=ROOT, env={**plain, **secrets}, text=True, capture_output=True, check=False,
        )  # fmt: skip

    read = config(**dict.fromkeys(SECRETS, "x"))
    assert (read.returncode, read.stderr) == (0, "")
    refused = config()
    assert refused.returncode != 0
    assert "docs/guides/deploying.md" in refused.stderr
