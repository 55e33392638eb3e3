"""Ready-made callbacks, for `build_callbacks` of a `PyTorchTrial` or a `DeepSpeedTrial`::

    from trial_core.callbacks import EarlyStopping, ExponentialMovingAverage

    def build_callbacks(self):
        return {"stop": EarlyStopping(patience=5), "average": ExponentialMovingAverage(0.999)}

They find the trial's context themselves. A resumed run continues their state exactly.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import nn

from trial_core.common.text_format import number, plural
from trial_core.errors import TrialError, TrialValueError
from trial_core.pytorch.distributed_model import unwrapped
from trial_core.rank.collectives.accelerator import peak_memory_bytes, reset_peak_memory
from trial_core.rank.trial.callback import TrialCallback
from trial_core.rank.trial.custom_reducers import MetricReducer
from trial_core.schedule.work import samples_of

__all__ = ["EarlyStopping", "ExponentialMovingAverage", "StopOnNonFinite", "ThroughputAndMemory"]

_logger = logging.getLogger(__name__)

ZERO_STAGE_WEIGHTS = 3
GIB = 2**30


class _Counts(TrialCallback):
    """A callback whose state is plain data."""

    _state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = dict(state_dict)


class EarlyStopping(_Counts):
    """Ends the run when a validation metric has not improved for some validations.

    The run saves and completes early; its last line, log, state and report say why.

    Args:
        metric: the metric to watch; by default the searcher's.
        patience: how many validations in a row may bring no improvement.
        min_delta: an improvement counts only if it is greater than this.
        smaller_is_better: by default as the searcher says.

    Raises:
        TrialValueError: `patience` is less than 1, or `min_delta` less than 0.
        TrialError: the experiment names no searcher metric, or two validations in a row do not
            report `metric`.
    """

    def __init__(
        self,
        metric: str | None = None,
        patience: int = 3,
        min_delta: float = 0.0,
        smaller_is_better: bool | None = None,
    ) -> None:
        if patience < 1 or not min_delta >= 0:
            raise TrialValueError(
                "EarlyStopping takes a patience of at least 1 and a min_delta of at least 0, got "
                f"patience={patience!r}, min_delta={min_delta!r}"
            )
        self.metric = metric
        self.patience = patience
        self.min_delta = min_delta
        self.smaller_is_better = smaller_is_better
        self._is_searchers = metric is None
        self._state = {"best": None, "best_at": 0, "waited": 0, "lacked": False}

    def attach(self, context: Any) -> None:
        super().attach(context)
        searcher = context.get_experiment_config().get("searcher") or {}
        if self.metric is None and (metric := searcher.get("metric")) is None:
            raise TrialError("EarlyStopping needs a metric: the experiment has no searcher.metric")
        self.metric = self.metric or metric
        if self.smaller_is_better is None:
            self.smaller_is_better = bool(searcher.get("smaller_is_better", True))

    def state_dict(self) -> dict[str, Any]:
        return {**self._state, **self._measure}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        then = {name: state_dict.get(name, now) for name, now in self._measure.items()}
        if then != self._measure:  # the best value so far cannot be compared
            self._state.update(best=None, waited=0)
            text = "EarlyStopping begins its count again: it watched %s, and now watches %s"
            _logger.info(text, then, self._measure)

    @property
    def _measure(self) -> dict[str, Any]:
        return {"metric": self.metric, "smaller_is_better": self.smaller_is_better}

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        given = metrics.get(str(self.metric))
        if isinstance(given, bool) or not isinstance(given, Real):
            if self._is_searchers:
                return  # the driver says so, once the run has saved
            missing = (
                f'EarlyStopping: metric "{self.metric}" must be a number, but the validation '
                f"reports {', '.join(sorted(metrics))}"
            )
            if self._state.get("lacked"):
                raise TrialError(missing)
            _logger.warning("%s; a second such validation in a row ends the run", missing)
            self._state["lacked"] = True
            return
        self._state["lacked"] = False
        value, state, batch = float(given), self._state, self.context.run_info.batches_trained
        gain, best = math.inf, state["best"]
        if best is not None and math.isfinite(best):  # in an old state it may be infinite
            gain = best - value if self.smaller_is_better else value - best
        if gain > self.min_delta and math.isfinite(value):
            state.update(best=value, best_at=batch, waited=0)
            return
        state["waited"] += 1
        if state["waited"] >= self.patience:
            by = f" by more than {number(self.min_delta)}" if self.min_delta else ""
            since = f"since batch {state['best_at']}"
            if best is None:
                since = f"in {plural(state['waited'], 'validation')}, and is {number(value)}"
            self.context.set_stop_requested(reason=f"{self.metric} has not improved{by} {since}")


class StopOnNonFinite(_Counts):
    """Ends the run when a training metric's mean over a workload is NaN or infinite.

    The run completes early, with this reason, and earlier than a run without the callback, which
    fails (`stopping.fail_on_non_finite_loss`). If it is a loss, no checkpoint is stored.

    Args:
        patience: the number of such workloads in a row.

    Raises:
        TrialValueError: `patience` is less than 1.
    """

    def __init__(self, patience: int = 1) -> None:
        if patience < 1:
            raise TrialValueError(f"StopOnNonFinite: patience is at least 1, got {patience!r}")
        self.patience = patience
        self._state = {"waited": 0}

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: Any) -> None:
        bad = [
            f"{name} is {value}"
            for name, value in avg_metrics.items()
            if isinstance(value, Real) and not math.isfinite(value)
        ]
        waited = self._state["waited"] = self._state["waited"] + 1 if bad else 0
        if waited >= self.patience:
            until = f"until batch {self.context.run_info.batches_trained}"
            reason = f"{', '.join(bad)} in {plural(waited, 'workload')}, {until}"
            self.context.set_stop_requested(reason=reason)


class ExponentialMovingAverage(TrialCallback):
    """Averages the weights over optimizer steps, and validates the averages.

    After each step, ``average = decay * average + (1 - decay) * weight``, in float32 at least, from
    the weights before training; of a weight that is frozen at first, from its first step on.
    Validations, with their hooks, run with the averages. Training, and
    the buffers of models, are not affected.

    A checkpoint holds the averages, too, so that `trialflow export`, `trialflow evaluate` and a
    warm start with weights take the validated weights. A resumed run continues from the trained
    ones. Of a model that a `DeepSpeedTrial` divides over ranks (pipelines, experts, model
    parallelism), exports and evaluations have the trained weights.

    Args:
        decay: less than 1; the nearer to it, the longer the average.

    Raises:
        TrialValueError: `decay` is not between 0 and 1.
        TrialError: an engine uses ZeRO stage 3, where no rank has whole weights.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise TrialValueError(
                f"ExponentialMovingAverage: decay is between 0 and 1, got {decay!r}"
            )
        self.decay = decay
        self._averages: list[dict[str, torch.Tensor]] | None = None
        self._steps = self._steps_seen = 0

    def attach(self, context: Any) -> None:
        super().attach(context)
        for optimizer in getattr(context, "optimizers", ()):
            optimizer.register_step_post_hook(self._note_step)
        context.averages = self
        for engine in self._engines:
            if engine.zero_optimization_stage() == ZERO_STAGE_WEIGHTS:
                raise TrialError("ExponentialMovingAverage: use ZeRO stage 2 at most, not 3")

    @property
    def averages(self) -> list[dict[str, torch.Tensor]]:
        """For each wrapped model or engine, the averages by the names of its ``state_dict``."""
        if self._averages is None:
            self._averages = [{} for _ in self.context.models]
            self._begin_averages(self._weights)
        return self._averages

    def _begin_averages(self, of_models: list[dict[str, nn.Parameter]]) -> None:
        """Begin the averages of weights that are trained, as far as they have none."""
        for averages, weights in zip(self.averages, of_models, strict=True):
            for name, weight in weights.items():
                if weight.requires_grad and name not in averages:
                    averages[name] = _first_average(weight)

    def on_training_start(self) -> None:
        self._steps_seen = self._steps_made
        _ = self.averages

    @torch.no_grad()
    def batch_ended(self) -> None:
        steps, self._steps_seen = self._steps_seen, self._steps_made
        if steps == self._steps_seen:
            return
        of_models = self._weights
        self._begin_averages(of_models)
        for averages, weights in zip(self.averages, of_models, strict=True):
            for name, average in averages.items():
                average.lerp_(weights[name].to(average.dtype), 1 - self.decay)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        pairs = [
            (weights[name], average)
            for averages, weights in zip(self.averages, self._weights, strict=True)
            for name, average in averages.items()
        ]
        kept = [weight.detach().clone() for weight, _ in pairs]
        with torch.no_grad():
            for weight, average in pairs:
                weight.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for (weight, _), own in zip(pairs, kept, strict=True):
                    weight.copy_(own)

    @torch.no_grad()
    def load_averages(self, saved: list[Mapping[str, torch.Tensor]]) -> None:
        """Continue from the averages that a checkpoint has, by the names of a ``state_dict``."""
        for averages, values, weights in zip(self.averages, saved, self._weights, strict=True):
            for name, weight in weights.items():
                value = values.get(name)
                if value is None or not (name in averages or _differs(value, weight)):
                    continue
                # It may be of a weight that the trial builds as frozen.
                averages.setdefault(name, _first_average(weight)).copy_(value)

    def state_dict(self) -> dict[str, Any]:
        return {"averages": self.averages} if self._engines else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._engines:
            self.load_averages(state_dict["averages"])

    @property
    def _engines(self) -> list[Any]:
        models = self.context.models
        return [each for each in models if hasattr(each, "zero_optimization_stage")]

    @property
    def _weights(self) -> list[dict[str, nn.Parameter]]:
        """The parameters of each model, once each."""
        return [dict(unwrapped(model).named_parameters()) for model in self.context.models]

    @property
    def _steps_made(self) -> int:
        engines = self._engines
        return self._steps + sum(int(e.global_steps - e.skipped_steps) for e in engines)

    def _note_step(self, *_: Any) -> None:
        self._steps += 1


