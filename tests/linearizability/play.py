"""Plays histories of a subject in a simulation, and checks them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from unittest import mock

from tests.linearizability import lifetimes
from tests.linearizability.actor import SUBJECTS
from tests.linearizability.history import check_by
from tests.linearizability.scene import prepare
from tests.linearizability.simulation import Simulation
from trial_core.checkpoint.retention import claims

NUMBERED = ("manifests/", "attempts/", "models/")
"""Create-only keys. A model of `SUBJECTS` says nothing about another write that comes late."""

MOST_FAULTS = 6
"""Of a history that a model checks: each outcome that is not known doubles the possible orders."""


def play(subject: str, seed: int, show: Callable[[str], None] = lambda line: None) -> Counter[str]:
    """Play the history of a seed; what was counted.

    Args:
        subject: one of `SUBJECTS`, or "lifetimes".
        show: gets each request of the history.

    Raises:
        NotLinearizable, AssertionError: with all requests of the history, and how to repeat it.
    """
    is_all = subject == "lifetimes"
    simulation = Simulation(
        seed,
        may_be_late=lambda key: is_all or key.startswith(NUMBERED),
        is_harsh=is_all,
        most_faults=1000 if is_all else MOST_FAULTS,
    )
    try:
        with simulation.world():
            (_play_lifetimes if is_all else _play_linear)(subject, simulation)
    except BaseException as error:
        history = "\n".join(simulation.trace)
        error.add_note(
            f"{history}\nTo repeat it: SEED={seed} python -m pytest "
            f"tests/linearizability/test_simulation.py -k {subject}"
        )
        raise
    for line in simulation.trace:
        show(line)
    return simulation.counts


def _play_linear(subject: str, simulation: Simulation) -> None:
    name = f"round-{simulation.seed}"
    keys = prepare(subject, simulation.store(), name)

    def body(number: int) -> None:
        choose = random.Random(f"{simulation.seed} {number}")
        actor = SUBJECTS[subject].Actor(
            simulation.store(), simulation.recorder(f"{number}"), choose, number
        )
        for _ in range(8):
            actor.act(keys)

    with mock.patch.object(claims, "DELETION_WAIT_SECONDS", 0):
        simulation.run(body, 4)
    for key in keys:
        check_by(SUBJECTS[subject], key, simulation.events(key))


def _play_lifetimes(subject: str, simulation: Simulation) -> None:
    judge = lifetimes.Judge(simulation)

    def body(number: int) -> None:
        choose = random.Random(f"{simulation.seed} {number}")
        actor = lifetimes.Actor(judge, choose, f"{number}")
        for _ in range(choose.choice((10, 25))):
            actor.act()

    simulation.run(body, 4)
    judge.check_end()
