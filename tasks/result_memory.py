"""What Prefect remembers of results, for its arrows between tasks; forgotten now and then."""

from __future__ import annotations

from prefect.context import FlowRunContext


def forget_results() -> None:
    """Have Prefect forget which task has given which result so far. In the flow's thread.

    For as long as a flow runs it keeps the state of every result that a task has returned, by the
    result's address in memory, and a set of assets for every task run: so a run of many workloads
    would need ever more memory, and a number that happens to lie where an older one lay would get
    that one's arrow. Call it where no result from before is handed to a task any more.
    """
    context = FlowRunContext.get()
    if context is not None:
        context.run_results.clear()
        # Not in Prefect's first releases of version 3.
        getattr(context, "task_run_assets", {}).clear()
