"""The number of accelerators, and of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gpus import fake_gpus, uuid
from trial_core.errors import LaunchError
from trial_core.processes.machine import accelerators
from trial_core.processes.machine.accelerators import (
    CPU_ONLY,
    CPU_SLOTS,
    Accelerators,
    count_accelerators,
    device_uuids,
    resolve_slot_count,
    visible_accelerators,
)
from trial_core.processes.slots import launcher


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two GPUs. The path of its nvidia-smi."""
    return fake_gpus(tmp_path, monkeypatch, 2)


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
        ("GPU-0000,GPU-1111", 2),
        ("GPU-00,GPU-2222,GPU-11", 1),
        ("MIG-8f2a,MIG-77c1", 1),
        ("GPU-0000,MIG-77c1", 1),
        ("0,1,2", 2),
        ("0,7,1", 1),
        ("1,-1,0", 1),
        ("0,GPU-1111", 1),
        ("GPU-0000,1", 1),
        ("1,0,1", 0),
        ("GPU-0000,GPU-00", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("", 0),
    ],
)
def test_visible_devices_limit_the_count(devices: str, count: int) -> None:
    """As in torch: only devices before the first that does not exist or is named in another way,
    none if one is repeated, and one MIG instance."""
    assert count_accelerators({"CUDA_VISIBLE_DEVICES": devices}) == count


def test_a_process_has_one_mig_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA shows no more, whatever the number of GPUs and instances. It has one name, so runs that
    name its GPU and runs that name the instance take turns."""
    fake_gpus(tmp_path, monkeypatch, 2, mig_instances=3)
    assert visible_accelerators({}).devices == ("MIG-00",)
    by_gpu = visible_accelerators({"CUDA_VISIBLE_DEVICES": "1"})
    assert by_gpu.devices == ("MIG-10",)
    by_beginning = Accelerators("cuda", "CUDA_VISIBLE_DEVICES", ("MIG-1",))
    assert [*device_uuids(by_beginning).values()] == [*device_uuids(by_gpu).values()] == ["MIG-10"]
    with pytest.raises(LaunchError, match="has 1 accelerator; ask for at most 1"):
        resolve_slot_count(2, {})


@pytest.mark.usefixtures("two_gpus")
def test_auto_is_one_rank_per_gpu() -> None:
    """There are as many ranks as GPUs."""
    assert resolve_slot_count("auto", {}) == 2


def test_more_cpu_slots_than_the_cores_can_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would be a process: thousands of them stop the machine."""
    cpu = {"DS_ACCELERATOR": "cpu"}
    for cores, limit in ((1, 8), (3, 12), (64, 256)):
        monkeypatch.setattr(accelerators, "available_cores", lambda cores=cores: cores)
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
        '(or "auto"), or train on several machines (resources.engine); to train on the CPU, set '
        "resources.accelerator: cpu in the experiment, or the environment variable "
        "DS_ACCELERATOR=cpu"
    )


def test_any_number_of_cpu_ranks_is_allowed() -> None:
    """Without accelerators, a slot is a CPU process."""
    assert resolve_slot_count(4, {"DS_ACCELERATOR": "cpu"}) == 4


