"""What a run starts from: nothing, its own last checkpoint, or another trial's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trial_core.checkpoint.manifest import Manifest, Topology
from trial_core.errors import CheckpointDamaged, CheckpointError
from trial_core.run.sequencer import Progress

Restore = Literal["everything", "state", "weights"]
"""How much of a checkpoint is restored. ``everything`` continues the trial that saved it. The
others begin a trial with it, at batch 0: ``state`` takes the engines' whole state (weights,
optimizers, learning-rate schedules) and the callbacks', but neither position nor random state;
``weights`` takes the models' weights alone."""


@dataclass(frozen=True)
class ResumePoint:
    """What a run starts from.

    Attributes:
        progress: how far the trial has come already.
        checkpoint: what is restored, None for a trial that begins with nothing.
        restore: how much of it.
    """

    progress: Progress = field(default_factory=Progress)
    checkpoint: Manifest | None = None
    restore: Restore = "everything"

    @classmethod
    def continuing(cls, checkpoint: Manifest) -> ResumePoint:
        """Go on with the trial that saved `checkpoint`."""
        return cls(checkpoint.progress.stopping(False), checkpoint)

    @classmethod
    def warm(cls, checkpoint: Manifest, weights_only: bool) -> ResumePoint:
        """Begin another trial with what `checkpoint` holds."""
        return cls(Progress(), checkpoint, "weights" if weights_only else "state")

    @property
    def uuid(self) -> str | None:
        """The checkpoint's, as `on_trial_startup` is told."""
        return self.checkpoint.uuid if self.checkpoint else None

    @property
    def saved_by(self) -> Topology | None:
        """How the ranks that saved the checkpoint divided the work."""
        return self.checkpoint.topology if self.checkpoint else None

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """The trial's own last metrics so far: those of another trial do not count."""
        if self.checkpoint is None or self.restore != "everything":
            return {}
        return {kind: dict(values) for kind, values in self.checkpoint.metrics.items()}

    def require_convertible(self, now: Topology) -> None:
        """Check that ranks like these can restore the checkpoint, whoever saved it.

        The number of data-parallel ranks and the ZeRO stage may be others. What only ranks know,
        they refuse when they restore.

        Raises:
            CheckpointError: they cannot; says why, and what to resume with.
        """
        if self.checkpoint is None or self.restore == "weights":
            return
        saved = self.checkpoint.topology
        if saved.spreads_like(now):
            return
        reason = _other_model_parts(saved, now)
        if reason is None and self.restore == "everything":
            reason = _other_batches(saved, now)
        if reason is None:
            return
        if self.restore == "state":
            reason += ", or take its weights alone: searcher.source_weights_only=true"
        raise CheckpointError(f"checkpoint {self.checkpoint.uuid} was saved by {reason}")


def no_intact_checkpoint(tried: Sequence[ResumePoint], damage: str) -> CheckpointDamaged:
    """What to raise where a run has something to start from, and all of it is damaged.

    Args:
        tried: in that order; at least one, each with a checkpoint.
        damage: what is wrong with the last one.
    """
    last = tried[-1]
    if last.restore != "everything":
        return CheckpointDamaged(f"searcher.source_checkpoint_uuid: {damage}")
    trial = last.checkpoint.trial if last.checkpoint else "?"
    return CheckpointDamaged(
        f"none of the {len(tried)} checkpoint(s) that trial {trial} may go on from is whole; of "
        f"the last that was tried: {damage}. Put its files back, or begin a new trial (without "
        "--resume; in a script, without latest_checkpoint): under this name nothing begins anew"
    )


def _other_model_parts(saved: Topology, now: Topology) -> str | None:
    """What is wrong where a model is divided among ranks otherwise than it was."""
    if (saved.pipeline_parallel_size, saved.model_parallel_size) == (
        now.pipeline_parallel_size,
        now.model_parallel_size,
    ):
        return None
    return (
        f"{saved.world_size} slots with {_model_parts(saved)}, and this run has {now.world_size} "
        f"with {_model_parts(now)}: how a model is divided is known to the trial alone. Resume "
        "with models divided as they were; how many copies of them are trained does not matter"
    )


def _other_batches(saved: Topology, now: Topology) -> str | None:
    """What is wrong where a batch has more or fewer samples than it had."""
    if not saved.batch_samples or saved.batch_samples == now.batch_samples:
        return None
    return (
        f"{saved.world_size} slots in batches of {saved.batch_samples} samples, and this run's "
        f"batches have {now.batch_samples} on {now.world_size} slots: schedules, learning rates "
        "and the place in the data, all counted in batches, would mean something else. Resume "
        f"with train_batch_size={saved.batch_samples} in DeepSpeed's configuration (micro-batch "
        f"size x gradient_accumulation_steps x data-parallel slots), or with {saved.world_size} "
        "slots"
    )


def _model_parts(topology: Topology) -> str:
    stages, parts = topology.pipeline_parallel_size, topology.model_parallel_size
    return f"{stages} pipeline stage(s) x {parts} model-parallel rank(s) a model"
