"""Runs on a GPU, as a user starts them: what they refuse, how they end, and what is left of them.

Collected with ``DS_ACCELERATOR=cuda`` alone. One NVIDIA GPU is enough.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.machine import (
    START_SECONDS,
    as_a_user,
    nvcc_release,
    started,
    wait_until_off,
)
from tests.support.cli import trialflow, write_experiment
from tests.support.json_types import check_json
from tests.support.tensors import differing, tensors
from tests.support.waiting import until
from trial_core.checkpoint.store import CheckpointStore
from trial_core.processes.machine.accelerators import count_accelerators

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this torch is not for CUDA")
GONE_SECONDS = 10.0
STALL_SECONDS = 20
ENDED = "the ranks hang and were ended"


def experiment(folder: Path, batches: int = 8, **changes: Any) -> str:
    """An experiment on one GPU that writes below `folder` alone."""
    return str(
        write_experiment(
            folder, searcher={"metric": "loss", "max_length": {"batches": batches}},
            checkpoint_storage=f"file://{folder}/checkpoints", **changes,
        )
    )  # fmt: skip


def last_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint of the storage in `folder`."""
    newest = max(
        CheckpointStore(f"file://{folder}/checkpoints").list(),
        key=lambda each: each.progress.batches_trained,
    )
    return tensors(folder / "checkpoints" / "checkpoints" / newest.uuid)


def test_doctor_counts_and_tries_the_gpus(tmp_path: Path) -> None:
    """As the driver's tool counts them; the compiler fits torch."""
    variables = {"DS_ACCELERATOR": "cuda", "TORCH_CUDA_ARCH_LIST": ""}
    done = trialflow(tmp_path, "doctor", "--json", variables=variables)
    found = {check["subject"]: check for check in check_json(json.loads(done.stdout))["checks"]}
    assert {check["status"] for check in found.values()} == {"ok"}, done.stdout
    assert found["accelerators"]["found"].startswith(
        f"{count_accelerators(os.environ)} × cuda (NVIDIA "
    )
    assert nvcc_release() == torch.version.cuda


def test_each_gpu_has_one_process_of_a_run(tmp_path: Path) -> None:
    """The rank: neither the driver nor the process that forks ranks uses a GPU."""
    paused, go = tmp_path / "paused", tmp_path / "go"
    config = experiment(
        tmp_path, resources={"slots_per_trial": "auto"},
        hyperparameters={"pause_at": 6, "paused": str(paused), "wait_for": str(go)},
    )  # fmt: skip
    with started(tmp_path, config) as run:
        until(paused.exists, "a batch in which the rank waits", START_SECONDS, run.said)
        during = run.on_gpus()
        go.touch()
        run.ends()
    gpus, pids = zip(*during, strict=True)
    assert len(set(gpus)) == len(set(pids)) == len(during) == count_accelerators(os.environ)
    assert wait_until_off({*pids}, GONE_SECONDS) == set()


@pytest.mark.parametrize("without", ["nvidia-smi", "CUDA in torch"])
def test_no_run_trains_on_the_cpu_beside_gpus(tmp_path: Path, without: str) -> None:
    """Without the tool that counts them, or with a torch for the CPU, it is refused at once."""
    variables = {"PATH": str(tmp_path)}
    said = "its GPUs cannot be counted: nvidia-smi is not on PATH"
    if without == "CUDA in torch":
        wheel = tmp_path / "torch-2.6.0+cpu.dist-info"
        wheel.mkdir()
        (wheel / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.6.0+cpu\n")
        variables = {"PYTHONPATH": f"{tmp_path}:{as_a_user(tmp_path, {})['PYTHONPATH']}"}
        said = "torch 2.6.0+cpu computes on the CPU only: install a build for the accelerator"
    config = experiment(tmp_path)
    with started(tmp_path, config, **variables) as run, pytest.raises(AssertionError):
        run.ends()
    assert said in " ".join(run.output.read_text().split())
    assert "Traceback" not in run.output.read_text()
    assert not [*tmp_path.glob("checkpoints/checkpoints/*")]


def test_an_operator_whose_build_was_killed_is_built_once_more(tmp_path: Path) -> None:
    """By the next run; the one after it has it."""
    config = experiment(
        tmp_path, entrypoint="engine_trials:OwnConfig",
        hyperparameters={"ds_config": {"optimizer": {"type": "Adam", "params": {"lr": 1e-2}}}},
    )  # fmt: skip
    built = tmp_path / "ops" / "fused_adam"
    variables = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "ops"), "TORCH_CUDA_ARCH_LIST": ""}
    with started(tmp_path, config, **variables) as run:
        until((built / "build.ninja").exists, "a build", START_SECONDS, run.said)
        run.kill_all()
    assert (built / "lock").exists()
    with started(tmp_path, config, **variables) as run:
        assert "the build of fused_adam was killed" in run.ends()
    extension = built / "fused_adam.so"
    was = extension.stat()
    with started(tmp_path, config, **variables) as run:
        run.ends()
    assert extension.stat().st_mtime_ns == was.st_mtime_ns