def test_gpus_that_cannot_be_counted_are_an_error(
    two_gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver is there, and its tool fails, is too slow, or is missing. CPU ranks are a choice."""
    two_gpus.write_text("#!/bin/sh\necho Driver/library version mismatch >&2\nexit 18\n")
    with pytest.raises(LaunchError, match=r"be counted: Driver/library .*DS_ACCELERATOR=cpu$"):
        count_accelerators({})
    two_gpus.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(accelerators, "TOOL_TIMEOUT_SECONDS", 0.1)
    with pytest.raises(LaunchError, match=r"cannot be counted: .*timed out"):
        count_accelerators({})
    two_gpus.unlink()
    with pytest.raises(LaunchError, match="cannot be counted: nvidia-smi is not on PATH"):
        count_accelerators({})
    assert count_accelerators({"DS_ACCELERATOR": "cpu"}) == 0


def test_a_tool_without_a_driver_counts_no_gpus(
    two_gpus: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An image for GPUs on a machine that has none."""
    two_gpus.write_text("#!/bin/sh\necho no driver\nexit 9\n")
    monkeypatch.setattr(accelerators, "NVIDIA_DEVICE", tmp_path / "none")
    assert visible_accelerators({}) == CPU_ONLY


def test_a_torch_for_the_cpu_does_not_train_beside_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed would train on the CPU, and say nothing."""
    fake_gpus(tmp_path, monkeypatch, 2, torch_build="cpu")
    with pytest.raises(LaunchError, match=r"has 2 accelerators, but torch .* CPU only: install"):
        resolve_slot_count("auto", {})
    assert resolve_slot_count("auto", {"DS_ACCELERATOR": "cpu"}) == CPU_SLOTS


@pytest.fixture
def torch_for_xpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torch for Intel's accelerators. What earlier probes found is forgotten."""
    monkeypatch.setattr(accelerators, "_torch_build", lambda: "xpu")
    accelerators._probe.cache_clear()
    yield
    accelerators._probe.cache_clear()


@pytest.mark.usefixtures("torch_for_xpus")
def test_other_accelerators_are_counted_by_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another process, since the driver does not import torch. The process has the experiment's
    variables, which may choose devices."""
    counting = "import os; print('found xpu', os.environ.get('COUNT', 3), 'ZE_AFFINITY_MASK')"
    monkeypatch.setattr(accelerators, "PROBE", counting)
    found = Accelerators("xpu", "ZE_AFFINITY_MASK", ("0", "1", "2"))
    assert visible_accelerators({}) == found
    assert visible_accelerators({"COUNT": "2"}).devices == ("0", "1")
    chosen = visible_accelerators({"ZE_AFFINITY_MASK": "4,5,6"})
    assert chosen.devices == ("4", "5", "6")
    monkeypatch.setattr(accelerators, "PROBE", "raise SystemExit('no level-zero loader')")
    accelerators._probe.cache_clear()
    with pytest.raises(LaunchError, match="cannot count the accelerators: no level-zero loader"):
        visible_accelerators({})


@pytest.mark.long
@pytest.mark.usefixtures("torch_for_xpus")
def test_deepspeed_answers_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The names that the probe calls exist. That it finds no device is a warning. No code of the
    working folder runs."""
    (tmp_path / "deepspeed.py").write_text("raise SystemExit('code of a stranger')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    assert visible_accelerators({**os.environ, "CUDA_VISIBLE_DEVICES": ""}) == CPU_ONLY
    assert "DeepSpeed finds none on this machine: ranks train on the CPU" in caplog.text


@pytest.mark.usefixtures("two_gpus")
def test_a_device_has_one_name() -> None:
    """Runs that name a GPU by its index, or by a part of its UUID, lock the same one."""
    names = ("1", uuid(1), uuid(1)[:6], "7", "MIG-a")
    found = device_uuids(Accelerators("cuda", "CUDA_VISIBLE_DEVICES", names))
    assert [*found.values()] == [uuid(1), uuid(1), uuid(1), "7", "MIG-a"]


@pytest.mark.usefixtures("two_gpus")
def test_ranks_are_told_their_accelerator_and_share_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On GPUs as on CPUs. A value that the experiment sets stays."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launcher, "available_cores", lambda: 64)
    on_gpus = launcher.rank_environment(8, {})
    assert (on_gpus["DS_ACCELERATOR"], on_gpus["OMP_NUM_THREADS"]) == ("cuda", "8")
    on_cpus = launcher.rank_environment(2, {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "3"})
    assert (on_cpus["DS_ACCELERATOR"], on_cpus["OMP_NUM_THREADS"]) == ("cpu", "3")


def test_ranks_agree_on_the_order_of_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all machines and in all attempts: text has the same hash, unless a person decides."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    script = "print(list({'ant', 'bee', 'cow', 'dog', 'elk', 'fox', 'gnu', 'hen'}))"

    def order(**given: str) -> bytes:
        environment = launcher.rank_environment(1, {"DS_ACCELERATOR": "cpu", **given})
        return subprocess.check_output([sys.executable, "-c", script], env=environment)

    assert order() == order() == order()
    assert order(PYTHONHASHSEED="7") != order()


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({"DS_ACCELERATOR": "cpu"}, "PASSIVE"),
        ({"DS_ACCELERATOR": "cpu", "OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
        ({}, None),
    ],
    ids=["CPU", "as the experiment sets it", "GPU"],
)
def test_threads_of_ranks_on_the_cpu_do_not_spin(
    given: dict[str, str], policy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spinning threads take the cores that other processes and their own rank need."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert launcher.rank_environment(2, given).get("OMP_WAIT_POLICY") == policy


def test_a_machine_for_cpu_ranks_is_told_without_a_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not if there is an NVIDIA driver or tool, or a torch of another kind."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(accelerators.subprocess, "run", refuse)
    monkeypatch.setattr(accelerators.shutil, "which", lambda name: None)
    monkeypatch.setattr(accelerators, "NVIDIA_DEVICE", tmp_path / "nvidiactl")
    monkeypatch.setattr(accelerators, "_needs_probe", lambda: False)
    assert accelerators.has_cpu_alone({})
    (tmp_path / "nvidiactl").touch()
    assert not accelerators.has_cpu_alone({})
    assert accelerators.has_cpu_alone({"DS_ACCELERATOR": "cpu"})
    (tmp_path / "nvidiactl").unlink()
    monkeypatch.setattr(accelerators, "_needs_probe", lambda: True)
    assert not accelerators.has_cpu_alone({})
