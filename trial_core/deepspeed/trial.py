"""`DeepSpeedTrial`: the base class of a user's trial. Follows Determined's class."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from trial_core.deepspeed.checkpoint_engine import reader_of
from trial_core.deepspeed.context import DeepSpeedTrialContext
from trial_core.deepspeed.fingerprints import check_loaded, record_fingerprints
from trial_core.deepspeed.load_engine import load_engine, load_validated, load_weights
from trial_core.deepspeed.validated_weights import write_validated
from trial_core.errors import TrialError
from trial_core.pytorch.trial import TorchTrial
from trial_core.rank.state_files.bit_sum import bit_sum
from trial_core.rank.state_files.frozen_files import frozen_names
from trial_core.rank.state_files.state_guard import persistent_buffers


class DeepSpeedTrial(TorchTrial):
    """A model, its data, and how to train and validate one batch of it.

    Follows ``determined.pytorch.deepspeed.DeepSpeedTrial``. There is one instance on every rank.
    Unless stated otherwise, every rank calls every method, in the same order.
    """

    trial_context_class: ClassVar[type[DeepSpeedTrialContext]] = DeepSpeedTrialContext

    @abstractmethod
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        """Build the engine(s) with ``deepspeed.initialize`` and wrap them::

            self.context = context
            engine, _, _, _ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=ds_config
            )
            self.engine = context.wrap_model_engine(engine)

        There may be any number of engines. Checkpoints contain the wrapped ones.
        """

    @abstractmethod
    def train_batch(
        self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int
    ) -> torch.Tensor | dict[str, Any]:
        """Train on one micro-batch; with pipelines, on one whole batch.

        Without pipelines this is called `gradient_accumulation_steps` times a batch::

            batch = self.context.to_device(next(dataloader_iter))
            loss = self.engine(batch)
            self.engine.backward(loss)
            self.engine.step()
            return {"loss": loss}

        Args:
            dataloader_iter: an endless iterator of micro-batches; None on ranks that need no data.
                A resumed run continues after the last micro-batch taken from it.
            epoch_idx: the epoch in which this batch begins, from 0.
            batch_idx: number of batches trained before this one, in all runs.

        Returns:
            Metrics: a scalar tensor (reported as ``loss``), or values by name. Numbers and arrays
            are averaged, without values that are None. Text, dicts and other lists are reported as
            the first rank returned them last. Tensors may stay on the device: the controller reads
            them when the workload ends.
        """

    @abstractmethod
    def build_training_data_loader(self) -> Any:
        """The training data: a `trial_core.pytorch.DataLoader` of micro-batches.

        May be None on ranks whose `ModelParallelUnit` says that they need no data. After
        ``context.disable_dataset_reproducibility_checks()`` it may be any iterable of this rank's
        micro-batches; when it ends, it is iterated over again. Checkpoints hold the state of an
        iterable with ``state_dict`` and ``load_state_dict``, such as torchdata's
        ``StatefulDataLoader``:

        * ``state_dict()`` is called on every rank between two batches. It must describe the
          position after the last micro-batch that the loader returned, whatever it has prefetched.
        * It is restored on as many ranks, unless the loader has an attribute ``state_is_global =
          True``: the state is the same on all ranks, and holds for any number of them.
        * After ``load_state_dict(state)``, ``iter(loader)`` must continue from that position. It
          may be empty if the pass was over. Random numbers that `iter` draws do not count.
        """

    def evaluate_batch(
        self, dataloader_iter: Iterator[Any] | None, batch_idx: int
    ) -> dict[str, Any]:
        """Validation metrics of one micro-batch, by name::

            batch = self.context.to_device(next(dataloader_iter))
            return {"loss": self.engine(batch)}

        With pipelines, of a group of `gradient_accumulation_steps` micro-batches, which
        ``self.engine.eval_batch(dataloader_iter)`` takes itself. Micro-batches that do not fill a
        group on every data-parallel rank are not validated.

        Called without gradients, with the engines in evaluation mode. If a forward pass needs other
        ranks (ZeRO-3, model parallelism), all ranks make the same number of calls. A rank whose
        shard has ended then gets a batch whose metrics do not count.

        Called once before training as well, only for the names of the metrics (unless a callback
        overrides one of the ``on_validation_`` hooks). So reset values that the trial collects
        itself in ``on_validation_start``.

        Args:
            dataloader_iter: micro-batches of this rank's shard; None on ranks that need no data.
            batch_idx: counts the calls of this validation from 0. The parameter is optional.

        Returns:
            Metrics by name, as `train_batch` returns them; the same names in every call.
            `evaluation_reducer` says how to reduce numbers and arrays. The default is the mean over
            all calls on all ranks. Each call counts the same, also one with fewer samples: for a
            mean over samples, use a custom reducer.
        """
        raise TrialError(f"{type(self).__name__} does not define evaluate_batch")

    def save(self, context: DeepSpeedTrialContext, path: Path) -> None:
        """Write this rank's part of a checkpoint below `path`. Collective: every rank calls this.

        Each rank has its own folder. The checkpoint is the union of all folders, so two ranks must
        not write different content under one name. An override that adds files calls this, so that
        the checkpoint can be resharded.
        """
        rank, excludes = context.distributed.get_rank(), _excludes_frozen(context)
        for i, engine in enumerate(context.models):
            engine.save_checkpoint(
                str(path), tag=f"model{i}", exclude_frozen_parameters=excludes[i]
            )
        _record_buffers(context.models, path, rank)
        record_fingerprints(context.models, path, rank, excludes)
        averages = None if context.averages is None else context.averages.averages
        write_validated(context.models, path, averages)

    def load(self, context: DeepSpeedTrialContext, load_path: Path) -> None:
        """Restore from the files below `load_path`. Collective: every rank calls this.

        Raises:
            TrialError: DeepSpeed found no checkpoint of an engine.
            CheckpointError: loaded tensors differ from the saved ones.
        """
        for i, engine in enumerate(context.models):
            load_engine(engine, load_path, tag=f"model{i}")
        _restore_buffers(context.models, load_path, context.distributed.get_rank())
        context.has_loaded_engines = True
        check_loaded(context.models, load_path, context.distributed)

    def load_weights(self, context: DeepSpeedTrialContext, load_path: Path) -> None:
        """Load only the models' weights from the files below `load_path`: the validated ones.

        For a trial that starts with the weights of another (``searcher.source_weights_only``). A
        trial that overrides `save` must override this too. Collective: every rank calls this.

        Raises:
            TrialError: DeepSpeed found no weights of an engine.
            CheckpointError: loaded tensors differ from the saved ones.
        """
        for i, engine in enumerate(context.models):
            load_weights(engine, load_path, tag=f"model{i}")
        check_loaded(context.models, load_path, context.distributed)
        for i, engine in enumerate(context.models):
            load_validated(engine, load_path, i)


def _excludes_frozen(context: DeepSpeedTrialContext) -> list[bool]:
    """Of each engine, whether its checkpoint leaves out the frozen parameters. Collective.

    All of them or none: DeepSpeed restores them together, so one that has changed keeps the others.
    """
    excludes = [False] * len(context.models)
    if context.run_info.checkpointing.exclude_frozen_parameters:
        built = context.frozen_as_built
        excludes = [not each for each in built.changed()] if built else [True] * len(excludes)
    context.left_out = [
        frozen_names(engine.module) if excluded else set[str]()
        for engine, excluded in zip(context.models, excludes, strict=True)
    ]
    return excludes


def _record_buffers(engines: Sequence[DeepSpeedEngine], folder: Path, rank: int) -> None:
    """Write this rank's buffers that differ from others', such as the running means of BatchNorm.

    Under ZeRO 0 to 2, of the ranks with the same weights, DeepSpeed stores the buffers of one and
    gives them to all. So each rank stores its own differing ones in a separate file, and gets them
    back. On ranks other than the saving ones, all get the buffers that DeepSpeed stored.
    Collective: every rank calls this.
    """
    own = [_differing_buffers(engine) for engine in engines]
    if any(own):
        path = _buffers_path(folder, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        places = [_place(engine) for engine in engines]
        engines[0].checkpoint_engine.save({"places": places, "buffers": own}, str(path))


@torch.no_grad()
def _restore_buffers(engines: Sequence[DeepSpeedEngine], folder: Path, rank: int) -> None:
    """Restore the buffers of `_record_buffers`, on the ranks that wrote them. Not collective."""
    path = _buffers_path(folder, rank)
    if not path.is_file():
        return
    saved = reader_of(engines[0]).load(path)
    for engine, place, buffers in zip(engines, saved["places"], saved["buffers"], strict=False):
        if tuple(place) == _place(engine):
            present = dict(persistent_buffers(engine.module))
            for name in buffers.keys() & present.keys():
                present[name].copy_(buffers[name])


def _buffers_path(folder: Path, rank: int) -> Path:
    return folder / "trialflow" / f"buffers-{rank:05d}.pt"


def _place(engine: DeepSpeedEngine) -> tuple[Any, ...]:
    """Number of ranks, and this one's place among them."""
    group = engine.seq_data_parallel_group
    alike = dist.get_rank(group), dist.get_world_size(group)
    return dist.get_world_size(), engine.checkpoint_mp_rank, *alike


def _differing_buffers(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    buffers = dict(persistent_buffers(engine.module))
    if not buffers or engine.zero_optimization_partition_weights():  # each rank's are stored
        return {}
    sums = torch.stack([bit_sum(each).to(engine.device) for each in buffers.values()])
    group = engine.seq_data_parallel_group
    every = [torch.empty_like(sums) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, sums, group=group)
    is_same = torch.stack(every).eq(sums).all(0).tolist()
    return {
        name: each.detach()
        for (name, each), same in zip(buffers.items(), is_same, strict=True)
        if not same
    }
