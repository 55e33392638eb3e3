"""A machine with NVIDIA GPUs, by a program that answers as nvidia-smi does."""

from __future__ import annotations

from pathlib import Path

import pytest

import trial_core.processes.machine.accelerators


def uuid(index: int) -> str:
    """The UUID of a fake GPU."""
    return f"GPU-{index}{index}{index}{index}"


def fake_gpus(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    torch_build: str = "",
    mig_instances: int = 0,
) -> Path:
    """Give this machine GPUs, a driver, and a torch for them. Returns the program.

    Args:
        folder: where the fake program and the driver's device go.
        torch_build: the local version of torch; empty: as on PyPI.
        mig_instances: on each GPU.
    """
    tool = folder / "gpus" / "nvidia-smi"
    tool.parent.mkdir()
    lines = ["#!/bin/sh", 'if [ "$1" = --list-gpus ]; then']
    for index in range(count):
        lines.append(f"echo 'GPU {index}: Model {index} (UUID: {uuid(index)})'")
        for number in range(mig_instances):
            found = f"MIG-{index}{number}"
            lines.append(f"echo '  MIG 3g.40gb     Device  {number}: (UUID: {found})'")
    lines.append("fi")
    for index in range(count):  # --query-gpu=name,driver_version
        lines.append(f'case "$*" in *--id=*{uuid(index)}*) echo "Model {index}, 580.65";; esac')
    tool.write_text("\n".join(lines))
    tool.chmod(0o755)
    driver = folder / "gpus" / "nvidiactl"
    driver.touch()
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(trial_core.processes.machine.accelerators, "NVIDIA_DEVICE", driver)
    monkeypatch.setattr(
        trial_core.processes.machine.accelerators, "_torch_build", lambda: torch_build
    )
    return tool
