"""The displays of a run: plain lines, and the live display."""

from __future__ import annotations

import io
import os
import re
import sys

import pytest
from rich.console import Console

from tests.support.waiting import until
from trial_core.observe.events.throughput import Throughput
from trialflow.deployments.cli.run_display import (
    Display,
    LiveDisplay,
    PlainLines,
    display_for_stdout,
    is_interactive,
)

GIB = 2**30
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7])[;m]")
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def train_a_little(display: Display, clock: Clock) -> None:
    """Report a run up to the middle of its second workload, during an upload."""
    display.run_started("toy-0a", 30, 0, 16)
    display.stage_started("train-workload", "[0→10]")
    clock.now += 4
    display.stage_ended("train-workload", "[0→10]", 4.0)
    workload = Throughput(2.5, 40.0, 5120.0, 0.384, (GIB, 3 * GIB))
    display.throughput_measured(10, workload, workload)
    display.metrics_reported("training", 10, {"accuracy": 0.5, "loss": 2.34567})
    display.stage_started("validate", "@10")
    display.stage_ended("validate", "@10", 2.0)
    display.metrics_reported("validation", 10, {"perplexity": 12.5, "val_loss": 2.75})
    display.stage_started("checkpoint-save", "@10")
    display.stage_ended("checkpoint-save", "@10", 0.25)
    display.stage_started("checkpoint-upload", "@10")
    display.stage_started("callbacks", "on_checkpoint_end @10")
    display.stage_ended("callbacks", "on_checkpoint_end @10", 0.0)
    display.stage_started("train-workload", "[10→20]")
    clock.now += 2
    display.batches_trained(15)


