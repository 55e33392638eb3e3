"""Compares a hyperparameter search with Ray Tune's ASHA and Optuna's Hyperband.

**Decisions**: all searchers get the same learning curves, several times with other seeds, without
training. Each asks its own library's scheduler or pruner after each batch; four trials take turns.
*Until found*: the batches of all trials until the searcher has the configuration that it ends with,
the one with the least loss so far. *Regret*: how far that configuration's loss at the end of its
curve is above the least one.

There are two kinds of curves. Synthetic ones fall to a drawn end at a drawn speed, with noise. The
others, whose figures end in `_digits`, are validation losses of real trainings: a classifier of
handwritten digits with learning rates and batch sizes drawn as in `examples/digits/search.yaml`.
They are trained once for each seed, before the searches; a "batch" of theirs is two real batches.

**Beside training**: real trials of a few batches, one after the other, each with a checkpoint. What
a trial takes, without its batches, from the end of the first trial to the end of the last. Tune
trains the same model in a new process for each trial, which is its default.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from benchmarks.figures import conclude
from benchmarks.ranks import experiment
from benchmarks.workload import temporary_homes
from trial_core.observe.events.observers import Observer, observing
from trial_core.search.settings import SearchExperiment
from trial_core.search.simulate import in_memory

DIVISOR, RUNGS = 3, 6
LENGTH = DIVISOR ** (RUNGS - 1)
SIDE_BY_SIDE = 4
ON_DIGITS = "_digits"
TARGETS = {
    "until_found_to_tune": 1.0, "pasha_to_asha": 0.5, "until_found_to_tune_digits": 1.0,
    "pasha_to_asha_digits": 0.5, "beside_training_to_tune": 0.2,
}  # fmt: skip


class Curves(Protocol):
    """The learning curves of all trials.

    Attributes:
        best: the least end of a curve.
    """

    best: float

    def end(self, trial: int) -> float:
        """The loss after all batches."""

    def loss(self, trial: int, batches: int) -> float:
        """The loss after so many batches."""


class Family:
    """Learning curves that cross: each falls to its own end at its own speed, with noise.

    Attributes:
        best: the least end of a curve.
    """

    def __init__(self, seed: int, trials: int) -> None:
        draw = random.Random(seed)
        self._seed = seed
        self._curves = [(draw.random(), draw.uniform(0.5, 2), draw.random()) for _ in range(trials)]
        self.best = min(self.end(trial) for trial in range(trials))

    def end(self, trial: int) -> float:
        """The loss after all batches, without noise."""
        end, height, speed = self._curves[trial]
        return float(end + height * LENGTH ** -(0.3 + speed))

    def loss(self, trial: int, batches: int) -> float:
        """The loss after so many batches."""
        end, height, speed = self._curves[trial]
        noise = random.Random(f"{self._seed} {trial} {batches}").gauss(0, 0.01)
        return float(end + height * batches ** -(0.3 + speed) + noise)


class Course:
    """What a searcher has trained, and with what it ends.

    Attributes:
        batches: of all trials.
        until_found: trained before the loss became least for the last time.
        regret: the end of that trial's curve beyond the least one.
    """

    def __init__(self, family: Curves) -> None:
        self._family = family
        self._least = math.inf
        self.batches = 0
        self.until_found = 0
        self.regret = math.inf

    def trained(self, trial: int, batches: int) -> float:
        """Train a trial by one batch, to `batches`. Returns its loss."""
        self.batches += 1
        loss = self._family.loss(trial, batches)
        if loss < self._least:
            self._least, self.until_found = loss, self.batches
            self.regret = self._family.end(trial) - self._family.best
        return loss


def of_trialflow(name: str, family: Curves, trials: int) -> Course:
    """A search of ours; a trial that is due continues where it was."""
    course = Course(family)
    search = in_memory(search_experiment(name, trials))
    reached: dict[int, int] = {}
    legs: dict[int, Any] = {}
    while True:
        while len(legs) < SIDE_BY_SIDE and (leg := search.next(legs)) is not None:
            legs[leg.trial.number] = leg
        if not legs:
            return course
        for trial, leg in list(legs.items()):
            reached[trial] = batches = reached.get(trial, 0) + 1
            loss = course.trained(trial, batches)
            if batches == int(leg.until.value):
                del legs[trial]
                search.reached(leg, batches, {"loss": loss}, None)


def search_experiment(name: str, trials: int) -> SearchExperiment:
    """An experiment whose searcher has the benchmark's rungs."""
    return SearchExperiment.from_mapping(
        {
            "name": "benchmark", "entrypoint": "trial:Trial",
            "hyperparameters": {"lr": {"type": "double", "minval": 0, "maxval": 1}},
            "searcher": {
                "name": name, "metric": "loss", "max_length": {"batches": LENGTH},
                "max_trials": trials, "max_concurrent_trials": SIDE_BY_SIDE,
                **({} if name == "random" else {"num_rungs": RUNGS, "divisor": DIVISOR}),
            },
        }
    )  # fmt: skip


