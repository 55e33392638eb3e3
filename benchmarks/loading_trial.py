"""The trial of `benchmarks.loading`, and other libraries' ways to store and load its engine."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import fsspec
import s3fs  # noqa: F401  # fsspec would import it while it is measured
import torch
import torch.distributed as dist
from deepspeed.checkpoint.ds_to_universal import main as to_universal
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import TensorDataset

from benchmarks.gpu_trial import WIDTH, StateTrial
from trial_core.deepspeed import DeepSpeedTrialContext
from trial_core.pytorch import DataLoader, PyTorchCallback

BATCH_SAMPLES = 4
SEEDS = {"weights": 0, "master": 0, "exp_avg": 1, "exp_avg_sq": 2}
"""Each part of the state is random numbers. The fp32 copies of the weights equal them."""


class LoadingTrial(StateTrial):
    """Linear layers under ZeRO-1 and Adam, with the optimizer's state allocated.

    Hyperparameters: way (a name in `WAYS`), saves (true if these ranks save, false if they load),
    is_resharded (true if another number of ranks saved), url and options (of the storage), folder
    (an empty one, for downloads); layers.
    """

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self._train(torch.ones(1, WIDTH, device=self.engine.device))
        self.rank = context.distributed.get_rank()
        self.way = WAYS[context.get_hparam("way")](self, context.get_hparams())

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"work": Work(self)}

    def build_training_data_loader(self) -> DataLoader:
        # The ranks that load have batches of as many samples as those that saved.
        samples = BATCH_SAMPLES // self.context.distributed.get_size()
        return DataLoader(TensorDataset(torch.ones(256, WIDTH)), batch_size=samples)

    def state(self) -> dict[str, tuple[torch.Tensor, int]]:
        """Return this rank's flat tensors, each with its offset in the whole tensor."""
        optimizer = self.engine.optimizer
        (part,) = optimizer.single_partition_of_fp32_groups
        moments, first = optimizer.optimizer.state[part], self.rank * part.numel()
        return {
            "weights": (optimizer.bit16_groups_flat[0], 0),
            "master": (part.detach(), first),
            "exp_avg": (moments["exp_avg"], first),
            "exp_avg_sq": (moments["exp_avg_sq"], first),
        }

    def fill(self) -> None:
        """Give the state its values."""
        for name, (tensor, first) in self.state().items():
            tensor.copy_(self._expected(name)[first : first + tensor.numel()])

    def check(self) -> None:
        """Raise RuntimeError if the state, or a weight of the module, has other values."""
        weights = torch.cat([each.detach().flatten() for each in self.engine.module.parameters()])
        for name, (tensor, first) in {**self.state(), "module": (weights, 0)}.items():
            expected = self._expected("weights" if name == "module" else name)
            if not torch.equal(tensor, expected[first : first + tensor.numel()]):
                raise RuntimeError(f"{name} on rank {self.rank} is not what was saved")

    def _expected(self, name: str) -> torch.Tensor:
        elements = self.engine.optimizer.bit16_groups_flat[0].numel()
        return torch.randn(elements, generator=torch.Generator().manual_seed(SEEDS[name]))


class Work(PyTorchCallback):
    """Saves, loads and checks in two hooks, which the driver calls."""

    def __init__(self, trial: LoadingTrial) -> None:
        self.trial = trial

    def on_training_start(self) -> None:
        """Save the values, or load them."""
        if self.trial.context.get_hparam("saves"):
            self.trial.fill()
            self.trial.way.save()
        else:
            self.trial.way.load()

    def on_validation_start(self) -> None:
        """Check the loaded state."""
        self.trial.check()


class Way:
    """A library's way to save and load the engine. For trialflow, the driver sends requests.

    Args:
        hparams: the trial's hyperparameters.
    """

    def __init__(self, trial: LoadingTrial, hparams: dict[str, Any]) -> None:
        self.trial, self.hparams = trial, hparams

    def save(self) -> None:
        """Save. Collective: every rank calls this."""

    def load(self) -> None:
        """Load. Collective: every rank calls this."""


