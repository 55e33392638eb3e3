"""Restores engines from a checkpoint of another number of ranks, or another ZeRO stage.

DeepSpeed loads through a `CheckpointEngine` that assembles each requested file in memory, as an
engine of the present topology would have saved it. It reads only the parts of the saved shards that
this rank needs. DeepSpeed itself loads the rest: schedules, counters, loss scales, client state.

Why not DeepSpeed's universal checkpoint: it writes every parameter and moment to a separate file,
which doubles the disk space. Loading one leaves buffers and frozen weights as initialised, gives
all groups of a ZeRO-3 optimizer the first group's learning rate, supports only Adam, and does not
convert between ZeRO 1 or 2 and ZeRO-3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine

from trial_core.deepspeed.checkpoint_engine import checkpoint_engines_replaced
from trial_core.deepspeed.reshard.live_state import (
    ZERO_OPTIMIZERS,
    check_engine,
    frozen_fragments,
    full_optimizer_state,
    module_state,
    shapes_by_group,
    zero_optimizer_state,
)
from trial_core.deepspeed.reshard.saved_state import (
    MODEL_STATES,
    OPTIMIZER_STATES,
    ReadFile,
    SourceEngine,
    rank_files,
)
from trial_core.errors import CheckpointError, TrialError
from trial_core.rank.rank_state import STATE_FOLDER
from trial_core.rank.state_files.built_settings import read_parameters
from trial_core.rank.state_files.parameter_order import names_of_model, saved_places

_EXPERT = re.compile(r"\.deepspeed_experts\.(\d+)\.")


@contextmanager
def resharded(engines: Sequence[DeepSpeedEngine], folder: Path, read: ReadFile) -> Iterator[Path]:
    """Inside the block, engines load a checkpoint of another topology as if it were of their own.

    `folder` has at least all shards of this rank's model-parallel rank. Gives the folder to load
    from: the engines' files in it are empty, or links, which only have the right names, and all
    other files are links. Raises CheckpointError if an engine's state cannot be resharded; says
    why.
    """
    saved = read_parameters(folder / STATE_FOLDER)
    with TemporaryDirectory(prefix="trialflow-") as name:
        target = Path(name)
        tags = {f"model{index}" for index in range(len(engines))}
        for path in folder.iterdir():
            if path.name not in tags:
                (target / path.name).symlink_to(path.absolute())
        replacements = (
            _ReshardingCheckpointEngine(
                engine, folder / f"model{i}", target / f"model{i}", read, names_of_model(saved, i)
            )
            for i, engine in enumerate(engines)
        )
        with checkpoint_engines_replaced(engines, replacements):
            yield target


def is_ordered_otherwise(engine: DeepSpeedEngine, folder: Path, read: ReadFile) -> bool:
    """True if ZeRO's flat buffers have other parameters at their places than when they were saved.

    So it is with layers in another order, others of them frozen, or another
    `zero_optimization.round_robin_gradients`. DeepSpeed's own loading goes by the places, and does
    not notice. Renamed parameters keep theirs. `folder` has the files under the engine's tag.
    Raises CheckpointError if not all shards are here, so that it cannot be resharded.
    """
    rank = engine.checkpoint_mp_rank
    is_zero = engine.zero_optimization() and isinstance(engine.optimizer, ZERO_OPTIMIZERS)
    files = rank_files(folder, MODEL_STATES, rank) if is_zero and folder.is_dir() else []
    saved = [*map(list, read(files[0][1])["param_shapes"] or ())] if files else []
    now = [*map(list, engine._get_zero_param_shapes())] if files else []
    if saved == now or not saved:
        return False
    then, own = [*chain(*saved)], [*chain(*now)]
    has_places = saved_places(own, then) == [*range(len(own))]
    is_renamed = has_places and not ({*then} - {*own}) & {*engine.param_names.values()}
    # Under ZeRO-3, another sub_group_size divides the same parameters otherwise.
    if is_renamed and [*map(len, saved)] == [*map(len, now)]:
        return False
    if len(rank_files(folder, OPTIMIZER_STATES, rank)) != engine.seq_dp_world_size:
        raise CheckpointError(
            "the optimizer's parameters are others, or in another order, than when the checkpoint "
            "was saved, and this machine does not hold the shards of all ranks; set DeepSpeed's "
            "zero_optimization.round_robin_gradients (under ZeRO-3, sub_group_size) to what it "
            "was, or define the layers, and give them to the optimizer, in the order that was saved"
        )
    return True


def is_of_other_precision(engine: DeepSpeedEngine, names: Iterable[str]) -> bool:
    """True if ZeRO has saved shards in bf16, and the engine trains in another precision, or the
    reverse: DeepSpeed looks for them under another name. `names` are the files under its tag."""
    were_bf16 = {name.startswith("bf16_") for name in names if OPTIMIZER_STATES.fullmatch(name)}
    return bool(engine.zero_optimization()) and were_bf16 == {not engine.bfloat16_enabled()}


class _ReshardingCheckpointEngine(CheckpointEngine):
    """Assembles the saved files of an engine's tag; `target_folder` gets the names to look for."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        source_folder: Path,
        target_folder: Path,
        read: ReadFile,
        names: Sequence[str],
    ) -> None:
        super().__init__()
        check_engine(engine)
        self._engine = engine
        self._replaced = engine.checkpoint_engine
        self._folder = source_folder
        self._read = read
        self._names = names
        self._has_shards = False
        self._model_files: dict[int, str] = {}
        target_folder.mkdir()
        for file in source_folder.iterdir() if source_folder.is_dir() else ():
            if match := MODEL_STATES.fullmatch(file.name):
                # DeepSpeed counts these files: one for each model-parallel rank.
                parent, tag = str(target_folder.parent), target_folder.name
                Path(engine._get_ckpt_name(parent, tag, mp_placeholder=match[2])).touch()
                self._model_files[int(match[2])] = file.name
            elif OPTIMIZER_STATES.fullmatch(file.name):
                self._has_shards = True
            else:
                # Layers of a pipeline, or experts.
                (target_folder / file.name).symlink_to(file.absolute())
        if engine.has_moe_layers:
            self._check_experts()

    def load(self, path: str, map_location: Any = None) -> Any:
        """The content that the file of this name would have on this rank."""
        name = Path(path).name
        if match := MODEL_STATES.fullmatch(name):
            if int(match[2]) != self._engine.checkpoint_mp_rank:
                # DeepSpeed reads another rank's file only for the number of ranks in it.
                return self._read(self._folder / self._model_files[int(match[2])])
            return self._model_states
        if OPTIMIZER_STATES.fullmatch(name):
            return {"optimizer_state_dict": self._optimizer_states()}
        return self._replaced.load(path, map_location)

    def create(self, *arguments: Any, **named: Any) -> None:
        """Refuse to save."""
        raise TrialError("the trial's load method saves a checkpoint; save in its save method")

    save = commit = create

    @cached_property  # DeepSpeed loads them twice
    def _model_states(self) -> dict[str, Any]:
        engine = self._engine
        ranks = {"dp_world_size": engine.seq_dp_world_size}
        if not engine.zero_optimization() and not self._has_shards:
            # Neither the saved nor the live engine partitions anything.
            model = self._read(self._folder / self._model_files[engine.checkpoint_mp_rank])
            return {**model, **ranks}
        source = self._source
        changes = {"module": module_state(engine, source), "frozen_param_fragments": None}
        if engine.zero_optimization_partition_weights():
            changes["frozen_param_fragments"] = frozen_fragments(engine, source)
        if not engine.zero_optimization():
            changes["optimizer"] = full_optimizer_state(engine, source)
        return {**source.model, **ranks, **changes}

    def _optimizer_states(self) -> dict[str, Any]:
        live: dict[str, Any] = self._engine.optimizer.state_dict()
        saved = {key: value for key, value in self._source.global_state.items() if key in live}
        if is_of_other_precision(self._engine, (file.name for file in self._folder.iterdir())):
            saved.pop("loss_scaler", None)  # only fp16 scales losses
            saved.pop("dynamic_loss_scale", None)
        return {**live, **saved, **zero_optimizer_state(self._engine, live, self._source)}

    def _check_experts(self) -> None:
        """Check that each rank that saved a mixture of experts had all of them, and ZeRO, too.

        Raises CheckpointError if not: their optimizer's state is in other files.
        """
        rank = self._engine.checkpoint_mp_rank
        reason = None
        if self._has_shards != self._engine.zero_optimization():
            reason = f"{'with' if self._has_shards else 'without'} ZeRO"
        elif not self._has_shards:
            if len(list(self._folder.glob(f"expp_rank_*_mp_rank_{rank:02d}_optim_states.pt"))) > 1:
                reason = "with an ep_size > 1"
        elif rank in self._model_files:
            model = self._read(self._folder / self._model_files[rank])
            found = [_EXPERT.search(name) for shapes in model["param_shapes"] for name in shapes]
            experts = [int(match[1]) for match in found if match]
            if experts and max(experts) + 1 < max(model["num_experts"]):
                reason = "with an ep_size > 1"
        if reason is not None:
            raise CheckpointError(
                f"the checkpoint of a mixture of experts was saved {reason}, and DeepSpeed's files "
                "of its optimizer have another layout then; resume with as many ranks, the ep_size "
                "and the ZeRO stage that saved it, or load only the weights: "
                "searcher.source_weights_only=true"
            )

    @cached_property
    def _source(self) -> SourceEngine:
        target_groups = shapes_by_group(self._engine)
        return SourceEngine(
            self._folder, self._engine.checkpoint_mp_rank, target_groups, self._read, self._names
        )
