"""Every night: prepare the day's data, train twice, and let the better one be the champion.

python nightly.py                # once, now
python nightly.py --serve        # every night at three, until Ctrl-C
"""

from __future__ import annotations

import sys
from datetime import date, datetime, timezone
from pathlib import Path

import numpy as np
from prefect import flow, task

import trialflow
from trialflow import EvaluateResult, evaluate, export, load_config, promote, train

HERE = Path(__file__).parent
MODEL = "demand"
WORST_LOSS = 0.1
HOURS = 24 * 60


@task
def prepare(day: str) -> str:
    """Write the hours before a day to a file: the time, the temperature and the demand.

    Stands for a query of yours. The same day gives the same file.
    """
    target = HERE / "data" / f"{day}.npz"
    target.parent.mkdir(exist_ok=True)
    random = np.random.default_rng(date.fromisoformat(day).toordinal())
    hours = np.arange(HOURS)
    temperature = 12 + 8 * np.sin(hours / 24 * 2 * np.pi) + random.normal(0, 2, HOURS)
    demand = 1 + 0.04 * (20 - temperature) + 0.4 * np.sin((hours - 6) / 12 * 2 * np.pi)
    demand += random.normal(0, 0.1, HOURS)
    features = np.stack([hours % 24 / 24, temperature / 40], axis=1)
    np.savez(target, features=features.astype("float32"), demand=demand.astype("float32"))
    return str(target)


def accepted(result: EvaluateResult) -> bool:
    """The gate: a rule of your own."""
    return bool(result.metrics["loss"] < WORST_LOSS)


@flow(log_prints=True)
def nightly(day: str | None = None) -> str | None:
    """Train on the hours before a day; the exported file, or None if no model was good enough.

    Args:
        day: in ISO format; default: today.
    """
    day = day or datetime.now(timezone.utc).date().isoformat()
    data = prepare(day)
    runs = [
        train(load_config(HERE / "experiment.yaml", {"hyperparameters.lr": lr, "data.file": data}))
        for lr in (1e-2, 1e-3)
    ]
    best = min(runs, key=lambda run: run.validation_metrics["loss"])
    if not accepted(evaluate(best)):
        print(f"no model of {day} is good enough; the champion stays")
        return None
    move = promote(best, MODEL, why=f"trained on the hours before {day}")
    written = export(best, HERE / "models" / f"{day}.safetensors")
    print(f"version {move.champion} of {MODEL} is the champion; its weights are in {written.path}")
    return str(written.path)


@trialflow.server()
def main() -> None:
    """Run the flow once."""
    nightly()


if __name__ == "__main__":
    if "--serve" in sys.argv:
        nightly.serve(name="nightly", cron="0 3 * * *", pause_on_shutdown=False)
    else:
        main()