def test_architectures_that_deepspeed_cannot_read_are_named(tmp_path: Path) -> None:
    """PyTorch knows 9.0a, and images for such GPUs set it. DeepSpeed's own error is `'0a'`."""
    config = experiment(
        tmp_path, entrypoint="engine_trials:OwnConfig",
        hyperparameters={"ds_config": {"optimizer": {"type": "Adam", "params": {"lr": 1e-2}}}},
    )  # fmt: skip
    variables = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "TORCH_CUDA_ARCH_LIST": "9.0a"}
    with started(tmp_path, config, **variables) as run, pytest.raises(AssertionError):
        run.ends()
    assert "TORCH_CUDA_ARCH_LIST is '9.0a', and DeepSpeed cannot read '9.0a'" in " ".join(
        run.output.read_text().split()
    )


def test_a_device_assert_is_reported_and_ends_one_launch(tmp_path: Path) -> None:
    """CUDA refuses all later work of that process; the next one trains on."""
    hparams = {"do": "assert", "at_batch": 6, "once": str(tmp_path / "once")}
    config = experiment(
        tmp_path, entrypoint="gpu_trials:BrokenKernel", hyperparameters=hparams, max_restarts=1
    )
    with started(tmp_path, config) as run:
        said = run.ends()
    assert "device-side assert triggered" in said
    assert "restart 1 of at most 1" in said


@pytest.mark.parametrize("do", ["sleep", "spin"])
def test_a_hung_rank_is_found_and_launched_again(tmp_path: Path, do: str) -> None:
    """In Python, or in a kernel that does not end. Its stack says where; the GPU is free again."""
    hparams = {"do": do, "at_batch": 6, "once": str(tmp_path / "once")}
    config = experiment(
        tmp_path, entrypoint="gpu_trials:BrokenKernel", hyperparameters=hparams, max_restarts=1,
        min_checkpoint_period={"batches": 4}, stopping={"stall_timeout_seconds": STALL_SECONDS},
    )  # fmt: skip
    with started(tmp_path, config) as run:
        until((tmp_path / "once").exists, "the hang", START_SECONDS, run.said)
        ((_, hung),) = run.on_gpus()
        until(lambda: ENDED in run.said(), "the end of the ranks", START_SECONDS, run.said)
        assert wait_until_off({hung}, GONE_SECONDS) == set()
        said = run.ends()
    assert f"for {STALL_SECONDS} s during train-workload: {ENDED}" in said
    assert "_misbehave" in said


def test_killed_runs_leave_the_gpu_free_and_end_as_an_undisturbed_one(tmp_path: Path) -> None:
    """SIGKILL of the rank, then of the driver. The last checkpoint is the same, bit by bit."""
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    common: dict[str, Any] = {"min_checkpoint_period": {"batches": 4}, "max_restarts": 2}
    with started(straight, experiment(straight, 16, **common)) as run:
        run.ends()

    paused, go = killed / "paused", killed / "go"
    hparams = {"pause_at": 10, "paused": str(paused), "wait_for": str(go)}
    config = experiment(killed, 16, hyperparameters=hparams, **common)
    with started(killed, config) as run:
        until(paused.exists, "a batch in which the rank waits", START_SECONDS, run.said)
        ((_, rank),) = run.on_gpus()
        paused.unlink()
        os.kill(rank, 9)
        until(paused.exists, "that batch again", START_SECONDS, run.said)
        ((_, second),) = run.on_gpus()
        assert second != rank
        run.kill()
        assert wait_until_off({rank, second}, GONE_SECONDS) == set()
    go.touch()
    with started(killed, config, "--resume") as run:
        run.ends()
    assert differing(last_tensors(straight), last_tensors(killed)) == []


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    "example",
    [
        "core_api/experiment", "digits/deepspeed", "digits/pytorch", "gan/experiment",
        "gpt_stdlib/experiment", "hf_causal_lm/experiment", "hf_causal_lm/lora",
        "hf_trainer/experiment", "roc_auc/experiment",
    ],
)  # fmt: skip
def test_examples_train_save_and_restore(tmp_path: Path, example: str) -> None:
    """`trialflow train --test`, of trials and of scripts with their own loop."""
    with started(tmp_path, str(EXAMPLES / f"{example}.yaml"), "--test") as run:
        run.ends()
