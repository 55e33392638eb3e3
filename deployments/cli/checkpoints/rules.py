"""The retention rules of `trialflow checkpoints prune`: its options override --config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trial_core.errors import ConfigError

if TYPE_CHECKING:
    from trial_core.checkpoint.retention_policy import RetentionPolicy
    from trial_core.config import ExperimentConfig


@Parameter(name="*")
@dataclass(frozen=True)
class Rules:
    """Retention rules; they override the rules of --config.

    Attributes:
        save_trial_best: Keep the N best checkpoints of each trial. Default: 1 if any rule is set.
        save_trial_latest: Keep the N latest checkpoints of each trial. Default: 1 if any rule is
            set.
        save_experiment_best: Keep the N best checkpoints of all trials together. Default: 0.
        keep_every_batches: Keep the first checkpoint at or after each multiple of N batches.
            Default: no such rule.
        keep_every_epochs: Keep the first checkpoint at or after each multiple of N epochs. Default:
            no such rule.
        metric: The validation metric that decides which checkpoint is best. Default: the metric of
            --config; without one, all validated checkpoints count as best.
        smaller_is_better: A smaller value of the metric is better. Default: as --config says, else
            smaller.
    """

    save_trial_best: int | None = None
    save_trial_latest: int | None = None
    save_experiment_best: int | None = None
    keep_every_batches: int | None = None
    keep_every_epochs: int | None = None
    metric: str | None = None
    smaller_is_better: Annotated[bool | None, Parameter(negative="--larger-is-better")] = None

    def policy(self, experiment: ExperimentConfig | None) -> RetentionPolicy | None:
        """Return the policy of these rules over an experiment's rules; None if neither sets one.

        Raises:
            ConfigError: a rule is wrong.
        """
        from pydantic import ValidationError

        from trial_core.config import StorageConfig, error_lines

        metric, smaller_is_better = self.metric, self.smaller_is_better
        of_experiment: dict[str, Any] = {}
        if experiment is not None:
            of_experiment = experiment.checkpoint_storage.model_dump(exclude_none=True)
            metric = metric or experiment.searcher.metric
            if smaller_is_better is None:
                smaller_is_better = experiment.searcher.smaller_is_better
        try:
            merged = StorageConfig.model_validate({**of_experiment, **self._as_fields()})
        except ValidationError as error:
            raise ConfigError("\n".join(f"rules: {line}" for line in error_lines(error))) from None
        is_continuous = experiment is not None and experiment.saves_continuously
        return merged.retention(metric, smaller_is_better is not False, is_continuous)

    def _as_fields(self) -> dict[str, Any]:
        """The rules that are set, as fields of `checkpoint_storage`."""
        units = {"batches": self.keep_every_batches, "epochs": self.keep_every_epochs}
        every = {unit: number for unit, number in units.items() if number is not None}
        fields = {
            "save_trial_best": self.save_trial_best,
            "save_trial_latest": self.save_trial_latest,
            "save_experiment_best": self.save_experiment_best,
            "keep_every": every or None,
        }
        return {name: value for name, value in fields.items() if value is not None}
