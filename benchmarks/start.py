"""Measures the time from `trialflow train` to the first batch, with a Prefect server and without.

In each round the command runs once without a server, so that it starts one, and once with a running
server. Also once, parallel processes import the libraries that no run can do without: Prefect's
client, Prefect's server, and PyTorch with DeepSpeed. In units of that time, the command's time
hardly depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from benchmarks.figures import Estimate, conclude
from benchmarks.ranks import experiment
from benchmarks.workload import temporary_homes

TARGETS = {"alone_in_imports": 1.8, "with_server_in_imports": 1.4}
IMPORTS = ("prefect.main", "prefect.server.api.server", "deepspeed")


def imports() -> float:
    """Return the seconds until all processes have imported."""
    began = time.time()
    processes = [subprocess.Popen([sys.executable, "-c", f"import {name}"]) for name in IMPORTS]
    if any(process.wait() for process in processes):
        raise RuntimeError("an import failed")
    return time.time() - began


def command(folder: Path, ranks: int, variables: Mapping[str, str]) -> float:
    """Return the seconds from the start of the command to the end of the first batch."""
    name = uuid.uuid4().hex[:8]
    record, file = folder / f"{name}.txt", folder / f"{name}.json"
    config = experiment(
        "benchmarks.stopping_trial:TimestampTrial", ranks, f"file://{folder}/{name}", name=name,
        hyperparameters={
            "model": "tiny", "bare_batches": 1, "record": str(record), "waits": False,
        },
        searcher={"name": "single", "metric": "seconds", "max_length": {"batches": 1}},
    )  # fmt: skip
    file.write_text(json.dumps(config.model_dump(mode="json", exclude_none=True)))
    began = time.time()
    subprocess.run(
        [str(Path(sys.executable).with_name("trialflow")), "train", str(file), "--quiet"],
        env={**os.environ, **variables}, stdout=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    return float(record.read_text().split()[0]) - began


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.start", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {"alone": [], "with_server": [], "imports": []}
    with temporary_homes() as folder:
        from trialflow.flows.server.embedded_server import prefect_api

        alone = {name: "" for name in os.environ if name.startswith("PREFECT_API_")}
        command(folder, arguments.ranks, alone)  # the files' cache, and Prefect's database
        for _ in range(arguments.rounds):
            seconds["imports"].append(imports())
            seconds["alone"].append(command(folder, arguments.ranks, alone))
            with prefect_api():
                seconds["with_server"].append(command(folder, arguments.ranks, {}))
            print(
                ", ".join(f"{name} {each[-1]:.2f} s" for name, each in seconds.items()), flush=True
            )
    figures: dict[str, float] = {}
    for name, measured in seconds.items():
        figures[f"{name}_seconds"] = Estimate.of(measured).median
    for name in ("alone", "with_server"):
        pairs = zip(seconds[name], seconds["imports"], strict=True)
        ratio = Estimate.of([ours / unit for ours, unit in pairs])
        figures[f"{name}_in_imports"] = ratio.median
        print(f"{name}: {ratio.shown(2)} times the imports")
    conclude(figures, TARGETS)


if __name__ == "__main__":
    main()
