"""Names of flow runs, by which people tell the runs of one experiment apart."""

from __future__ import annotations

from prefect.context import FlowRunContext

from trial_core.run.run_dirs import trial_id


def train_name() -> str:
    """The trial's id: ``mine-4f0c21aa93b7``."""
    context = FlowRunContext.get()
    trial = (context.parameters or {}).get("trial") if context else None
    return str(trial or _with_id(""))


def evaluate_name() -> str:
    """``mine-evaluation-4f0c21aa93b7``, as the run's folder."""
    return _with_id(" evaluation")


def retrain_name() -> str:
    """``retrain mine-4f0c21aa93b7``, with the id of the challenger's trial."""
    return f"retrain {_with_id('')}"


def _with_id(kind: str) -> str:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.parameters is None:
        raise RuntimeError("Prefect asked for a flow run's name outside of its context")
    return trial_id(f"{context.parameters['config'].name}{kind}", str(context.flow_run.id))
