"""The trace and the metrics of a trial that fails once, ends, and is continued. On real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from tests.support.driving import TRIAL, drive
from tests.support.fitting import fit_toys
from tests.support.flow import WarmForkServer, breaking
from tests.support.slots import toy_config
from tests.support.telemetry import MemoryMetrics, MemorySpans, Receiver, install_memory, points
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.observe.events.run_status import UPLOAD

pytestmark = [pytest.mark.slots, pytest.mark.long]  # test_run_telemetry has what runs export


@dataclass
class Told:
    """What was exported of a trial.

    Attributes:
        folder: of its runs.
        attempts: the spans of each attempt, in the order of their end.
        metrics: those of each attempt at its end.
        received: what a receiver got, over HTTP.
    """

    folder: Path
    attempts: list[list[ReadableSpan]]
    metrics: list[MetricsData]
    received: Receiver

    @property
    def spans(self) -> list[ReadableSpan]:
        return [span for attempt in self.attempts for span in attempt]

    def newest(self) -> Manifest:
        config = toy_config(self.folder)
        newest = CheckpointStore(config.checkpoint_storage.url).newest(TRIAL)
        assert newest is not None
        return newest

    def named(self, attempt: int, name: str) -> list[ReadableSpan]:
        return [span for span in self.attempts[attempt] if span.name == name]

    def values(self, attempt: int, metric: str) -> list[Any]:
        """The values of a metric, by what its points have beside trial and experiment."""
        return [
            ([each for name, each in point.attributes.items()
              if name not in ("trialflow.trial", "trialflow.experiment")],
             point.sum if hasattr(point, "sum") else point.value)
            for point in points(self.metrics[attempt])[metric]
        ]  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """A trial of 2 ranks: one raises in batch 5 of 8, and a second run trains up to batch 11."""
    folder = tmp_path_factory.mktemp("told")
    install_memory(folder / "packages")
    told = Told(folder, [], [], Receiver())
    with pytest.MonkeyPatch.context() as patch, told.received.listening():
        patch.syspath_prepend(str(folder / "packages"))
        patch.setenv("TRIALFLOW_HOME", str(folder / "home"))
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", told.received.url)
        patch.setenv("OTEL_TRACES_EXPORTER", "memory,otlp")
        patch.setenv("OTEL_METRICS_EXPORTER", "memory,otlp")
        patch.setattr("trial_core.driver.placement.ForkServer", WarmForkServer)
        for batches in (8, 11):
            patch.setattr(MemorySpans, "ended", [])
            patch.setattr(MemoryMetrics, "exports", {})
            drive(toy_config(
                folder, batches, max_restarts=1, scheduling_unit=4,
                min_checkpoint_period={"batches": 4}, hyperparameters=breaking(folder, "raise", 5),
            ))  # fmt: skip
            told.attempts.append(MemorySpans.ended)
            told.metrics.extend(MemoryMetrics.exports.values())
        yield told


def details(spans: list[ReadableSpan]) -> list[Any]:
    return [dict(span.attributes or {}).get("trialflow.stage.detail") for span in spans]


def test_all_attempts_are_one_trace(told: Told) -> None:
    """The first attempt is the root; a later one is its child. They have their numbers."""
    assert len({span.context.trace_id for span in told.spans}) == 1
    (first,), (second,) = (told.named(index, "attempt") for index in range(2))
    assert [span for span in told.spans if span.parent is None] == [first]
    assert second.parent is not None
    assert second.parent.span_id == first.context.span_id
    seen = [dict(each.attributes or {}) for each in (first, second)]
    assert [each["trialflow.attempt"] for each in seen] == [1, 2]
    assert [each["trialflow.batches"] for each in seen] == [8, 11]
    assert {each["trialflow.trial"] for each in seen} == {TRIAL}


def test_every_span_has_its_parent_in_the_trace(told: Told) -> None:
    known = {span.context.span_id for span in told.spans}
    assert {span.parent.span_id for span in told.spans if span.parent is not None} <= known


def test_a_restart_is_an_event_and_another_launch(told: Told) -> None:
    """The launch that failed, and its stage, are errors that say why. The attempt is none.

    The checkpoint at 4 may be uploading when the rank breaks; its upload then fails as well.
    """
    failed, good = told.named(0, "launch")
    (attempt,) = told.named(0, "attempt")
    (event,) = [each for each in attempt.events if each.name == "restart"]
    facts = dict(event.attributes or {})
    assert (facts["trialflow.restart"], facts["trialflow.max_restarts"]) == (1, 1)
    assert "the toy was told to break" in str(facts["trialflow.reason"])
    assert failed.status.status_code is StatusCode.ERROR
    assert "the toy was told to break" in str(failed.status.description)
    assert good.status.is_unset
    assert attempt.status.is_unset
    broken = [
        each for each in told.attempts[0]
        if each.parent == failed.context and each.name != UPLOAD and not each.status.is_unset
    ]  # fmt: skip
    assert [each.name for each in broken] == ["train-workload"]
    assert [launch.parent for launch in (failed, good)] == [attempt.context] * 2
    assert dict(good.attributes or {})["trialflow.ranks"] == 2


def test_each_stage_is_a_span_and_a_batch_is_none(told: Told) -> None:
    """One for each workload, one for each upload with what it has committed."""
    assert details(told.named(1, "train-workload")) == ["[8→11]"]
    assert details(told.named(0, "train-workload"))[-1] == "[4→8]"
    uploads = told.named(1, "checkpoint-upload")
    assert details(uploads) == ["@11"]
    (committed,) = uploads[0].events
    newest = told.newest()
    assert dict(committed.attributes or {}) == {
        "trialflow.uuid": newest.uuid, "trialflow.batches": 11,
        "trialflow.bytes": newest.total_bytes,
    }  # fmt: skip
    names = {span.name for span in told.attempts[1]}
    assert {"build-trial", "fetch-checkpoint", "build-loaders", "validate"} <= names
    assert len(told.attempts[1]) < 20


def test_metrics_count_what_was_trained_and_name_the_rank(told: Told) -> None:
    """Batches that were lost and trained again count again."""
    ((_, batches),) = told.values(0, "trialflow.batches")
    ((_, samples),) = told.values(0, "trialflow.samples")
    # Trained again: what came after batch 4, or after 0 if its upload failed. The batch before the
    # failure may not have been told.
    assert batches in (8, 8 + 1, 8 + 4, 8 + 5)
    assert samples == (batches - batches % 4) * 4  # of train-workloads that have ended
    assert told.values(0, "trialflow.restarts") == [([], 1)]
    assert told.values(1, "trialflow.restarts") == [([], 0)]
    for metric in ("data_wait.time", "step.time", "forward_pass.duration"):
        ranks = told.values(1, f"trialflow.{metric}")
        assert [attributes for attributes, _ in ranks] == [[0], [1]]
        assert all(seconds > 0 for _, seconds in ranks)
    ((_, trained),) = told.values(1, "trialflow.train.duration")
    (_, step), (_, waited) = (
        told.values(1, f"trialflow.{each}")[0] for each in ("step.time", "data_wait.time")
    )
    assert trained >= waited
    assert step > 0


def test_metrics_have_stalls_uploads_and_the_trials_own_values(told: Told) -> None:
    for stage in ("validation", "checkpoint.stall", "upload"):
        ((_, seconds),) = told.values(1, f"trialflow.{stage}.duration")
        assert seconds > 0
    newest = told.newest()
    assert told.values(1, "trialflow.checkpoint.size") == [([], newest.total_bytes)]
    assert told.values(1, "trialflow.learning_rate")[0][0] == [0]
    training = {name: value for (name,), value in told.values(1, "trialflow.training.metric")}
    assert training["rank"] == 0.5
    buckets = {name for (name,), _ in told.values(1, "trialflow.slot.time")}
    assert {"launch", "build", "restore", "train", "checkpoint_stall"} <= buckets


def test_a_receiver_got_the_same_spans(told: Told) -> None:
    received = {int.from_bytes(span.span_id, "big") for span in told.received.spans}
    assert received == {span.context.span_id for span in told.spans}


def test_a_script_that_is_started_by_hand_has_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its driver beside rank 0, whose console exporter does not disturb rank 0."""
    with Receiver().listening() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp,console")
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp,console")
        fit = {"max_length": {"batches": 6}, "reporting_period": {"batches": 3}}
        fit_toys("torchrun", tmp_path, {"init": {}, "fit": fit}, ranks=1)
    names = [span.name for span in receiver.spans]
    assert names.count("train-workload") == 2
    assert names[-2:] == ["launch", "attempt"]
    assert "trialflow.train.duration" in receiver.metric_names
