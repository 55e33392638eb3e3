"""Measures on each rank how long saving blocks training. Started by `benchmarks.checkpoint`.

Every method saves the state of the same engine to the same S3 gateway, in turns. A turn is timed
from a barrier until training could continue on all ranks. After ours, a batch computes that is
longer than the copy; how long its optimizer's step would wait for the copy is added. The next turn
starts after the background part of the save.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import deepspeed
import fsspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import trial_core.deepspeed as td
from benchmarks.trial import ShardedTrial
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config.sections import CheckpointingConfig
from trial_core.deepspeed.deepspeed_adapter import DeepSpeedTrialAdapter
from trial_core.deepspeed.fingerprints import record_fingerprints
from trial_core.rank.checkpoint_files import CheckpointFiles
from trial_core.rank.rank_checkpoint import Snapshots
from trial_core.rank.state_files.late_copies import finish_copies

WIDTH = 1024
BATCH = 256
Remaining = Callable[[], Any]


class Saved(ShardedTrial):
    """Linear layers under ZeRO-1 and Adam: 16 bytes of state per parameter, over all ranks."""

    def __init__(self, context: td.DeepSpeedTrialContext) -> None:
        layers = int(context.get_hparam("layers"))
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_batch_size": context.distributed.get_size(),
                "zero_optimization": {"stage": 1},
                "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            },
        )
        self.engine = context.wrap_model_engine(engine)
        loss = self.engine(torch.ones(1, WIDTH)).sum()  # creates the optimizer's state
        self.engine.backward(loss)
        self.engine.step()


class SaveMethods:
    """The save methods on one rank. Each returns the work that remains in the background."""

    def __init__(self, context: td.DeepSpeedTrialContext, job: dict[str, Any]) -> None:
        self._trial = Saved(context)
        self._adapter = DeepSpeedTrialAdapter(self._trial, context)
        self._rank, self._job = context.distributed.get_rank(), job
        self._folder = Path(tempfile.mkdtemp(prefix=f"benchmark-{self._rank}-"))
        self._files = {
            name: CheckpointFiles(
                self._folder, CheckpointStore(f"{job['bucket']}/{name}", options),
                context.distributed, context.run_info,
            )
            for name, options in job["stores"].items()
        }  # fmt: skip
        self._ours = {
            (store, snapshot): Snapshots(
                self._adapter,
                files,
                context.distributed,
                CheckpointingConfig(snapshot=snapshot, verify_first=False),
            )
            for store, files in self._files.items()
            for snapshot in ("lazy", "eager")
        }
        self._copies: list[torch.Tensor] = []
        options = job["stores"]["fast"]
        self._s3 = boto3.client(
            "s3",
            endpoint_url=options["endpoint_url"],
            aws_access_key_id=options["key"],
            aws_secret_access_key=options["secret"],
        )
        self._fsspec = fsspec.filesystem("s3", **options)
        self._threads = ThreadPoolExecutor(1)
        self._gloo = dist.new_group(backend="gloo")

    def close(self) -> None:
        """End the persister processes."""
        for files in self._files.values():
            files.close()
        for snapshots in self._ours.values():
            snapshots.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def delete_stored(self) -> None:
        """Delete all stored objects: the gateway keeps them in memory."""
        if self._rank == 0:
            self._fsspec.invalidate_cache()
            for path in self._fsspec.glob(f"{self._job['bucket']}/*"):
                self._fsspec.rm(path, recursive=True)
        dist.barrier()

    def ours(self) -> Remaining:
        """trialflow: the snapshot blocks; the upload remains."""
        return self._snapshot("fast")

    def ours_lazy(self) -> Remaining:
        """As `ours`, with checkpointing.snapshot: lazy."""
        return self._snapshot("fast", "lazy")

    def copy(self) -> Remaining:
        """A bare copy of the same tensors in memory."""
        state = self._state()
        tensors = [*state.pop("model").values(), *state.values()]
        self._copies = self._copies or [torch.empty_like(each) for each in tensors]
        for target, tensor in zip(self._copies, tensors, strict=True):
            target.copy_(tensor)
        return lambda: None

    def train(self) -> None:
        """Compute a batch, up to the optimizer's step."""
        loss = self._trial.engine.module(torch.ones(BATCH, WIDTH)).sum()
        torch.autograd.grad(loss, [*self._trial.engine.module.parameters()])

    def ours_slow_store(self) -> Remaining:
        """As `ours`, to the slow store."""
        return self._snapshot("slow")

    def fingerprints(self) -> Remaining:
        """A part of `ours`: the fingerprints of the model's tensors."""
        record_fingerprints([self._trial.engine], self._folder, self._rank, [False])
        return lambda: None

    def deepspeed_boto3(self) -> Remaining:
        """save_checkpoint to local disk, then each rank uploads its files, as Determined does."""
        folder = self._folder / "native"
        self._trial.engine.save_checkpoint(str(folder), tag="model0")
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                key = f"boto3/{path.relative_to(folder)}"
                self._s3.upload_file(str(path), self._job["bucket"].removeprefix("s3://"), key)
        dist.barrier()
        return lambda: shutil.rmtree(folder)

    def torch_dcp(self) -> Remaining:
        """torch.distributed.checkpoint.save with its FsspecWriter."""
        writer = FsspecWriter(f"{self._job['bucket']}/dcp", **self._job["stores"]["fast"])
        save(self._state(), storage_writer=writer, process_group=self._gloo)
        return lambda: None

    def torch_dcp_async(self) -> Remaining:
        """torch.distributed.checkpoint.async_save with its FsspecWriter."""
        writer = FsspecWriter(f"{self._job['bucket']}/dcp-async", **self._job["stores"]["fast"])
        saving = async_save(self._state(), storage_writer=writer, process_group=self._gloo)
        return saving.result  # type: ignore[union-attr]  # a Future

    def lightning(self) -> Remaining:
        """torch.save to memory, then a write in an fsspec transaction, as Lightning does."""
        content = io.BytesIO()
        torch.save(self._state(), content)
        url = f"{self._job['bucket']}/lightning/rank-{self._rank}.ckpt"
        with self._fsspec.transaction, self._fsspec.open(url, "wb") as file:
            file.write(content.getvalue())
        dist.barrier()
        return lambda: None

    def _snapshot(self, store: str, snapshot: str = "eager") -> Remaining:
        files, checkpoint = self._files[store], self._uuid()
        ours = self._ours[store, snapshot]
        ours.stage(checkpoint, 1, None)
        files.complete = ours.require_complete  # the other kind has set its own
        persisted = self._threads.submit(files.persist, checkpoint)

        def finish() -> None:
            persisted.result()
            files.release(checkpoint)

        return finish

    def _uuid(self) -> str:
        shared = [str(uuid.uuid4())]
        dist.broadcast_object_list(shared)
        return shared[0]

    def _state(self) -> dict[str, Any]:
        """Return this rank's state: its part of the optimizer's, and on rank 0 the model's."""
        optimizer = self._trial.engine.optimizer
        flat = optimizer.single_partition_of_fp32_groups[0]
        moments = optimizer.optimizer.state[flat]
        own = {"master": flat.detach(), "m": moments["exp_avg"], "v": moments["exp_avg_sq"]}
        model = self._trial.engine.module.state_dict() if self._rank == 0 else {}
        return {"model": model, **{f"{key}-{self._rank}": value for key, value in own.items()}}


