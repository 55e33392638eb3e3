"""The throughput of runs: its arithmetic, and that all places show the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.driving import TRIAL, drive
from tests.support.slots import toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.common.decoding import decode
from trial_core.config import ExperimentConfig
from trial_core.driver.result import TrialResult
from trial_core.errors import ConfigError, RankFailed
from trial_core.observe.events.observers import Observer, WorkloadTimes
from trial_core.observe.events.throughput import Throughput, ThroughputMeter, peak_flops
from trial_core.observe.report.history import ReportHistory
from trial_core.schedule.work import Work
from trialflow.deployments.cli.json_result import JsonResult
from trialflow.deployments.cli.train import _summary

H100 = "NVIDIA H100 80GB HBM3"
GIB = 2**30


class Measured(Observer):
    """Notes each measurement: batches, the workload's, the run's; and each workload's samples."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, Throughput, Throughput]] = []
        self.samples: list[int] = []

    def training_timed(self, timed: WorkloadTimes) -> None:
        self.samples.append(timed.samples)

    def throughput_measured(self, batches: int, now: Throughput, whole_run: Throughput) -> None:
        self.seen.append((batches, now, whole_run))


@pytest.fixture
def here(warm_home: Path) -> Path:
    return warm_home


def config(folder: Path, entrypoint: str, batches: int = 10, **hparams: Any) -> ExperimentConfig:
    return toy_config(
        folder, batches, entrypoint=entrypoint, scheduling_unit=5, hyperparameters=hparams,
        resources={"slots_per_trial": 2, "peak_flops": 1e9},
    )  # fmt: skip


# ------------------------------------------------------------------------------ arithmetic


def test_a_run_is_the_sum_of_its_workloads() -> None:
    """Not the mean of their speeds. The memory is that of the last launch's ranks."""
    meter, work = ThroughputMeter(), Work(samples=8, tokens=80, flops=1e15)
    now, _ = meter.measured(10, 2.0, work.times(10), [H100, H100], [3 * GIB, 5 * GIB])
    later, run = meter.measured(30, 3.0, work.times(30), [H100, H100], [4 * GIB, 2 * GIB])
    assert (now.samples_per_second, later.samples_per_second) == (40, 80)
    assert (run.batches_per_second, run.samples_per_second, run.tokens_per_second) == (8, 64, 640)
    assert run.mfu == pytest.approx(8 * 1e15 / (2 * 989.5e12))
    assert (run.peak_memory_bytes, run.peak_rank) == ((4 * GIB, 2 * GIB), 0)
    assert Throughput.from_json(run.to_json()) == run


def test_what_is_known_late_counts_from_then_on() -> None:
    """As FLOPs that a profiler measures in the second workload."""
    meter = ThroughputMeter(peak_flops=100.0)
    first, _ = meter.measured(10, 7.0, Work(samples=20), [""])
    _, run = meter.measured(10, 4.0, Work(samples=20, flops=200), [""])
    assert first.mfu is None
    assert run.mfu == 10 * 20 / (4 * 100)
    assert run.samples_per_second == 40 / 11


@pytest.mark.parametrize(
    ("device", "number_type", "tera"),
    [
        (H100, "bf16", 989.5),
        (H100, "tf32", 494.5),
        ("NVIDIA H100 PCIe", "fp16", 756.5),
        ("NVIDIA H200", "bf16", 989.5),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA GH200 480GB", "fp32", 67),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "tf32", None),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("GRID A100-10C", "bf16", None),
        ("NVIDIA A40-8Q", "bf16", None),
        ("NVIDIA Unheard 9000", "bf16", None),
        ("", "bf16", None),
    ],
)
def test_the_peak_of_a_device(device: str, number_type: Any, tera: float | None) -> None:
    """By the name that torch gives it. None is claimed of a part of a device."""
    assert peak_flops(device, number_type) == (None if tera is None else tera * 1e12)