class TorchDCP(Way):
    """torch.distributed.checkpoint, straight from the storage into the engine's tensors.

    A partition of ZeRO's is the local part of a DTensor, so DCP reshards it.
    """

    def __init__(self, trial: LoadingTrial, hparams: dict[str, Any]) -> None:
        super().__init__(trial, hparams)
        self._group = dist.new_group(backend="gloo")
        self._mesh = init_device_mesh(trial.engine.device.type, (dist.get_world_size(),))
        self._storage = {"path": f"{hparams['url']}/dcp", **hparams["options"]}
        fsspec.filesystem("s3", **hparams["options"]).exists(hparams["url"])  # connects

    def save(self) -> None:
        save(self._state(), storage_writer=FsspecWriter(**self._storage), process_group=self._group)

    def load(self) -> None:
        load(self._state(), storage_reader=FsspecReader(**self._storage), process_group=self._group)

    def _state(self) -> dict[str, Any]:
        flat = {
            name: DTensor.from_local(tensor, self._mesh, [Shard(0)], run_check=False)
            for name, (tensor, _) in self.trial.state().items()
            if name != "weights"
        }
        return {"module": self.trial.engine.module.state_dict(), **flat}


class DeepSpeedBoto3(Way):
    """DeepSpeed's files and boto3: each file is downloaded once, the ranks share them.

    With another number of ranks, rank 0 converts them with `ds_to_universal`.
    """

    TAG, UNIVERSAL = "plain", "universal"

    def __init__(self, trial: LoadingTrial, hparams: dict[str, Any]) -> None:
        super().__init__(trial, hparams)
        options = hparams["options"]
        self._s3 = boto3.client(
            "s3",
            endpoint_url=options["endpoint_url"],
            aws_access_key_id=options["key"],
            aws_secret_access_key=options["secret"],
        )
        self._bucket = hparams["url"].removeprefix("s3://").partition("/")[0]
        self._prefix = f"{hparams['url'].removeprefix(f's3://{self._bucket}/')}/deepspeed/"
        self._folder = Path(hparams["folder"])
        self._s3.head_bucket(Bucket=self._bucket)  # connects

    def save(self) -> None:
        self.trial.engine.save_checkpoint(str(self._folder), tag=self.TAG)
        dist.barrier()
        files = sorted((self._folder / self.TAG).iterdir())
        for file in files[self.trial.rank :: dist.get_world_size()]:
            self._s3.upload_file(str(file), self._bucket, self._prefix + file.name)

    def load(self) -> None:
        (self._folder / self.TAG).mkdir(exist_ok=True)
        listed = self._s3.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix)["Contents"]
        files = sorted(listed, key=lambda file: -file["Size"])
        for file in files[self.trial.rank :: dist.get_world_size()]:
            name = file["Key"].removeprefix(self._prefix)
            self._s3.download_file(self._bucket, file["Key"], str(self._folder / self.TAG / name))
        dist.barrier()
        tag, config = self.TAG, self.trial.engine._config
        if self.hparams["is_resharded"]:
            tag, config.load_universal_checkpoint = self.UNIVERSAL, True
            if self.trial.rank == 0:
                self._convert()
            dist.barrier()
        self.trial.engine.load_checkpoint(str(self._folder), tag=tag)

    def _convert(self) -> None:
        """As ``python -m deepspeed.checkpoint.ds_to_universal`` by default, without its imports."""
        to_universal(
            Namespace(
                input_folder=str(self._folder / self.TAG),
                output_folder=str(self._folder / self.UNIVERSAL),
                num_extract_workers=4, num_merge_workers=2, keep_temp_folder=False, strict=True,
                inject_missing_state=True,
            )
        )  # fmt: skip


WAYS: dict[str, Callable[[LoadingTrial, dict[str, Any]], Way]] = {
    "trialflow": Way,
    "dcp": TorchDCP,
    "deepspeed": DeepSpeedBoto3,
}