def in_turns(course: Course, trials: Iterator[tuple[int, Callable[[int, float], bool]]]) -> Course:
    """Train trials in turns by a batch. Each comes with a function that says whether it stops."""
    running: dict[int, tuple[int, Callable[[int, float], bool]]] = {}
    while True:
        while len(running) < SIDE_BY_SIDE and (begun := next(trials, None)) is not None:
            running[begun[0]] = (0, begun[1])
        if not running:
            return course
        for trial, (batches, stops) in list(running.items()):
            loss = course.trained(trial, batches + 1)
            running[trial] = (batches + 1, stops)
            if stops(batches + 1, loss) or batches + 1 == LENGTH:
                del running[trial]


def of_tune(family: Curves, trials: int) -> Course:
    """Ray Tune's ASHA: its scheduler is asked after each batch."""
    from ray.tune.experiment import Trial
    from ray.tune.schedulers import ASHAScheduler

    scheduler: Any = ASHAScheduler(
        metric="loss", mode="min", max_t=LENGTH, grace_period=1, reduction_factor=DIVISOR
    )

    def begin() -> Iterator[tuple[int, Callable[[int, float], bool]]]:
        for number in range(trials):
            trial = Trial("benchmark", stub=True)
            scheduler.on_trial_add(None, trial)

            def stops(batches: int, loss: float, trial: Any = trial) -> bool:
                result = {"training_iteration": batches, "loss": loss}
                return bool(scheduler.on_trial_result(None, trial, result) == scheduler.STOP)

            yield number, stops

    return in_turns(Course(family), begin())


def of_optuna(family: Curves, trials: int) -> Course:
    """Optuna's Hyperband: its pruner is asked after each batch."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        pruner=optuna.pruners.HyperbandPruner(1, LENGTH, DIVISOR),
        sampler=optuna.samplers.RandomSampler(seed=0),
    )

    def begin() -> Iterator[tuple[int, Callable[[int, float], bool]]]:
        for _ in range(trials):
            trial = study.ask()

            def stops(batches: int, loss: float, trial: Any = trial) -> bool:
                trial.report(loss, batches)
                is_pruned = bool(trial.should_prune())
                if is_pruned or batches == LENGTH:
                    state = optuna.trial.TrialState
                    study.tell(
                        trial, None if is_pruned else loss,
                        state.PRUNED if is_pruned else state.COMPLETE,
                    )  # fmt: skip
                return is_pruned

            yield trial.number, stops

    return in_turns(Course(family), begin())


SEARCHERS: dict[str, Callable[[Curves, int], Course]] = {
    "asha": lambda family, trials: of_trialflow("asha", family, trials),
    "pasha": lambda family, trials: of_trialflow("pasha", family, trials),
    "random": lambda family, trials: of_trialflow("random", family, trials),
    "tune": of_tune,
    "optuna": of_optuna,
}


def decisions(families: Sequence[Curves], trials: int, suffix: str = "") -> dict[str, float]:
    """The figures of all searchers: means over the families, and ratios of them.

    Args:
        suffix: ends each figure's name.
    """
    figures: dict[str, float] = {}
    for name, run in SEARCHERS.items():
        courses = [run(family, trials) for family in families]
        for what in ("batches", "until_found", "regret"):
            figures[f"{what}_{name}"] = statistics.mean(getattr(each, what) for each in courses)
        print(
            f"{name}{suffix}: {figures[f'batches_{name}']:.0f} batches, "
            f"{figures[f'until_found_{name}']:.0f} until found, "
            f"regret {figures[f'regret_{name}']:.4f}",
            flush=True,
        )
    figures["until_found_to_tune"] = figures["until_found_asha"] / figures["until_found_tune"]
    figures["batches_to_tune"] = figures["batches_asha"] / figures["batches_tune"]
    figures["pasha_to_asha"] = figures["batches_pasha"] / figures["batches_asha"]
    return {f"{name}{suffix}": value for name, value in figures.items()}


class Ends(Observer):
    """Notes when each training has ended, and how long its batches have taken."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.trained: list[float] = []

    def of_trial(self, number: int, trial: str) -> Observer:
        return self

    def training_timed(self, timed: Any) -> None:
        self.trained.append(timed.seconds)

    def search_advanced(self, news: str) -> None:
        self.at.append(time.perf_counter())


