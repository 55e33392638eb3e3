"""The state of a stopped flow run, from the facts alone. test_stop_monitor has it on a server."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from prefect.client.schemas.objects import StateType

from trialflow.flows.lifecycle.final_state import Step, StoppedRun, steps_to_end

DEPLOYED = StoppedRun("preempted", StateType.RUNNING, is_deployed=True, has_queue=True)
LOCAL = StoppedRun("interrupted", StateType.RUNNING, has_signal=True)
SUBFLOW = replace(LOCAL, is_subflow=True)
TRIES = ([], [Step.REQUEUE], [Step.END_BY_SIGNAL], [Step.REQUEUE, Step.END_BY_SIGNAL])


@pytest.mark.parametrize(
    ("run", "steps"),
    [
        (replace(DEPLOYED, has_other_attempt=True), [Step.LEAVE_TO_OTHER_ATTEMPT]),
        (replace(DEPLOYED, state=StateType.PAUSED), [Step.HOLD_PAUSE]),
        (replace(LOCAL, state=StateType.PAUSED), [Step.CANCEL_UNRESUMABLE]),
        (replace(SUBFLOW, state=StateType.PAUSED), [Step.HOLD_PAUSE]),
        (replace(DEPLOYED, is_suspended=True), [Step.SUSPEND]),
        (replace(LOCAL, is_suspended=True), [Step.SUSPEND]),
        (replace(SUBFLOW, is_suspended=True), [Step.SUSPEND_WITH_PARENT]),
        (replace(SUBFLOW, is_deployed=True, is_suspended=True), [Step.SUSPEND]),
        (replace(DEPLOYED, reason="suspended", state=StateType.SCHEDULED), [Step.KEEP_STATE]),
        (replace(SUBFLOW, reason="suspended", ends_with_parent=True), [Step.SUSPEND_WITH_PARENT]),
        (replace(DEPLOYED, state=StateType.CANCELLING), [Step.CANCEL]),
        (replace(DEPLOYED, reason="time budget"), [Step.LEAVE_TO_PREFECT]),
        (replace(DEPLOYED, state=StateType.CRASHED), [Step.KEEP_STATE]),
        (replace(SUBFLOW, ends_with_parent=True), [Step.END_BY_SIGNAL, Step.CANCEL]),
        (replace(SUBFLOW, ends_with_parent=True, has_signal=False), [Step.CANCEL]),
        (replace(SUBFLOW, is_in_main_thread=False), [Step.CANCEL]),
        (SUBFLOW, [Step.END_BY_SIGNAL, Step.KEEP_STATE]),
        (DEPLOYED, [Step.REQUEUE, Step.KEEP_STATE]),
        (replace(DEPLOYED, is_in_main_thread=False), [Step.REQUEUE, Step.KEEP_STATE]),
        (
            replace(DEPLOYED, has_signal=True),
            [Step.REQUEUE, Step.END_BY_SIGNAL, Step.KEEP_STATE],
        ),
        (replace(DEPLOYED, reason="cancelled"), [Step.KEEP_STATE]),
        (replace(DEPLOYED, reason="server lost"), [Step.REQUEUE, Step.CANCEL]),
        (replace(DEPLOYED, reason="server lost", state=None), [Step.KEEP_STATE]),
        (replace(LOCAL, reason="server lost", has_signal=False), [Step.CANCEL]),
        (LOCAL, [Step.END_BY_SIGNAL, Step.KEEP_STATE]),
        (replace(LOCAL, state=None, has_signal=False), [Step.KEEP_STATE]),
    ],
)  # fmt: skip
def test_the_steps_that_end_a_stopped_run(run: StoppedRun, steps: list[Step]) -> None:
    assert [*steps_to_end(run)] == steps


def test_every_stopped_run_ends() -> None:
    """By one step that cannot fail, whatever is known of it."""
    flags = ("has_other_attempt", "is_deployed", "is_subflow", "is_suspended", "ends_with_parent",
             "is_in_main_thread", "has_signal", "has_queue")  # fmt: skip
    reasons: Any = ("cancelled", "suspended", "preempted", "time budget", "server lost")
    for values in product((False, True), repeat=len(flags)):
        for reason, state in product(reasons, (None, *StateType)):
            run = StoppedRun(reason, state, **dict(zip(flags, values, strict=True)))
            *tried, last = steps_to_end(run)
            assert tried in TRIES, run
            assert last not in (Step.REQUEUE, Step.END_BY_SIGNAL), run
