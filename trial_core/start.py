"""What a run starts from: nothing, its own last checkpoint, or another trial's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trial_core.checkpoint.manifest import Manifest
from trial_core.errors import CheckpointError
from trial_core.sequencer import Progress

Restore = Literal["everything", "state", "weights"]
"""How much of a checkpoint is restored. ``everything`` continues the trial that saved it. The
others begin a trial with it, at batch 0: ``state`` takes the engines' whole state (weights,
optimizers, learning-rate schedules) and the callbacks', but neither position nor random state;
``weights`` takes the models' weights alone."""


@dataclass(frozen=True)
class Start:
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
    def continuing(cls, checkpoint: Manifest) -> Start:
        """Go on with the trial that saved `checkpoint`."""
        return cls(checkpoint.progress.stopping(False), checkpoint)

    @classmethod
    def warm(cls, checkpoint: Manifest, weights_only: bool) -> Start:
        """Begin another trial with what `checkpoint` holds."""
        return cls(Progress(), checkpoint, "weights" if weights_only else "state")

    @property
    def uuid(self) -> str | None:
        """The checkpoint's, as `on_trial_startup` is told."""
        return self.checkpoint.uuid if self.checkpoint else None

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """The trial's own last metrics so far: those of another trial do not count."""
        if self.checkpoint is None or self.restore != "everything":
            return {}
        return {kind: dict(values) for kind, values in self.checkpoint.metrics.items()}

    def require_ranks(self, world_size: int) -> None:
        """Check that `world_size` ranks can restore the checkpoint.

        Raises:
            CheckpointError: its state is spread over another number of ranks.
        """
        if self.checkpoint is None or self.restore == "weights":
            return
        saved_by = self.checkpoint.topology.world_size
        if saved_by == world_size:
            return
        advice = f"resume with resources.slots_per_trial={saved_by} (a script: with as many ranks)"
        if self.restore == "state":
            advice += ", or take its weights alone: searcher.source_weights_only=true"
        raise CheckpointError(
            f"checkpoint {self.checkpoint.uuid} was saved by {saved_by} slots, and this run has "
            f"{world_size}; {advice}"
        )
