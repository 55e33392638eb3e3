"""`trialflow join` and `train --engine join`, as in docs/guides/several-machines.md."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.cli import TRIALFLOW, environment_in, trialflow, write_experiment
from tests.support.prefect import PrefectServer
from trial_core.processes.nodes.join_token import new_token

END_SECONDS = 120.0
NODES = re.compile(r"run this on each node: trialflow (join --driver \S+ --token-file \S+)")


@pytest.fixture
def server(prefect_server: PrefectServer) -> Mapping[str, str]:
    """Environment of a command that uses the tests' Prefect server."""
    return prefect_server.environment


@pytest.mark.long
@pytest.mark.slots
@pytest.mark.server
def test_the_command_that_a_run_shows_joins_it(tmp_path: Path, server: Mapping[str, str]) -> None:
    """Each node in a folder without code. The slots of each are chosen there."""
    path = write_experiment(
        tmp_path,
        resources={"slots_per_trial": 2, "channel": {"bind": "127.0.0.1"}},
        checkpoint_storage=f"file://{tmp_path}/checkpoints",
    )
    driver = subprocess.Popen(
        [*TRIALFLOW, "train", str(path), "--engine", "join", "--json"],
        cwd=tmp_path, env=environment_in(tmp_path, server),
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    nodes = []
    with driver:
        assert driver.stderr is not None
        said = ""
        while (command := NODES.search(said)) is None:
            line = driver.stderr.readline()
            assert line, said
            said += line
        for number in range(2):
            folder = tmp_path / f"node-{number}"
            folder.mkdir()
            nodes.append(
                subprocess.Popen(
                    [*TRIALFLOW, *command[1].split(), "--slots", "1"],
                    cwd=folder,
                    env=environment_in(folder, {"DS_ACCELERATOR": "cpu"}),
                    text=True,
                    stderr=subprocess.PIPE,
                    stdin=subprocess.DEVNULL,
                )
            )
        out, rest = driver.communicate(timeout=END_SECONDS)
    assert driver.returncode == 0, said + rest
    assert json.loads(out)["batches_trained"] == 8
    for node in nodes:
        _, error = node.communicate(timeout=END_SECONDS)
        assert (node.returncode, "the driver needs this node no longer" in error) == (0, True), (
            error
        )


def test_a_node_without_a_driver_says_what_to_check(tmp_path: Path) -> None:
    """And ends."""
    token = tmp_path / "token"
    token.write_text(new_token())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        done = trialflow(
            tmp_path, "join", "--driver", f"tls://{address}", "--token-file", str(token),
            "--wait-seconds", "0",
        )  # fmt: skip
    assert done.returncode != 0
    assert f"no driver answered within 0 s ({address}: " in done.stderr
    assert "check that it runs, that its address can be reached from here" in done.stderr
    assert list((tmp_path / "home").rglob("tmp*")) == []
