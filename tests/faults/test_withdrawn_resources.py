"""What a run needs is taken away in the middle of it: what it says, what is lost, how it continues.

On real file systems in mount namespaces of the run's driver, and on a real gateway. Nothing that is
committed is lost, nothing is committed by halves, and the trial continues from its last checkpoint.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.faults.withdrawn import BATCHES, FIRST, NAMESPACES, run_twice, withdrawn
from tests.support.s3 import S3Server
from tests.support.s3_user import s3_user
from tests.support.slots import toy_config
from trial_core.checkpoint.storage import storage_errors

pytestmark = [pytest.mark.slots, pytest.mark.long]

ALL = list(range(FIRST, BATCHES + 1, FIRST))


@pytest.fixture(scope="module")
def namespaces() -> None:
    if subprocess.run([*NAMESPACES, "true"], check=False).returncode != 0:
        pytest.skip("this machine makes no namespaces")


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("full", "no space is left there: make room"),
        ("read-only", "the file system is mounted read-only: choose another folder"),
        ("permissions", "permission denied: give this user the right"),
        ("descriptors of the driver", "has too many open files: raise its limit (ulimit -n)"),
    ],
)
def test_a_storage_that_takes_nothing_more(tmp_path: Path, fault: str, says: str) -> None:
    """The run tries again, then ends with the reason. Its last checkpoint is the first one."""
    outcome, log = withdrawn(fault, tmp_path)
    assert outcome.error.startswith("StorageError: cannot ")
    assert says in outcome.error
    assert log.count("the storage failed (try ") == storage_errors.TRIES - 1
    assert (outcome.committed, outcome.checkpoints) == ([FIRST], ALL)


@pytest.mark.usefixtures("namespaces")
def test_an_unmounted_storage(tmp_path: Path) -> None:
    """The run ends before it commits into the empty folder, and continues in the right one."""
    outcome, log = withdrawn("unmounted", tmp_path)
    assert outcome.error.startswith("StorageError: ")
    assert "is not the storage with which attempt" in outcome.error
    assert "Mount it, or name the right one" in outcome.error
    assert not [each for each in outcome.without if "/manifests/" in each]
    assert (outcome.committed, outcome.checkpoints) == ([FIRST], ALL)
    assert "starting from checkpoint" in log


@pytest.mark.parametrize(
    ("withdraw", "give_back", "says"),
    [
        pytest.param(
            [("key", "rm", "--access-key=other-key")],
            [("key", "create", "--access-key=other-key", "--secret-key=other-secret")],
            "the server does not know the access key: check the credentials",
            id="expired key",
        ),
        pytest.param(
            [("user", "suspend")], [("user", "enable")],
            "the server has suspended this user", id="suspended user",
        ),
        pytest.param(
            [("quota", "set", "--quota-scope=user", "--max-objects=5"),
             ("quota", "enable", "--quota-scope=user")],
            [("quota", "disable", "--quota-scope=user")],
            "the storage's quota is used up: make room, or raise the quota", id="quota",
        ),
    ],
)  # fmt: skip
@pytest.mark.gateway
def test_a_gateway_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ceph_s3: S3Server,
    withdraw: list[tuple[str, ...]], give_back: list[tuple[str, ...]], says: str,
) -> None:  # fmt: skip
    """As a file system: the reason, and no more checkpoints until it is mended."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(storage_errors, "PAUSE_SECONDS", 0.1)
    uid = f"--uid={tmp_path.name}"

    def administer(commands: list[tuple[str, ...]]) -> None:
        for command in commands:
            ceph_s3.admin(*command, uid)

    administer([
        ("user", "create", "--display-name=other", "--access-key=other-key",
         "--secret-key=other-secret"),
    ])  # fmt: skip
    other = replace(ceph_s3, access_key="other-key", secret_key="other-secret")
    config = toy_config(
        tmp_path, BATCHES, scheduling_unit=FIRST, min_checkpoint_period={"batches": FIRST},
        checkpoint_storage={"url": other.new_bucket(), "options": other.options},
    )  # fmt: skip
    try:
        outcome = run_twice(lambda: administer(withdraw), lambda: administer(give_back), config)
    finally:
        administer([("user", "rm", "--purge-data")])
    # The driver is refused, or a rank, whoever is the next to write.
    assert re.match(r"StorageError: (rank \d: )?cannot ", outcome.error), outcome.error
    assert says in outcome.error
    assert (outcome.committed, outcome.checkpoints) == ([FIRST], ALL)


@pytest.mark.gateway
def test_a_key_that_another_program_replaces(tmp_path: Path, ceph_s3: S3Server) -> None:
    """The run goes on with the file's new key: its driver, ranks and their persisters."""
    with s3_user(ceph_s3, tmp_path) as user:
        config = toy_config(
            tmp_path, BATCHES, scheduling_unit=FIRST, min_checkpoint_period={"batches": FIRST},
            checkpoint_storage={"url": user.url, "options": user.options},
        )  # fmt: skip

        def replace_key() -> None:
            user.rotate()
            user.write_file()

        outcome = run_twice(replace_key, lambda: None, config)
    assert (outcome.error, outcome.restarts) == ("", [])
    assert outcome.committed == ALL


@pytest.mark.usefixtures("namespaces")
def test_ranks_without_descriptors(tmp_path: Path) -> None:
    """Ranks that can open no file fail, and new ones continue from the last checkpoint."""
    outcome, _ = withdrawn("descriptors of ranks", tmp_path)
    assert not outcome.error
    [reason] = outcome.restarts
    assert "Too many open files" in reason
    assert outcome.committed[0] == FIRST
    assert outcome.checkpoints == ALL


@pytest.mark.usefixtures("namespaces")
def test_workers_without_shared_memory(tmp_path: Path) -> None:
    """A worker of a data loader ends with a bus error: the run says of what, and can continue."""
    outcome, _ = withdrawn("shared memory", tmp_path)
    assert "shared memory" in outcome.restarts[0]
    assert outcome.checkpoints == ALL
