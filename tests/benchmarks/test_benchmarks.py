"""That benchmarks run and end as promised; how fast anything is, no test says."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.all import ORDER
from benchmarks.figures import Estimate, conclude
from benchmarks.gpu import STATE_TARGETS, ranks_here
from tests.benchmarks.outcome import outcome_of
from tests.support.prefect import ROOT


@pytest.mark.long
@pytest.mark.slots
def test_the_loop_benchmark_ends_with_one_line_of_json() -> None:
    """A short run on a real rank prints figures, targets and whether they hold, last."""
    outcome = outcome_of("loop --ranks 1 --models tiny small --pairs 2 --batches 2 --builds 1")
    ours = "trialflow_pytorch_small_1_rank"
    assert outcome["targets"].keys() == {"ratio_small_1_rank", ours}
    assert {"ratio_small_1_rank", "added_us_tiny_1_rank", ours} <= outcome["figures"].keys()
    assert all(value != 0 for value in outcome["figures"].values())


def test_all_are_run() -> None:
    """`NAME=all` has every benchmark of the table in benchmarks/README.md, but that of GPUs."""
    table = (ROOT / "benchmarks" / "README.md").read_text()
    names = re.findall(r"^\| `(\w+)` \|.*\|.*\|$", table, re.MULTILINE)
    listed = {name for name in names if find_spec(f"benchmarks.{name}") is not None}
    assert {*ORDER} == listed - {"gpu", "all"}
    assert "gpu" in listed


@pytest.mark.long
@pytest.mark.slots
def test_all_keeps_a_line_of_each(tmp_path: Path) -> None:
    """With date, commit and figures; a second run adds its own."""
    history = tmp_path / "history.jsonl"
    command = [sys.executable, "-m", "benchmarks.all", "--only", "request", "--into", str(history)]
    for _ in range(2):
        subprocess.run(command, cwd=ROOT)  # whether targets hold is the machine's
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    assert [line["name"] for line in lines] == ["request", "request"]
    assert all(line["figures"] and line["date"] and line["commit"] for line in lines)


@pytest.mark.long
@pytest.mark.slots
def test_the_benchmark_of_loading_ends_with_one_line_of_json() -> None:
    """A rank of four has a quarter of a small model in the end, and some more meanwhile."""
    pytest.importorskip("accelerate", reason="transformers needs it to divide a model")
    outcome = outcome_of("pretrained --mib 100")
    assert outcome["targets"].keys() == {"peak_share"}
    figures = outcome["figures"]
    assert 0.2 < figures["kept_share"] < figures["peak_share"] < 0.6


@pytest.mark.long
@pytest.mark.slots
def test_the_benchmark_of_continuous_checkpoints_ends_with_one_line_of_json() -> None:
    """Each part has figures; a kill costs no more than was trained."""
    outcome = outcome_of(
        "continuous --server moto --model tiny --kills 2 --within 1 --pairs 1 --batches 40"
    )
    targets = {"lost_batches_median", "overhead_percent", "remote_overhead_percent"}
    assert outcome["targets"].keys() == targets
    figures = outcome["figures"]
    assert figures["remote_checkpoints_a_run"] > 1
    for case in ("", "throttled_"):
        assert figures[f"{case}checkpoints_a_run"] > 1
        assert 0 <= figures[f"{case}lost_batches_median"] <= figures[f"{case}lost_batches_most"]


def test_the_gpu_benchmark_refuses_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One plain line, instead of figures of the CPU."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(SystemExit) as refusal:
        ranks_here(on_cpu=False)
    (line,) = str(refusal.value).splitlines()
    assert line.startswith("benchmarks.gpu measures accelerators, and this machine has none")


@pytest.mark.long
@pytest.mark.slots
def test_the_gpu_benchmark_ends_with_one_line_of_json() -> None:
    """A short run, on CPU ranks, has a figure for every target."""
    outcome = outcome_of(
        "gpu --on-cpu --pairs 1 --batches 2 --state-mib 16 --turns 1 --samples 8 --passes 1"
    )
    loops = {"ratio_small_2_ranks", "trialflow_pytorch_small_2_ranks"}
    assert outcome["targets"].keys() == loops | STATE_TARGETS.keys() <= outcome["figures"].keys()
    may_be_less = ("added", "pinned")  # a difference, and what a CPU rank does not have
    figures = {n: v for n, v in outcome["figures"].items() if not n.startswith(may_be_less)}
    assert [name for name, value in figures.items() if value <= 0] == []


@pytest.mark.parametrize(("median_ms", "holds"), [(5.0, True), (5.1, False)])
def test_a_missed_target_is_told(
    capsys: pytest.CaptureFixture[str], median_ms: float, holds: bool
) -> None:
    """A figure over its target makes the benchmark say that targets do not hold; on it is fine."""
    conclude({"median_ms": median_ms, "other": 7.0}, {"median_ms": 5.0})
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["holds"] is holds


def test_the_interval_of_a_median_covers_it_19_times_in_20() -> None:
    """Of many samples of a skewed distribution, about 95 % give an interval around its median."""
    draw = random.Random(0)
    covered = 0
    for _ in range(1000):
        estimate = Estimate.of([draw.expovariate(1.0) for _ in range(30)])
        covered += estimate.low <= math.log(2) <= estimate.high
    assert 930 <= covered <= 990