def plain() -> tuple[PlainLines, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    return PlainLines(out, clock=clock), out, clock


def live(width: int = 100) -> tuple[LiveDisplay, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=width, color_system=None)
    return LiveDisplay(console, preferred=("val_loss", "loss"), clock=clock), out, clock


def rendered(display: LiveDisplay, width: int = 100) -> list[str]:
    """The live lines, without cursor moves."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(display.render())
    return [line.rstrip() for line in capture.get().splitlines()]


def test_lines_about_one_of_two_models() -> None:
    """`retrain` shows the stages of champion and challenger: each line says whose it is."""
    for display, out, _ in (plain(), live()):
        display.subject_changed("challenger")
        display.stage_started("validate", "@10")
        if isinstance(display, LiveDisplay):
            assert "challenger: validate @10" in rendered(display)[0]
        display.stage_ended("validate", "@10", 2.0)
        display.metrics_reported("validation", 10, {"loss": 48.676})
        display.subject_changed("")
        display.say("compared")
        said = out.getvalue().splitlines()
        assert said[0].startswith("challenger: validate @10: ")
        assert said[-1] == "compared"


def test_a_stage_that_takes_long() -> None:
    """Both displays say what it does, until it ends."""
    compiling = "compiling DeepSpeed's operator cpu_adam, for 15 s"
    for display, out, _ in (plain(), live()):
        display.stage_started("build-trial", "")
        display.stage_takes_long(compiling)
        if isinstance(display, LiveDisplay):
            assert compiling in rendered(display)[1]
            display.stage_ended("build-trial", "", 60.0)
            assert compiling not in "".join(rendered(display))
        else:
            assert out.getvalue() == f"build-trial: {compiling}\n"


def test_an_activity_that_names_the_stage() -> None:
    """It is shown once."""
    for display, out, _ in (plain(), live()):
        display.waiting_for("starting the ranks")
        display.stage_takes_long("starting the ranks, for 10 s")
        if isinstance(display, LiveDisplay):
            assert "".join(rendered(display)).count("starting the ranks") == 1
        else:
            assert out.getvalue().splitlines()[1:] == ["starting the ranks, for 10 s"]


def test_plain_lines_for_every_stage() -> None:
    """Every stage that ended is a line, with its duration and its metrics."""
    display, out, clock = plain()
    train_a_little(display, clock)
    display.checkpoint_committed("1234-5678", 10, 3 * 2**20)
    display.stage_ended("checkpoint-upload", "@10", 2.5)
    display.stage_started("checkpoint-upload", "@20")
    clock.now += 5
    display.checkpoint_committed("8765-4321", 20, 2**20)
    display.stage_ended("checkpoint-upload", "@20", 5.5)
    assert out.getvalue().splitlines() == [
        "trial toy-0a: 30 batches of 16 samples",
        "train-workload [0→10]: 4.0 s · 40.0 samples/s · 5120 tokens/s · 38 % MFU · 3.0 GiB"
        " · accuracy 0.5 · loss 2.346",
        "validate @10: 2.0 s · perplexity 12.5 · val_loss 2.75",
        "checkpoint-save @10: 0.2 s",
        "checkpoint-upload @10: 2.0 s · 3.0 MiB · checkpoint 1234-5678",
        "checkpoint-upload @20: 5.0 s · 1.0 MiB · checkpoint 8765-4321",
    ]


def test_a_trial_with_unknown_samples() -> None:
    """Its speed is in batches."""
    display, out, clock = plain()
    display.run_started("toy-0a", 30, 0, 0)
    display.stage_started("train-workload", "[0→10]")
    clock.now += 4
    display.stage_ended("train-workload", "[0→10]", 4.0)
    display.throughput_measured(10, Throughput(2.5), Throughput(2.5))
    display.metrics_reported("training", 10, {"loss": 2.5})
    assert out.getvalue().splitlines() == [
        "trial toy-0a: 30 batches",
        "train-workload [0→10]: 4.0 s · 2.5 batches/s · loss 2.5",
    ]


def test_plain_lines_hold_no_control_characters() -> None:
    """Control characters in metric names and in messages of ranks are removed."""
    display, out, clock = plain()
    train_a_little(display, clock)
    display.metrics_reported("training", 20, {"\x1b[31mloss\x1b[0m": "a\rb\x07"})
    display.restarting("rank 0 raised \x1b]0;title\x07Boom\x1b[1A: twice\nmore", 1, 5)
    display.moving("saved, to continue on other nodes: \x1b[1Anode-1 drains\nnow")
    assert CONTROL.findall(out.getvalue()) == []
    assert "\nsaved, to continue on other nodes: node-1 drains" in out.getvalue()
    assert "loss ab" in out.getvalue()
    assert "restart 1 of at most 5, from the beginning: rank 0 raised Boom: twice" in out.getvalue()


def test_a_notice_is_a_line() -> None:
    """As of a damaged checkpoint, and the batch from which the run continues."""
    display, out, _ = plain()
    display.notice("training continues from batch 4: it lacks\x1b[1A a file")
    assert out.getvalue() == "training continues from batch 4: it lacks a file\n"


def test_a_display_that_follows_the_ranks() -> None:
    """It prints what rank 0 prints, and the warnings of other ranks that the driver gets."""
    display, out, _ = plain()
    display.rank_logged(0, "not shown")
    display.follows_ranks = True
    display.rank_logged(0, "\x1b[31mstep 10\x1b[0m")
    display.rank_logged(3, "Warning: slow")
    assert out.getvalue() == "rank 0: step 10\nrank 3: Warning: slow\n"


def test_plain_lines_of_a_script() -> None:
    """It reports within its stage, and says neither its length nor its samples."""
    display, out, clock = plain()
    display.run_started("toy-0a", 0, 0, 0)
    display.stage_started("run-script", "[0→]")
    clock.now += 4
    display.metrics_reported("training", 10, {"loss": 0.5})
    display.metrics_reported("validation", 10, {"loss": 0.25})
    display.stage_ended("run-script", "[0→]", 4.0)
    assert out.getvalue().splitlines() == [
        "trial toy-0a",
        "training @10: loss 0.5",
        "validation @10: loss 0.25",
        "run-script [0→]: 4.0 s",
    ]
    assert display.batches_per_second is None


def test_a_script_that_tells_each_step() -> None:
    """Without a terminal, a line for each tenth, and none for its short parts."""
    display, out, _ = plain()
    display.run_started("toy-0a", 0, 0, 0)
    display.stage_started("run-script", "[0→]")
    for step in range(1, 41):
        display.stage_takes_long(f"{step / 400:.0%}")
    display.stage_takes_long("sums up")
    display.length_known(400)
    display.stage_ended("run-script", "[0→]", 0.5)
    assert out.getvalue().splitlines() == [
        "trial toy-0a",
        *(f"run-script [0→]: {each}" for each in ("10%", "sums up")),
        "it trains until batch 400",
    ]


def test_short_callbacks_have_no_line() -> None:
    """Callbacks have a line only if they took a second or more."""
    display, out, _ = plain()
    display.stage_ended("callbacks", "on_validation_end @10", 0.1)
    display.stage_ended("callbacks", "on_validation_end @20", 1.1)
    assert out.getvalue() == "callbacks on_validation_end @20: 1.1 s\n"


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The display of `--quiet` prints nothing."""
    with Display() as display:
        train_a_little(display, Clock())
        display.say("something")
    assert capsys.readouterr() == ("", "")


def test_the_live_display_shows_the_progress() -> None:
    """Shows stage, batches, speed, metrics, time left and the upload."""
    display, _, clock = live(120)
    train_a_little(display, clock)
    head, facts = rendered(display, 120)
    assert "train-workload [10→20]" in head
    assert "━" in head
    assert head.endswith("15/30 0:02")
    assert facts == (
        "  40.0 samples/s · 5120 tokens/s · 38 % MFU · 3.0 GiB · 0:06 left · loss 2.346"
        " · validated @10: val_loss 2.75 · checkpo…"
    )


@pytest.mark.parametrize("width", [20, 30, 60])
def test_the_live_display_never_wraps(width: int) -> None:
    """On a narrow terminal the stage's name is cut and the batches stay; no line wraps."""
    display, _, clock = live(width)
    train_a_little(display, clock)
    lines = rendered(display, width)
    assert [len(line) <= width for line in lines] == [True, True]
    assert lines[0].endswith(" 15/30 0:02")


def test_the_live_display_before_the_first_batch() -> None:
    """While Prefect and the ranks start, the display shows what it waits for and how long."""
    display, _, clock = live()
    display.waiting_for("starting Prefect")
    clock.now += 65
    (line,) = rendered(display)
    assert line.endswith("starting Prefect 1:05")


def test_the_live_display_cleans_up() -> None:
    """At the end the live lines are erased, and the cursor is visible."""
    display, out, clock = live()
    with display:
        train_a_little(display, clock)
    kept = [line for line in out.getvalue().splitlines() if "━" not in line]
    assert any("trial toy-0a: 30 batches of 16 samples" in line for line in kept)
    assert any("validate @10: perplexity 12.5 · val_loss 2.75" in line for line in kept)
    last = out.getvalue().rpartition("\n")[2]
    assert last.count("\x1b[1A\x1b[2K") == 2  # up and erased, both of them
    assert out.getvalue().count("\x1b[?25h") == 1


class Tty(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_is_interactive() -> None:
    """Only a terminal that can move its cursor is interactive."""
    assert is_interactive(Tty(), {"TERM": "xterm"}.get)
    assert not is_interactive(Tty(), {"TERM": "dumb"}.get)
    assert not is_interactive(Tty(), {}.get)
    assert not is_interactive(io.StringIO(), {"TERM": "xterm"}.get)


def test_a_display_outlives_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """`trialflow train | head`: once the pipe is closed, output is dropped without an error."""
    reading, writing = os.pipe()
    with open(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        display = display_for_stdout(False, ())
        display.say("read")
        assert os.read(reading, 100) == b"read\n"
        os.close(reading)
        display.say("dropped")
        assert os.path.samestat(os.fstat(writing), os.stat(os.devnull))
        display.say("dropped, too")


@pytest.mark.parametrize(("begins_at", "is_over"), [(99, False), (100, True)])
def test_a_run_without_batches_left_says_so(begins_at: int, is_over: bool) -> None:
    """A resumed run that only ends would look like one that has trained."""
    display, out, _ = plain()
    display.run_started("toy-0000beef", 100, begins_at, 4)
    said = "nothing is left to train: it is already at 100 of 100 batches" in out.getvalue()
    assert said == is_over
    assert display.had_batches_left != is_over


def test_plain_lines_say_what_takes_long() -> None:
    """Once, after two seconds; not of training and validation, whose lines are many."""
    display, out, clock = plain()
    with display:
        display.stage_started("train-workload", "[0→10]")
        clock.now += 60
        display.stage_ended("train-workload", "[0→10]", 60.0)
        display.stage_started("checkpoint-upload", "@10")
        clock.now += 3
        until(lambda: "checkpoint-upload" in out.getvalue(), "a line about the upload")
        clock.now += 3
        display.waiting_for("starting the ranks")
        clock.now += 3
    assert out.getvalue().splitlines() == ["checkpoint-upload @10…", "starting the ranks…"]


def test_a_search_is_a_table_with_the_time_left() -> None:
    """The last rungs of many; times count from where this run of the search has begun."""
    display, _, clock = live()
    columns, rungs = ("trained to", "best"), [(f"{i} batches", f"0.{i}") for i in range(10, 40)]
    display.search_shown(["3 of 16 trials begun"], [columns, *rungs], 0.25)
    assert rendered(display)[-1].endswith("25% · 0:00")
    clock.now += 60
    display.search_shown(["4 of 16 trials begun", "best:\x1b 1"], [columns, *rungs], 0.5)
    lines = rendered(display)
    assert [line.split() for line in lines[:2]] == [
        ["trained", "to", "best"],
        ["28", "batches", "0.28"],
    ]
    assert lines[-4].split() == ["39", "batches", "0.39"]
    assert lines[-3:-1] == ["4 of 16 trials begun", "best: 1"]
    assert lines[-1].endswith("50% · 1:00 · 2:00 left")