def _differs(value: torch.Tensor, weight: torch.Tensor) -> bool:
    return value.dtype != weight.dtype or not torch.equal(value.to(weight.device), weight)


def _first_average(weight: nn.Parameter) -> torch.Tensor:
    return weight.detach().clone().to(torch.promote_types(weight.dtype, torch.float32))


class ThroughputAndMemory(TrialCallback):
    """Reports ``samples_per_second`` and ``peak_memory_gib`` as training metrics of each workload.

    So they are in the report, in TensorBoard and in checkpoints. The speed is the slowest rank's,
    with its waits for data; it is ``batches_per_second`` if the samples of a batch are unknown. The
    memory is the most that a rank which reports metrics has allocated on its accelerator in the
    workload; on the CPU, the most that its process has ever used.
    """

    def attach(self, context: Any) -> None:
        super().attach(context)
        context.wrap_reducer(_Measured(context), for_validation=False)


class _Measured(MetricReducer):
    def __init__(self, context: Any) -> None:
        self._info = context.run_info
        self._begin, self._samples, self._began = 0, 0, 0.0

    def reset(self) -> None:
        self._begin, self._samples = self._info.batches_trained, self._info.samples_trained
        self._began = time.monotonic()
        reset_peak_memory()

    def per_slot_reduce(self) -> tuple[float, float, int]:
        seconds = time.monotonic() - self._began
        samples = self._info.samples_trained - self._samples
        return seconds, peak_memory_bytes(since_start=False) / GIB, samples

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> dict[str, float]:
        seconds, memory, counts = zip(*per_slot_metrics, strict=True)
        batches = self._info.batches_trained - self._begin
        samples = samples_of(counts) or batches * self._info.batch_samples
        unit = "samples" if samples else "batches"
        speed = (samples or batches) / max(*seconds, 1e-9)
        return {f"{unit}_per_second": speed, "peak_memory_gib": max(memory)}
