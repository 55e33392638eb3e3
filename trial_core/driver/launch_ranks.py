"""Launches the ranks of a run, and passes stop requests on to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trial_core.driver.placement import Placement
from trial_core.driver.run import Launch
from trial_core.processes.slots.slot_group import SlotGroup


def launch_slots(launch: Launch, placement: Placement) -> SlotGroup:
    """Launch the ranks. The result is a context manager that ends them."""
    run = launch.run
    launch.world_size, launcher = placement.prepare(launch)
    run.clock.has_slots(launch.world_size)
    return SlotGroup(
        launch.world_size,
        working_dir=launch.code.folder,
        log_dir=run.run_dir / "logs",
        environment={**run.config.rank_variables, **run.devices},
        launcher=launcher,
        on_batches=launch.note_batches,
        on_log=run.observer.rank_logged,
        on_activity=launch.note_activity,
        on_script=launch.script_events.put,
        on_stop_signal=run.stopping.ask,
        should_abort=lambda: run.stopping.request is not None,
    )


@contextmanager
def stopping_ranks(launch: Launch) -> Iterator[None]:
    """Pass stop requests on to the ranks during the block (step 4 of `stop_requests`)."""

    def stop() -> None:
        if launch.status.can_save:
            launch.slots.stop()
        else:
            launch.slots.abort("nothing to save: training had not begun")

    def end() -> None:
        launch.slots.abort("not saved: the grace period was over, or a second signal came")

    with launch.run.stopping.subscribed(stop, end):
        yield
