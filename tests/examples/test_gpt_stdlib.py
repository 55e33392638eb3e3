"""The parts of the GPT example that need no ranks: text, split, baselines and model."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from datetime import date, datetime, timezone
from pathlib import Path

import pytest
import torch
from prefect.client.schemas.schedules import CronSchedule

from trial_core.config import load_config
from trial_core.models.data_templates import render_data
from trialflow.deployments.retraining import retraining_requests

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt_stdlib"
sys.path.insert(0, str(EXAMPLE))  # as a rank does with the folder of its trial

from data import (  # noqa: E402
    Days,
    Text,
    Windows,
    baselines,
    is_for_validation,
    load_text,
    source_files,
    standard_library,
)
from model import GPT, GPTConfig, next_byte_loss  # noqa: E402

SHAPE = GPTConfig(layers=2, heads=2, width=32, window=16)


@pytest.fixture(scope="module")
def text() -> Text:
    return load_text()


@pytest.fixture
def model() -> Iterator[GPT]:
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads are slower with such small matrices
    yield GPT(SHAPE).eval()
    torch.set_num_threads(threads)


def some_bytes(sequences: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(256, (sequences, SHAPE.window), generator=generator)


@pytest.mark.long
def test_every_file_is_either_for_training_or_for_validation(text: Text) -> None:
    """The two texts together contain all files, each once."""
    root = standard_library()
    sizes = {False: 0, True: 0}
    for path in source_files(root):
        sizes[is_for_validation(path)] += (root / path).stat().st_size
    assert sizes == {False: len(text.training), True: len(text.validation)}


def test_about_a_tenth_of_the_files_is_for_validation() -> None:
    """Neither text is nearly empty."""
    files = source_files(standard_library())
    assert 0.05 < sum(map(is_for_validation, files)) / len(files) < 0.2


def test_the_split_of_a_file_never_changes() -> None:
    """It depends only on the path."""
    sides = {name: is_for_validation(Path(name)) for name in ("ast.py", "json/decoder.py")}
    assert sides == {"ast.py": True, "json/decoder.py": False}


def test_source_files_are_sorted_relative_paths(tmp_path: Path) -> None:
    """Tests and installed packages are left out."""
    for name in ("b.py", "a/c.py", "test/d.py", "a/tests/e.py", "site-packages/f.py", "g.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert source_files(tmp_path) == [Path("a/c.py"), Path("b.py")]


def test_a_library_without_source_is_refused_with_advice(tmp_path: Path) -> None:
    """The error names the folder, and what to do."""
    with pytest.raises(FileNotFoundError, match=f"found 0 .* in {tmp_path}.*use a Python"):
        load_text(tmp_path)


def test_each_day_replaces_the_files_of_one_day_of_the_window() -> None:
    """The files of a window depend only on the day; after the last file follows the first."""
    files = [Path(f"{index:03}.py") for index in range(64)]
    today, tomorrow = (Days(date(2026, 11, day), 3, 10).select(files) for day in (21, 22))
    assert len(set(today)) == 30
    assert today[10:] == tomorrow[:-10]
    assert set(today).isdisjoint(tomorrow[-10:])
    assert Days(date(2026, 11, 21), 3, 10).select(files) == today
    every_day = {f for day in range(1, 29) for f in Days(date(2026, 2, day), 1, 10).select(files)}
    assert every_day == set(files)
    assert sorted(Days(date(2026, 11, 21), 9, 10).select(files)) == files


@pytest.mark.long
def test_the_experiment_chooses_the_days(text: Text) -> None:
    """Without days, all files are used; a template without a value is refused."""
    assert Days.from_config({}) is None
    window = {"window_end": "2026-11-21", "window_days": 15, "files_per_day": 10}
    days = Days.from_config(window)
    assert days == Days(date(2026, 11, 21), 15, 10)
    some = load_text(days=days)
    assert 100_000 < len(some.training) < len(text.training) / 2
    with pytest.raises(ValueError, match=r"expected a day such as .* --set data\.window_end="):
        Days.from_config({**window, "window_end": "{{ scheduled_time.date() }}"})


def test_the_daily_experiment_trains_the_same_model_on_its_days() -> None:
    """The window ends on the day for which the run is scheduled; Prefect accepts the schedule."""
    daily, once = (load_config(EXAMPLE / name) for name in ("daily.yaml", "experiment.yaml"))
    assert daily.hyperparameters == once.hyperparameters
    at_three = datetime(2026, 11, 21, 2, tzinfo=timezone.utc)
    days = Days.from_config(render_data(daily.data, at_three))
    assert days == Days(date(2026, 11, 21), 15, 10)
    (asked,) = retraining_requests({EXAMPLE / "daily.yaml": daily})
    assert (asked.model, asked.on_data_arrived) == ("gpt-daily", True)
    assert asked.schedule == CronSchedule(cron="0 3 * * *", timezone="Europe/Berlin")


def test_each_byte_but_the_first_is_a_target_once() -> None:
    """Windows neither skip nor repeat a byte."""
    text = torch.arange(1 + 5 * 4, dtype=torch.uint8)
    windows = Windows(text, 4)
    assert torch.cat([windows[i][1:] for i in range(len(windows))]).tolist() == text[1:].tolist()


def test_a_limited_selection_of_windows_spans_the_text() -> None:
    """The windows are spaced evenly, so that they come from many files."""
    windows = Windows(torch.arange(101, dtype=torch.uint8), 10, limit=3)
    assert [int(windows[i][0]) for i in range(len(windows))] == [0, 30, 60]


def test_a_text_shorter_than_a_window_is_refused() -> None:
    """The error names both lengths."""
    with pytest.raises(ValueError, match="8 bytes is too short for a window of 8 bytes"):
        Windows(torch.zeros(8, dtype=torch.uint8), 8)


@pytest.mark.long
def test_baselines_of_the_real_text_are_plausible(text: Text) -> None:
    """The previous byte helps, and source code is far from random bytes."""
    counted = baselines(text.training, Windows(text.validation, 128))
    assert 2 < counted.bigram < counted.unigram < 6


def test_baselines_of_a_text_that_alternates() -> None:
    """Two alternating bytes: one bit without context, nearly 0 with the previous byte."""
    text = torch.tensor([7, 9] * 50_000 + [7], dtype=torch.uint8)
    counted = baselines(text, Windows(text, 10))
    assert counted.unigram == pytest.approx(1)
    assert counted.bigram == pytest.approx(math.log2(50_256 / 50_001))  # add-one smoothing


def test_the_untrained_model_finds_all_bytes_about_equally_likely(model: GPT) -> None:
    """The first loss is that of a random guess among 256."""
    inputs = some_bytes()
    loss = next_byte_loss(model(inputs), inputs.flip(0))
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


@torch.no_grad()
def test_a_later_byte_changes_no_earlier_prediction(model: GPT) -> None:
    """The model is causal; later predictions do change."""
    inputs = some_bytes()
    changed = inputs.clone()
    changed[:, 9] ^= 255
    before, after = model(inputs), model(changed)
    torch.testing.assert_close(after[:, :9], before[:, :9])
    assert not torch.allclose(after[:, 9:], before[:, 9:])


@torch.no_grad()
def test_the_order_of_earlier_bytes_matters(model: GPT) -> None:
    """The model uses positions."""
    inputs = some_bytes(1)
    swapped = inputs[:, [1, 0, *range(2, SHAPE.window)]]
    assert not torch.allclose(model(swapped)[:, -1], model(inputs)[:, -1], atol=1e-6)


def test_generated_text_depends_on_the_seed_alone(model: GPT) -> None:
    """Also for texts longer than the window."""
    texts = [
        model.generate(b"def ", 40, 1.0, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    ]
    assert len(texts[0]) == 40
    assert texts[0] == texts[1] != texts[2]


def test_a_width_must_be_a_multiple_of_heads() -> None:
    """The error names both numbers."""
    with pytest.raises(ValueError, match="width 30 is not a multiple of 4 heads"):
        GPTConfig(layers=1, heads=4, width=30, window=8)
