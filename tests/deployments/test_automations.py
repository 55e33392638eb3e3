"""What the automations wait for, by what Prefect's server does with it."""

from __future__ import annotations

import pytest
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger

from trialflow.deployments.desired_state import CRASHED_RUNS_GO_ON, automations

ALL = {each.name: each for each in automations(["local"])}
each_automation = pytest.mark.parametrize("automation", ALL.values(), ids=ALL)


def trigger(automation: AutomationCore) -> EventTrigger:
    assert isinstance(automation.trigger, EventTrigger)
    return automation.trigger


def may_be_overlooked(automation: AutomationCore) -> set[str]:
    """Events that the server, on SQLite, gives up while others write: it reads before it counts
    them. All that is counted for other triggers is given up with them."""
    awaited = trigger(automation)
    return awaited.expect - awaited.after if awaited.after else set()


@each_automation
def test_no_crash_is_overlooked(automation: AutomationCore) -> None:
    """Nor that a run is Running: what follows on an event that was given up waits for minutes."""
    overlooked = may_be_overlooked(automation)
    assert "prefect.flow-run.Crashed" not in overlooked
    assert "prefect.flow-run.Running" not in overlooked or automation.name == CRASHED_RUNS_GO_ON


@each_automation
def test_none_sets_itself_off(automation: AutomationCore) -> None:
    """What it brings about comes before the server has noted that it has fired."""
    (action,) = automation.actions
    assert isinstance(action, ChangeFlowRunState)
    assert f"prefect.flow-run.{action.name}" not in trigger(automation).expect


@each_automation
def test_no_run_that_has_ended_is_started(automation: AutomationCore) -> None:
    """What happens because the news of it were overlooked, the server refuses: only a run that has
    crashed is put back into its queue by force."""
    (action,) = automation.actions
    assert isinstance(action, ChangeFlowRunState)
    if action.force:
        events = trigger(automation).after or trigger(automation).expect
        assert events <= {"prefect.flow-run.Crashed", "prefect.flow-run.StartLost"}