def beside_training(ends: Sequence[float], trained: Sequence[float]) -> float:
    """Seconds of a trial besides its batches: the mean of all but the first."""
    periods = [end - begin for begin, end in pairwise(ends)]
    return statistics.mean(periods) - statistics.mean(trained[1:])


def trialflow_trials(folder: Path, trials: int, batches: int) -> float:
    """Run the flow search. Returns seconds of a trial besides its batches."""
    from trialflow.flows.search import search

    config = experiment(
        "TimedTrial", 1, f"file://{folder}/checkpoints", name="search",
        hyperparameters={"model": "tiny", "bare_batches": 1}, scheduling_unit=batches,
    )  # fmt: skip
    fields = config.model_dump(mode="json")
    fields["hyperparameters"]["tried"] = {"type": "double", "minval": 0, "maxval": 1}
    fields["searcher"] = {
        "name": "random", "metric": "seconds", "max_trials": trials, "max_concurrent_trials": 1,
        "max_length": {"batches": batches},
    }  # fmt: skip
    ends = Ends()
    with observing(ends):
        search(SearchExperiment.from_mapping(fields))
    return beside_training(ends.at, ends.trained)


def tune_trials(folder: Path, trials: int, batches: int) -> float:
    """The same for Ray Tune: one trial at a time, each in a new process."""
    import ray
    from ray import tune

    from benchmarks.search_tune import train

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        results = tune.Tuner(
            tune.with_resources(train, {"cpu": 1}),
            param_space={"batches": batches},
            tune_config=tune.TuneConfig(num_samples=trials, max_concurrent_trials=1),
            run_config=tune.RunConfig(storage_path=str(folder), verbose=0),
        ).fit()
    finally:
        ray.shutdown()
    metrics = sorted(
        (results[i].metrics or {} for i in range(len(results))), key=lambda each: each["ended"]
    )
    return beside_training(
        [each["ended"] for each in metrics], [each["trained"] for each in metrics]
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.search", description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="families of synthetic curves")
    parser.add_argument("--digits", type=int, default=3, help="families of curves of the digits")
    parser.add_argument("--curves", type=int, default=81, help="trials of a family")
    parser.add_argument("--trials", type=int, default=12, help="real trials of each library")
    parser.add_argument("--batches", type=int, default=20, help="batches of a real trial")
    arguments = parser.parse_args()
    trials = arguments.curves
    figures = decisions([Family(seed, trials) for seed in range(arguments.seeds)], trials)
    with temporary_homes() as folder:
        from trialflow.flows.server.embedded_server import prefect_api

        with prefect_api():
            ours = trialflow_trials(folder, arguments.trials, arguments.batches)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as tune_folder:
        tunes = tune_trials(Path(tune_folder), arguments.trials, arguments.batches)
    figures |= {"beside_training_s": ours, "beside_training_tune_s": tunes}
    figures["beside_training_to_tune"] = ours / tunes
    print(f"besides training, a trial: {ours:.2f} s; of Ray Tune: {tunes:.2f} s", flush=True)
    # Last: torch, with a single thread, is then no part of what was timed.
    from benchmarks.search_digits import Digits

    trained: list[Curves] = [Digits(seed, trials, LENGTH) for seed in range(arguments.digits)]
    figures |= decisions(trained, trials, ON_DIGITS)
    conclude(figures, TARGETS)


if __name__ == "__main__":
    main()