def measure(methods: SaveMethods, names: list[str], turns: int) -> Iterator[dict[str, Any]]:
    """Save with every method in turns; turn 0 warms up."""
    for turn in range(turns + 1):
        for name in names:
            dist.barrier()
            start = time.perf_counter()
            finish = getattr(methods, name)()
            dist.barrier()
            blocked = time.perf_counter() - start
            if name.startswith("ours"):
                methods.train()
                waiting = time.perf_counter()
                finish_copies(is_step=True)
                waited = torch.tensor(time.perf_counter() - waiting)
                dist.all_reduce(waited, op=dist.ReduceOp.MAX)
                blocked += float(waited)
            finish()
            dist.barrier()
            whole = time.perf_counter() - start
            methods.delete_stored()
            yield {"method": name, "turn": turn, "blocked": blocked, "whole": whole}


@contextmanager
def context_of(job: dict[str, Any]) -> Iterator[td.DeepSpeedTrialContext]:
    """Make this rank's context for the block."""
    with td.init(hparams={"layers": job["layers"]}, exp_conf={"name": "benchmark"}) as context:
        yield context


def main() -> None:
    """Run the benchmark; rank 0 prints each turn as a line of JSON."""
    job = json.loads(Path(sys.argv[1]).read_text())
    with context_of(job) as context:
        methods = SaveMethods(context, job)
        for line in measure(methods, job["methods"], job["turns"]):
            if context.distributed.get_rank() == 0:
                print(json.dumps(line), flush=True)
        methods.close()


if __name__ == "__main__":
    main()
