"""The resume point of a run: nothing, a checkpoint of its own, or one of another trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trial_core.checkpoint.manifest import Manifest, Topology
from trial_core.common.text_format import flat
from trial_core.errors import CheckpointDamaged, TopologyMismatch
from trial_core.schedule.sequencer import Progress

Restore = Literal["everything", "state", "weights"]
"""How much of a checkpoint is restored.

``everything`` continues the trial that saved it. The others start a new trial at batch 0. ``state``
restores weights, optimizers, learning-rate schedules and the callbacks, but neither
the position in the data nor random states. ``weights`` restores only the models' weights.
"""


@dataclass(frozen=True)
class ResumePoint:
    """The state that a run starts from: a checkpoint to restore, and how much of it."""

    progress: Progress = field(default_factory=Progress)
    checkpoint: Manifest | None = None
    restore: Restore = "everything"

    @classmethod
    def continuing(cls, checkpoint: Manifest) -> ResumePoint:
        return cls(checkpoint.progress.stopping(False), checkpoint)

    @classmethod
    def warm(cls, checkpoint: Manifest, weights_only: bool) -> ResumePoint:
        """Start another trial from `checkpoint`: a warm start."""
        return cls(Progress(), checkpoint, "weights" if weights_only else "state")

    def measured_by(self, metric: str, smaller_is_better: bool) -> ResumePoint:
        """This point for a run whose searcher has this metric and direction.

        A best value that the checkpoint has by others is left out: it cannot be compared.
        """
        then = dict(flat(self.checkpoint.config)) if self.checkpoint else {}
        now = {"searcher.metric": metric, "searcher.smaller_is_better": smaller_is_better}
        if all(then.get(name, value) == value for name, value in now.items()):
            return self
        return replace(self, progress=replace(self.progress, best_metric=None))

    @property
    def uuid(self) -> str | None:
        """The checkpoint's uuid, which `on_trial_startup` receives."""
        return self.checkpoint.uuid if self.checkpoint else None

    @property
    def saved_by(self) -> Topology | None:
        return self.checkpoint.topology if self.checkpoint else None

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """The trial's latest metrics; empty for a warm start."""
        if self.checkpoint is None or self.restore != "everything":
            return {}
        latest = {**self.checkpoint.metrics, "validation": self.checkpoint.last_validation}
        return {kind: dict(values) for kind, values in latest.items() if values}

    def at_batches_of(self, samples: int) -> Progress:
        """The progress that training begins with in batches of so many samples; 0 if unknown."""
        saved, extra = self.saved_by, self.progress.extra_samples
        before = saved.batch_samples if saved and self.restore == "everything" else 0
        if not before and not extra:  # none were counted
            return self.progress
        extra += self.progress.batches_trained * (before - samples)
        return replace(self.progress, extra_samples=extra)

    def require_convertible(self, now: Topology) -> None:
        """Check that ranks of topology `now` can restore the checkpoint. Raises TopologyMismatch,
        which says why they cannot, and which topology can.

        The number of data-parallel ranks and the ZeRO stage may differ. The ranks check the rest
        when they restore.
        """
        if self.checkpoint is None or self.restore == "weights":
            return
        saved = self.checkpoint.topology
        if saved.spreads_like(now):
            return
        if _model_parts(saved) != _model_parts(now):
            reason = (
                f"{saved.world_size} slots with {_model_parts(saved)}, and this run has "
                f"{now.world_size} with {_model_parts(now)}: trialflow cannot convert how a trial "
                "divides its model. Resume with the same numbers of stages and parts; the number "
                "of data-parallel copies may differ"
            )
        elif self.restore == "everything" and saved.batch_samples not in (0, now.batch_samples):
            reason = (
                f"{saved.world_size} slots in batches of {saved.batch_samples} samples, and this "
                f"run's batches have {now.batch_samples} on {now.world_size} slots: schedules, "
                "learning rates and the position in the data are counted in batches, and would "
                f"change. Resume with train_batch_size={saved.batch_samples} in DeepSpeed's "
                "configuration (micro-batch size x gradient_accumulation_steps x data-parallel "
                f"slots), or with {saved.world_size} slots. If both are meant, change one after "
                "the other, the batches at the end of an epoch"
            )
        else:
            return
        if self.restore == "state":
            reason += ", or restore only its weights: searcher.source_weights_only=true"
        raise TopologyMismatch(f"checkpoint {self.checkpoint.uuid} was saved by {reason}")


def no_intact_checkpoint(tried: Sequence[ResumePoint], damage: str) -> CheckpointDamaged:
    """The error for a run whose resume points are all damaged; `damage` is of the last one."""
    last = tried[-1]
    if last.restore != "everything":
        return CheckpointDamaged(f"the source checkpoint of the searcher: {damage}")
    trial = last.checkpoint.trial if last.checkpoint else "?"
    return CheckpointDamaged(
        f"none of the {len(tried)} checkpoint(s) of trial {trial} is intact; the last one tried: "
        f"{damage}. Put back its files, or start a new trial (without --resume; in a script, "
        "without latest_checkpoint): a trial that has checkpoints is never restarted from scratch"
    )


def _model_parts(topology: Topology) -> str:
    stages, parts = topology.pipeline_parallel_size, topology.model_parallel_size
    return f"{stages} pipeline stage(s) x {parts} model-parallel rank(s) a model"
