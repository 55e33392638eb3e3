"""A user's script that fits toy trials one after the other: ``fit_toy.py SPEC``.

Started by python, torchrun or deepspeed. SPEC is a JSON file: a list of ``{"init": {…}, "fit":
{…}}``, with ``"trial": "module:Class"`` for another toy, and ``"package": "trial_core.pytorch"`` if
that is a PyTorchTrial. Every rank writes each run's result beside it, for example
``0-rank-1.json``. ``{"batches": …}`` and ``{"epochs": …}`` are lengths.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.support.processes import listening_beyond_loopback
from trial_core.errors import TrialflowError
from trial_core.pytorch import Batch, Epoch
from trial_core.rank.collectives.distributed import DistributedContext

sys.path.insert(0, str(Path(__file__).parents[1] / "toy"))


def argument(value: Any) -> Any:
    """An argument of fit, from JSON."""
    if not isinstance(value, dict):
        return value
    ((unit, length),) = value.items()
    return {"batches": Batch, "epochs": Epoch}[unit](length)


def fit(run: dict[str, Any]) -> dict[str, Any]:
    """Fit `run`; its result. A single rank adds where it then listens beyond loopback."""
    module, _, name = run.get("trial", "toy_trial:ToyTrial").partition(":")
    trial_class = getattr(importlib.import_module(module), name)
    package = importlib.import_module(run.get("package", "trial_core.deepspeed"))
    with package.init(**run["init"]) as context:
        trainer = package.Trainer(trial_class(context), context)
        result = trainer.fit(**{name: argument(value) for name, value in run["fit"].items()})
        outcome = asdict(result)
        if context.distributed.get_size() == 1:
            outcome["exposed"] = listening_beyond_loopback([os.getpid()])
        return outcome


def main(spec: Path) -> None:
    """Fit one run after the other."""
    for index, run in enumerate(json.loads(spec.read_text())):
        try:
            outcome = fit(run)
        except TrialflowError as error:
            outcome = {"error": f"{type(error).__name__}: {error}"}
        rank = DistributedContext.from_environment().rank
        spec.with_name(f"{index}-rank-{rank}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    # The last argument: launchers add others.
    main(Path(sys.argv[-1]))
