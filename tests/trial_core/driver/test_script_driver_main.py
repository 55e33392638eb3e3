"""The driver of a script whose ranks another program has started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trial_core.driver import script_driver_main
from trial_core.driver.script_driver_main import ForwardedLog, JoiningRanks
from trial_core.driver.script_order import Order
from trial_core.errors import LaunchError
from trial_core.processes.slots.addresses import ListenAddress
from trial_core.processes.slots.launcher import LaunchRequest


def test_ranks_of_a_script_are_not_launched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second launch fails at once: the driver would wait for ranks that have left."""
    monkeypatch.setattr(script_driver_main, "_answer", lambda message: None)
    order = Order(experiment={}, new_trial="toy-0a", world_size=2, has_other_machines=False)
    ranks = JoiningRanks(order, ListenAddress(), ForwardedLog())
    nothing: Any = None
    request = LaunchRequest(2, tmp_path, tmp_path, {}, nothing, nothing)
    size, launcher = ranks.prepare(nothing)
    assert size == 2
    launcher(request, []).close()
    with pytest.raises(LaunchError, match="cannot be started again"):
        ranks.prepare(nothing)[1](request, [])
