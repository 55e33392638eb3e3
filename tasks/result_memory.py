"""Limits the memory that Prefect uses to track task results."""

from __future__ import annotations

from prefect.context import FlowRunContext


def forget_results() -> None:
    """Make Prefect forget which task has returned which result. Call in the flow's thread.

    Prefect keeps the state of every task result while a flow runs, keyed by the result's address,
    and a set of assets per task run. So memory would grow with every workload, and a result at a
    reused address would get a wrong dependency arrow. Call this where no task takes an earlier
    result any more.
    """
    context = FlowRunContext.get()
    if context is not None:
        context.run_results.clear()
        # The first releases of Prefect 3 do not have it.
        getattr(context, "task_run_assets", {}).clear()
