"""`torch_batch_process`: each batch of a data set is processed, whatever stops the run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import TrialValueError
from trial_core.pytorch import DataLoader
from trial_core.pytorch.experimental import (
    BatchRun,
    TorchBatchProcessor,
    TorchBatchProcessorContext,
    torch_batch_process,
)


class Collect(TorchBatchProcessor):
    """Collects batches; writes each into a file, and raises at one, if the test says so."""

    seen: list[tuple[int, list[int]]] = []  # noqa: RUF012 - emptied by the tests
    raises_at: int | None = None
    calls: list[str] = []  # noqa: RUF012 - emptied by the tests

    def __init__(self, context: TorchBatchProcessorContext) -> None:
        self.context = context
        self.count = context.wrap_reducer(sum, name="samples")

    def process_batch(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.raises_at:
            raise ZeroDivisionError
        self.seen.append((batch_idx, batch.tolist()))
        self.count.update(len(batch))
        if self.context.__dict__.get("is_real"):
            with self.context.upload_path() as folder:
                (folder / f"{batch_idx}.txt").write_text(str(batch.tolist()))

    def on_checkpoint_start(self) -> None:
        self.calls.append("checkpoint")

    def on_finish(self) -> None:
        self.calls.append("finish")


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    Collect.seen, Collect.calls, Collect.raises_at = [], [], None


class RealCollect(Collect):
    """Stores its results, too."""

    def __init__(self, context: TorchBatchProcessorContext) -> None:
        super().__init__(context)
        self.context.is_real = True  # type: ignore[attr-defined]


def rank_of_a_run(rank: int, ranks: int, stored: dict[str, Any], rounds: int) -> Any:
    """A stand-in for the context of one rank, whose run is stopped after some rounds."""
    saved: list[dict[str, Any]] = []
    left = iter([False] * (rounds - 1) + [True])

    @contextmanager
    def store_path(metadata: dict[str, Any], shard: bool) -> Iterator[None]:
        saved.append(metadata)
        yield

    return SimpleNamespace(
        saved=saved,
        distributed=SimpleNamespace(
            get_rank=lambda: rank, get_size=lambda: ranks, allgather=lambda stuff: [stuff] * ranks
        ),
        info=SimpleNamespace(latest_checkpoint="0a" if stored else None),
        preempt=SimpleNamespace(should_preempt=lambda: next(left)),
        checkpoint=SimpleNamespace(get_metadata=lambda uuid: stored, store_path=store_path),
        train=SimpleNamespace(
            report_metrics=None, get_tensorboard_path=None, report_progress=lambda share: None,
            report_validation_metrics=lambda steps, metrics: None,
        ),
    )  # fmt: skip


def test_no_batch_is_left_out_or_processed_twice() -> None:
    """Over stops, and over changes of the number of slots."""
    samples: list[int] = []
    stored: dict[str, Any] = {}
    for ranks, rounds in ((2, 3), (3, 1), (2, 1), (1, 99)):
        runs = [rank_of_a_run(rank, ranks, stored, rounds) for rank in range(ranks)]
        for each in runs:
            Collect.seen = []
            loader = DataLoader(range(27), batch_size=2)  # type: ignore[arg-type]
            BatchRun(each, Collect, loader).run(interval=2)
            samples += [sample for _, batch in Collect.seen for sample in batch]
        assert len({str(each.saved[-1]) for each in runs}) == 1
        stored = runs[0].saved[-1]
        assert sorted(samples) == list(range(min(27, 2 * stored["batches_done"])))
    assert stored == {"steps_completed": 14, "batches_done": 14}
    assert Collect.calls.count("finish") == 1


@pytest.mark.parametrize(("most", "expected"), [(2, 4), (0, 7), (9, 7)])
def test_there_may_be_fewer_batches(most: int, expected: int) -> None:
    """`max_batches` is of each rank."""
    for rank in (0, 1):
        each = rank_of_a_run(rank, 2, {}, 99)
        loader = DataLoader(range(7))  # type: ignore[arg-type]
        BatchRun(each, Collect, loader, most).run(interval=5)
    assert len(Collect.seen) == expected


def test_a_script_that_fails_continues_where_it_stored_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are stored, and what a run has processed is reported."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DET_LATEST_CHECKPOINT", "latest")
    Collect.raises_at = 5
    with pytest.raises(ZeroDivisionError):
        torch_batch_process(RealCollect, range(15), batch_size=2, checkpoint_interval=2)
    assert [index for index, _ in Collect.seen] == [0, 1, 2, 3, 4]
    Collect.seen, Collect.raises_at = [], None
    torch_batch_process(RealCollect, range(15), batch_size=2, checkpoint_interval=2)
    assert [index for index, _ in Collect.seen] == [4, 5, 6, 7]
    assert Collect.calls == ["checkpoint"] * 4 + ["finish"]

    stored = CheckpointStore(str(tmp_path / "home" / "checkpoints"))
    last = stored.list()[-1]
    assert last.progress.batches_trained == 8
    assert last.metrics["validation"] == {"samples": 7}
    outputs = stored.storage.sizes(f"runs/{last.trial}/outputs/rank-0")
    assert sorted(map(os.path.basename, outputs)) == [f"{index}.txt" for index in range(8)]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"dataloader_kwargs": {"shuffle": True}}, "has no shuffle, sampler"),
        ({"batch_size": 2, "dataloader_kwargs": {"batch_size": 3}}, "batch_size is given once"),
        ({"checkpoint_interval": 0}, r"of at least 1; got range and 0"),
    ],
)
def test_arguments_are_checked_before_the_run(arguments: dict[str, Any], error: str) -> None:
    """A mistake costs no start."""
    with pytest.raises(TrialValueError, match=error):
        torch_batch_process(Collect, range(3), **arguments)
