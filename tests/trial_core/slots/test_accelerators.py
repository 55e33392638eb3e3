"""The number of accelerators, and of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from trial_core.errors import LaunchError
from trial_core.slots.accelerators import CPU_SLOTS, count_accelerators, resolve_slot_count


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose NVIDIA driver reports two GPUs."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: Some GPU (UUID: a)'; echo 'GPU 1: Other (UUID: b)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_counted() -> None:
    """nvidia-smi counts them; with DS_ACCELERATOR=cpu there are none."""
    assert count_accelerators({}) == 2
    assert count_accelerators({"DS_ACCELERATOR": "cpu"}) == 0


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("devices", "count"),
    [
        ("0,1", 2),
        ("1", 1),
        (" 1 , 0 ", 2),
        ("GPU-8f2a,MIG-77c1", 2),
        ("0,1,2", 2),
        ("0,7,1", 1),
        ("1,-1,0", 1),
        ("0,GPU-a,GPU-b", 2),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("", 0),
    ],
)
def test_visible_devices_limit_the_count(devices: str, count: int) -> None:
    """As in CUDA: only devices before the first that does not exist, and no more than exist."""
    assert count_accelerators({"CUDA_VISIBLE_DEVICES": devices}) == count


@pytest.mark.usefixtures("two_gpus")
def test_auto_is_one_rank_per_gpu() -> None:
    """There are as many ranks as GPUs."""
    assert resolve_slot_count("auto", {}) == 2


def test_more_cpu_slots_than_the_cores_can_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would be a process: thousands of them stop the machine."""
    cpu = {"DS_ACCELERATOR": "cpu"}
    for cores, limit in ((1, 8), (3, 12), (64, 256)):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        assert resolve_slot_count(limit, cpu) == limit
        with pytest.raises(
            LaunchError, match=rf"slots_per_trial is {limit + 1}.* {cores} core.* at most {limit} "
        ):
            resolve_slot_count(limit + 1, cpu)


def test_auto_without_gpus_is_two_cpu_ranks() -> None:
    """So that a machine without accelerators uses data parallelism, too."""
    assert resolve_slot_count("auto", {"DS_ACCELERATOR": "cpu"}) == CPU_SLOTS


@pytest.mark.usefixtures("two_gpus")
def test_more_slots_than_gpus_is_refused() -> None:
    """The message has the number of GPUs, and both solutions."""
    with pytest.raises(LaunchError) as error:
        resolve_slot_count(3, {})
    assert str(error.value) == (
        "resources.slots_per_trial is 3, but this machine has 2 accelerators; ask for at most 2 "
        '(or "auto"), or set DS_ACCELERATOR=cpu to train on CPU ranks'
    )


def test_any_number_of_cpu_ranks_is_allowed() -> None:
    """Without accelerators, a slot is a CPU process."""
    assert resolve_slot_count(4, {"DS_ACCELERATOR": "cpu"}) == 4