def test_no_utilisation_without_a_known_peak() -> None:
    """On the CPU, or if one rank's device is unknown; the experiment's peak counts for all."""
    for devices in ([""], [H100, "NVIDIA Unheard 9000"]):
        work = Work(samples=1, flops=1e12)
        assert ThroughputMeter().measured(1, 1.0, work, devices)[0].mfu is None
        assert ThroughputMeter(4e12).measured(1, 1.0, work, devices)[0].mfu == 0.25 / len(devices)


def test_the_line_that_people_compare() -> None:
    """As far as it is known; in batches, if the samples of a batch are unknown."""
    known = Throughput(51.5, 412.0, 105_472.0, 0.384, (60 * GIB, 61 * GIB + GIB // 4))
    assert str(known) == "412 samples/s · 105k tokens/s · 38 % MFU · 61.2 GiB"
    assert known.memory == "61.2 GiB on rank 1"
    assert str(known.at(51.5 / 2)) == "206 samples/s · 52.7k tokens/s · 19 % MFU · 61.2 GiB"
    assert str(Throughput(2.5)) == "2.5 batches/s"
    assert str(Throughput(2.5, None, 1_250_000.0)) == "2.5 batches/s · 1.2M tokens/s"
    assert str(Throughput(2.5, 5.0, 500.0, 0.042)) == "5.0 samples/s · 500 tokens/s · 4.2 % MFU"
    assert str(Throughput()) == ""


# -------------------------------------------------------------------------------- real runs


@pytest.mark.slots
def test_result_report_and_json_agree(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens and FLOPs are as many a sample as the trial says, in all places. Samples are those
    that ranks got: of 3, a batch of 4 has 2 on one rank and 1 on the other."""
    observer, work = Measured(), {"tokens": 32, "flops": 250_000, "number_type": "fp32"}
    of = config(here, "throughput_trials:Says", work=work, train_samples=3)
    with JsonResult(is_printed=True) as outcome:
        result = drive(of, observer=observer)
        outcome.completed(result)
    assert observer.samples == [15, 15]
    saved = CheckpointStore(of.checkpoint_storage.url).list(TRIAL)[-1]
    assert saved.progress.batches_trained * 4 + saved.progress.extra_samples == 30
    assert [batches for batches, _, _ in observer.seen] == [5, 10]
    for _, *both in observer.seen:
        for each in both:
            assert each.samples_per_second == pytest.approx(3 * _known(each.batches_per_second))
            assert each.tokens_per_second == pytest.approx(32 * _known(each.samples_per_second))
            flops = 250_000 * _known(each.samples_per_second)
            assert each.mfu == pytest.approx(flops / (2 * 1e9))
            assert len(each.peak_memory_bytes) == 2
            assert min(each.peak_memory_bytes) > 2**20
    run = observer.seen[-1][2]
    assert result.throughput == run.to_json()
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["throughput"] == result.throughput
    summary = "\n".join(_summary(result, 1.0, None, "--resume"))
    report = _report(result)
    for shown in (run.speed, run.memory):
        assert shown in summary
        assert shown in report
    assert "tokens/s" in run.speed
    assert "MFU" in run.speed
    stored = Path(_known(result.report_path)).with_name("report.json").read_bytes()
    points = decode(stored, ReportHistory).curves["speed"]
    assert [(each.batches, each.values["tokens/s"]) for each in points] == [
        (batches, now.tokens_per_second) for batches, now, _ in observer.seen
    ]


@pytest.mark.slots
@pytest.mark.long
def test_nothing_is_claimed_of_a_trial_that_says_nothing(here: Path) -> None:
    """Its samples and its memory are known; neither tokens nor the utilisation."""
    result = drive(config(here, "toy_trial:ToyTrial"))
    run = Throughput.from_json(result.throughput)
    assert (run.tokens_per_second, run.mfu) == (None, None)
    assert _known(run.samples_per_second) == pytest.approx(4 * _known(run.batches_per_second))
    assert len(run.peak_memory_bytes) == 2
    assert "tokens/s" not in _report(result)


@pytest.mark.slots
@pytest.mark.long
def test_a_trial_that_says_nonsense_is_refused(here: Path) -> None:
    """The error is the trial's own, with what it said."""
    with pytest.raises(RankFailed, match="set_work_per_sample: tokens is a positive, finite"):
        drive(config(here, "throughput_trials:Says", work={"tokens": -3}))


@pytest.mark.slots
@pytest.mark.long
def test_a_trial_may_say_another_number_later(here: Path) -> None:
    """A train-workload counts with what was said last in it."""
    observer = Measured()
    of = config(here, "throughput_trials:SaysMoreLater", global_batch_size=4)
    drive(of, observer=observer)
    ratios = [_known(now.tokens_per_second) / _known(now.samples_per_second)
              for _, now, _ in observer.seen]  # fmt: skip
    assert ratios == pytest.approx([8, 24])


@pytest.mark.long
@pytest.mark.slots
def test_a_core_api_script_says_what_a_step_holds(here: Path) -> None:
    """Measured between its reports; the steps before a validation do not count."""
    observer = Measured()
    result = drive(config(here, "python3 throughput_script.py", 9), observer=observer)
    assert [batches for batches, _, _ in observer.seen] == [3, 6, 9]
    run = Throughput.from_json(result.throughput)
    speed = _known(run.batches_per_second)
    assert (run.samples_per_second, run.tokens_per_second) == pytest.approx((4 * speed, 40 * speed))
    assert run.mfu == pytest.approx(1e3 * speed / (2 * 1e9))
    assert len(run.peak_memory_bytes) == 2
    assert min(run.peak_memory_bytes) > 2**20


@pytest.mark.long
@pytest.mark.slots
@pytest.mark.parametrize("freezes", [False, True])
def test_flops_of_deepspeeds_profiler(here: Path, freezes: bool) -> None:
    """Known from the workload in which it measures; not of a model with frozen weights."""
    observer = Measured()
    entrypoint = "throughput_trials:Profiled"
    of = config(here, entrypoint, 4, freezes=freezes, micro_batch_size=4, accumulation=2)
    drive(of.model_copy(update={"scheduling_unit": 2}), observer=observer)
    first, second = (now for _, now, _ in observer.seen)
    assert first.mfu is None
    if freezes:
        assert second.mfu is None
        return
    # Forward: two layers of 2 * 16 multiplications and additions; backward: twice that.
    flops_per_sample = 3 * 2 * (2 * 2 * 16)
    samples = _known(second.samples_per_second)
    assert second.mfu == pytest.approx(flops_per_sample * samples / (2 * 1e9))


@pytest.mark.slots
@pytest.mark.long
def test_a_run_counts_what_it_has_trained_before_a_restart(here: Path) -> None:
    """Its batches took time, too; the peaks of memory are those of the new ranks."""
    of = config(
        here, "throughput_trials:Says", work={"tokens": 32}, do="raise", at_batch=7,
        once=str(here / "once"),
    )  # fmt: skip
    observer = Measured()
    result = drive(of.model_copy(update={"max_restarts": 1}), observer=observer)
    assert [batches for batches, _, _ in observer.seen] == [5, 5, 10]
    assert result.throughput == observer.seen[-1][2].to_json()


@pytest.mark.parametrize("value", [0, -1e12, float("nan"), "fast"])
def test_a_peak_that_is_none_is_refused(tmp_path: Path, value: Any) -> None:
    """The error names the setting."""
    of = toy_config(tmp_path).model_dump(mode="json")
    of["resources"]["peak_flops"] = value
    with pytest.raises(ConfigError, match=r"resources\.peak_flops"):
        ExperimentConfig.from_mapping(of)


def test_a_peak_changes_no_digest(tmp_path: Path) -> None:
    """It says what the machine can do, not what is trained. YAML reads 1e15 as text."""
    plain = toy_config(tmp_path)
    fast = toy_config(tmp_path, resources={"slots_per_trial": 2, "peak_flops": "1e15"})
    assert fast.resources.peak_flops == 1e15
    assert fast.digest() == plain.digest()


def _known(value: Any) -> Any:
    assert value is not None
    return value


def _report(result: TrialResult) -> str:
    return Path(_known(result.report_path)).read_text()
