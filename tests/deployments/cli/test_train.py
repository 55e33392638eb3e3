"""`trialflow train` as a process: its output, what it leaves, its exit code."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import pytest

from tests.support.cli import TRIALFLOW, environment_in, trialflow, write_experiment
from tests.support.manifests import new_manifest
from tests.support.prefect import ROOT, PrefectServer, isolated, prepared
from tests.support.processes import descendants, wait_until_gone
from tests.support.slots import lines as seen
from trial_core.checkpoint.retention.known_storages import note_storage
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.driver.result import status_of
from trial_core.errors import CheckpointError, ConfigError, StorageError
from trial_core.observe.events.observers import current_observer
from trial_core.schedule.sequencer import Progress
from trial_core.schedule.stop_requests import outcome_of
from trialflow.deployments.cli import train as command
from trialflow.deployments.cli.train import Continuation, _best, _summary, train
from trialflow.flows import train as flow_module
from trialflow.flows.lifecycle.stop_signals import SAME_REQUEST_SECONDS
from trialflow.flows.train import TrialResult

pytestmark = [pytest.mark.slots, pytest.mark.server]

LIMIT_SECONDS = 600.0
NOTES_FORK_SERVERS = """
import os, sys
if any("fork_and_reap_ranks" in word for word in sys.orig_argv):
    with open(os.path.join(os.path.dirname(__file__), "fork_servers"), "a") as file:
        print(os.environ.get("PREFECT_API_URL", ""), file=file)
"""
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


@pytest.fixture
def server(prefect_server: PrefectServer) -> Mapping[str, str]:
    """Environment of a command that uses the tests' Prefect server."""
    return prefect_server.environment


@pytest.mark.long
def test_a_run_into_a_file(tmp_path: Path) -> None:
    """With the embedded server: plain lines and a summary whose paths exist, nothing else. One
    process imports for the ranks, and has begun before the server had an address."""
    path = write_experiment(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(NOTES_FORK_SERVERS)
    done = trialflow(
        tmp_path, "train", str(path), "--resume",
        variables={
            "PREFECT_API_URL": "", "PYTHONPATH": f"{ROOT}:{tmp_path}",
            **isolated(prepared(tmp_path / "prefect")),
        },
    )  # fmt: skip
    assert (tmp_path / "fork_servers").read_text() == "\n"
    assert (done.returncode, done.stderr) == (0, "")
    assert CONTROL.findall(done.stdout) == []
    lines = done.stdout.splitlines()
    for begins in ("nothing to resume: no checkpoint of experiment toy in file://",
                   "watch it at http://127.0.0.1:", "build-trial: ", "train-workload [4→8]: ",
                   "validate @8: ", "checkpoint-upload @8: "):  # fmt: skip
        assert sum(line.startswith(begins) for line in lines) == 1, (begins, done.stdout)
    summary = dict(re.split(" {2,}", line.strip()) for line in lines if line.startswith("  "))
    assert list(summary) == [
        "loss", "mean_index", "throughput", "peak memory", "checkpoint", "report", "HTML report",
        "logs", "UI", "next",
    ]  # fmt: skip
    assert summary["next"].startswith("trialflow export best:toy-")
    assert lines[-1].split(maxsplit=1)[1] == summary["next"]
    assert (Path(summary["checkpoint"].removeprefix("file://")) / "latest").is_file()
    assert Path(summary["report"]).read_text().startswith("# toy")
    assert Path(summary["HTML report"]).read_text().startswith("<!doctype html>")
    assert (Path(summary["logs"]) / "rank-0.log").is_file()
    assert "http://127.0.0.1:4200/v2/runs/flow-run/" in summary["UI"]


def test_the_summary_names_the_batch_of_an_earlier_validation() -> None:
    """Metrics of another batch than the last checkpoint's are not shown as its own."""
    stopped = TrialResult("toy-1", 60, True, "time budget", {}, {"loss": 0.25}, validated_at=40)
    assert (
        _summary(stopped, 1.0, None, "--resume")[1]
        == "  loss           0.25 (validated at batch 40)"
    )
    ended = replace(stopped, validated_at=60)
    assert _summary(ended, 1.0, None, "--resume")[1] == "  loss           0.25"


def test_the_summary_names_the_best_checkpoint_if_it_is_not_the_last(tmp_path: Path) -> None:
    """By the searcher metric. The last one is already shown with its metrics."""
    store, config = CheckpointStore(str(tmp_path)), {"searcher": {"metric": "loss"}}
    saved = [
        new_manifest(
            batches, progress=Progress(batches, validated_at=batches), config=config,
            metrics={"validation": {"loss": loss}},
        )
        for batches, loss in ((40, 0.125), (60, 0.25))
    ]  # fmt: skip
    for manifest in saved:
        store.commit(manifest)
    ended = TrialResult(saved[0].trial, 60, False, checkpoint_uuid=saved[1].uuid)
    best = _best(store, ended)
    assert best is not None
    summary = _summary(ended, 1.0, None, "--resume", best)
    assert f"  best  {saved[0].uuid[:8]}, at batch 40: loss 0.125" in summary
    last = replace(ended, checkpoint_uuid=saved[0].uuid)
    assert not any("best" in line for line in _summary(last, 1.0, None, "--resume", best))


def test_one_word_for_an_early_end() -> None:
    """The terminal and the run's status, which the report, `runs list` and the state show, have the
    same words. A platform and a tracker learn that it has completed."""
    why = "loss has not improved by more than 0.01 since batch 315"
    ended = TrialResult("toy-1", 400, True, trial_stop_reason=why, report_path="/r")
    first, _ = _summary(ended, 1.0, None, "--resume")
    assert first == f"toy-1 completed early: {why}, after 400 batches (1.0 s)"
    assert status_of(ended).startswith(f"completed early: {why}; nothing")
    outcome, shown = outcome_of(status_of(ended))
    assert outcome == "completed"
    assert shown.startswith(why)
    asked = replace(ended, trial_stop_reason=None)
    assert status_of(asked).startswith("completed early, as the trial asked; nothing")
    assert outcome_of(status_of(asked))[0] == "completed"


def test_the_summary_without_a_storage_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run has ended well: a warning takes the place of the line."""

    def fail(*arguments: object) -> None:
        raise StorageError("it is away")

    store = CheckpointStore(str(tmp_path))
    monkeypatch.setattr(store, "list", fail)
    assert _best(store, TrialResult("toy-1", 60, False)) is None
    assert "the best checkpoint is not known: it is away" in capsys.readouterr().err


def test_the_summary_of_a_trial_that_was_at_its_end() -> None:
    """It says how to train on, which a completed run does not need."""
    result = TrialResult("toy-1", 100, False)
    first, second = _summary(result, 1.0, None, "--resume", end=90)
    assert first == "toy-1 is already at 100 of 90 batches (1.0 s)"
    assert second.split(maxsplit=2)[2].startswith("--resume --set searcher.max_length.batches=200")
    assert _summary(replace(result, report_path="/r"), 1.0, None, "--resume") == [
        "toy-1 completed after 100 batches (1.0 s)",
        "  report  /r",
    ]


def test_the_summary_names_the_logs_that_have_content(tmp_path: Path) -> None:
    """Ranks that write nothing leave empty files."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").touch()
    log = tmp_path / "logs" / "rank-1.log"
    log.touch()
    result = TrialResult("toy-1", 100, False, run_dir=str(tmp_path), report_path="/r")
    assert not any("logs" in line for line in _summary(result, 1.0, None, "--resume"))
    log.write_text("a warning")
    assert f"  logs    {tmp_path}/logs" in _summary(result, 1.0, None, "--resume")


@pytest.mark.long
def test_a_trial_that_raises(tmp_path: Path, server: Mapping[str, str]) -> None:
    """Prints the trial's traceback, the log's path and how to continue; the exit code is 1."""
    path = write_experiment(
        tmp_path,
        # After the second save: the first one has been committed by then.
        hyperparameters={"do": "raise", "at_batch": 9},
        min_checkpoint_period={"batches": 4},
        searcher={"metric": "loss", "max_length": {"batches": 12}},
    )
    done = trialflow(tmp_path, "train", str(path), variables=server)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: rank 0 on ")
    assert "raised RuntimeError: the toy was told to break" in done.stderr
    assert "toy_trial.py" in done.stderr
    assert "prefect" not in done.stderr
    assert re.search(
        r"the last checkpoint of trial toy-\w{12} is at batch [48]; to continue", done.stderr
    )
    log = Path(done.stderr.partition("whole log: ")[2].splitlines()[0])
    assert log.is_file()


@pytest.mark.long
def test_json_of_an_interrupted_run(tmp_path: Path, server: Mapping[str, str]) -> None:
    """After Ctrl-C, stdout has the JSON line alone, and stderr says how to continue."""
    path = write_experiment(
        tmp_path, scheduling_unit=100_000,
        searcher={"metric": "loss", "max_length": {"batches": 100_000}},
        hyperparameters={"record": str(tmp_path)},
    )  # fmt: skip
    with subprocess.Popen(
        [*TRIALFLOW, "train", str(path), "--json"], env=environment_in(tmp_path, server),
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as run:  # fmt: skip
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(seen(tmp_path, "samples", 0)) < 5:
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline, "the run did not train"
            time.sleep(0.1)
        run.send_signal(signal.SIGINT)
        printed, said = run.communicate(timeout=LIMIT_SECONDS)
    assert run.returncode == 130
    (line,) = printed.splitlines()
    outcome = json.loads(line)
    trained = len(seen(tmp_path, "samples", 0))
    assert (outcome["status"], outcome["batches_trained"]) == ("stopped", trained)
    assert outcome["stop_reason"] == "interrupted (Ctrl-C)"
    assert (Path(outcome["checkpoint_url"].removeprefix("file://")) / "latest").is_file()
    assert Path(outcome["report_path"]).is_file()
    (page,) = re.findall(r"^HTML report: (.*)$", said, flags=re.MULTILINE)
    assert Path(page) == Path(outcome["report_path"]).with_suffix(".html")
    assert Path(page).is_file()
    assert f"stopped by Ctrl-C after {trained} batches" in said
    saved = f"the last checkpoint of trial {outcome['trial']} is at batch {trained}"
    assert f"{saved}; to continue from it, repeat the command with --resume" in said


class Terminal:
    """A command on a pseudo-terminal.

    Attributes:
        process: the command.
        text: everything it has shown so far.
    """

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self.text = ""
        self._descriptor = descriptor
        self._deadline = time.monotonic() + LIMIT_SECONDS

    def read_until(self, expected: str) -> None:
        """Read until the terminal shows `expected`."""
        while expected not in self.text:
            assert self._read(), f"no {expected!r}; the terminal shows:\n{self.text}"

    def read_for(self, seconds: float) -> None:
        """Read for some seconds, in which the command must not end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self._read(), f"the terminal shows:\n{self.text}"

    def read_to_the_end(self) -> int:
        """Read everything and return the exit code."""
        while self._read():
            pass
        return self.process.wait(LIMIT_SECONDS)

    def press_ctrl_c(self) -> None:
        """Type Ctrl-C: the terminal sends SIGINT to its foreground processes."""
        os.write(self._descriptor, b"\x03")

    def close(self) -> None:
        """Close the terminal, as the end of an ssh connection does."""
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, self._descriptor)
        os.close(nothing)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._descriptor], [], [], 0.5)
        if not ready:
            return self.process.poll() is None and time.monotonic() < self._deadline
        try:
            data = os.read(self._descriptor, 65536)
        except OSError:  # on Linux: the other end is closed
            return False
        self.text += data.decode(errors="replace")
        return bool(data)


@contextmanager
def on_a_terminal(folder: Path, *arguments: str, **variables: str) -> Iterator[Terminal]:
    """Start a command on a terminal of 30 lines by 110 columns."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 110, 0, 0))
    with subprocess.Popen(
        [*TRIALFLOW, *arguments],
        env=environment_in(folder, {"TERM": "xterm-256color", **variables}),
        stdin=terminal, stdout=terminal, stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:  # fmt: skip
        os.close(terminal)
        try:
            yield Terminal(process, controller)
        finally:
            os.close(controller)
            process.kill()


@pytest.mark.parametrize(
    ("number", "grace_seconds", "code", "message"),
    [
        pytest.param(
            signal.SIGINT,
            3600,
            130,
            "stopped by Ctrl-C",
            id="Ctrl-C, twice",
            marks=pytest.mark.long,
        ),
        pytest.param(
            signal.SIGTERM,
            1,
            143,
            "stopped by SIGTERM",
            id="SIGTERM, its grace over",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_run_that_is_stopped(
    number: signal.Signals, grace_seconds: int, code: int, message: str,
    tmp_path: Path, server: Mapping[str, str],
) -> None:  # fmt: skip
    """In a hung batch: the ranks end, the terminal is restored, the error is printed."""
    path = write_experiment(
        tmp_path,
        hyperparameters={"do": "sleep", "at_batch": 6},
        min_checkpoint_period={"batches": 4},
        stopping={"grace_seconds": grace_seconds},
    )
    with on_a_terminal(tmp_path, "train", str(path), **server) as terminal:
        terminal.read_until("train-workload [4→8]")
        terminal.read_until("checkpoint @4")
        assert re.search(r"samples/s · .* left · loss", terminal.text)
        pids = descendants(terminal.process.pid)
        assert pids
        if number == signal.SIGINT:
            terminal.press_ctrl_c()
            terminal.read_for(SAME_REQUEST_SECONDS + 0.2)  # earlier ones count as the same request
            terminal.press_ctrl_c()
        else:
            terminal.process.send_signal(number)
        assert terminal.read_to_the_end() == code
        assert wait_until_gone(pids, 0) == []
    _, _, end = terminal.text.rpartition("\x1b[?25h")  # the cursor is shown again
    assert message in end
    (trial,) = (path.name for path in tmp_path.glob("home/toy-*"))
    assert f"the last checkpoint of trial {trial} is at batch 4; to continue from it, repeat" in end
    assert "Traceback" not in terminal.text


@pytest.mark.long
def test_a_terminal_that_is_closed(tmp_path: Path, server: Mapping[str, str]) -> None:
    """The run saves, and no process is left."""
    endless = {"metric": "loss", "max_length": {"batches": 10**6}}
    path = write_experiment(tmp_path, searcher=endless)
    with on_a_terminal(tmp_path, "train", str(path), **server) as terminal:
        terminal.read_until(" · loss")
        pids = descendants(terminal.process.pid)
        terminal.close()
        terminal.process.wait(LIMIT_SECONDS)
        assert wait_until_gone(pids, 10) == []
    saved = CheckpointStore(f"file://{tmp_path}/home/checkpoints").list()[-1]
    (report,) = tmp_path.glob("home/toy-*/report.md")
    expected = "SIGHUP: its terminal was closed); saved at batch "
    assert f"{expected}{saved.progress.batches_trained}," in report.read_text()


NO_PRELOAD = {"resources": {"preload": False}}
"""For experiments of `FakeFlow`, whose ranks never start."""


class FakeFlow:
    """The flow `train`, which reports its flow run and then does what the test says."""

    def __init__(self, body: Callable[[], object]) -> None:
        self._body = body

    def with_options(self, on_running: list[Callable[..., None]]) -> Callable[..., object]:
        def flow(config: ExperimentConfig, **arguments: object) -> object:
            for hook in on_running:
                hook(None, SimpleNamespace(id=UUID(int=1)), None)
            return self._body()

        return flow


@pytest.mark.parametrize(("is_quiet", "is_named"), [(False, False), (True, False), (True, True)])
def test_the_trial_that_resume_continues_is_named(
    tmp_path: Path, prefect_server: PrefectServer, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], is_quiet: bool, is_named: bool,
) -> None:  # fmt: skip
    """Also with --quiet, on stderr; after Ctrl-C again, as there is nothing newer to continue.

    A trial that --trial has named must be named again, since it may not be the newest.
    """
    store = CheckpointStore(f"file://{tmp_path}/storage")
    store.commit(new_manifest(4, trial="toy-0000beef", experiment="toy"))
    if is_named:
        store.commit(new_manifest(4, trial="toy-0000cafe", experiment="toy"))
    path = write_experiment(tmp_path, checkpoint_storage=store.url, **NO_PRELOAD)
    flow = FakeFlow(lambda: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(flow_module, "train", flow)
    with prefect_server.configured():
        named = "toy-0000beef" if is_named else None
        assert (
            train(path, continuation=Continuation(resume=True, trial=named), quiet=is_quiet) == 130
        )
    printed, said = capsys.readouterr()
    assert "continuing trial toy-0000beef, " in (said if is_quiet else printed)
    option = "--resume --trial toy-0000beef" if is_named else "--resume"
    assert f"to continue trial toy-0000beef, repeat the command with {option}\n" in said
    assert printed == "" or not is_quiet


def test_a_new_trial_that_is_stopped_before_its_first_checkpoint(
    tmp_path: Path, prefect_server: PrefectServer, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A later --resume would continue another trial, so the message says that it is not this."""
    path = write_experiment(tmp_path, **NO_PRELOAD)
    flow = FakeFlow(lambda: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(flow_module, "train", flow)
    with prefect_server.configured():
        assert train(path) == 130
    expected = "trial toy-000000000001 has no checkpoint yet, so --resume does not continue it"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("has_written", [False, True])
def test_only_the_page_of_this_run_is_named(
    tmp_path: Path, prefect_server: PrefectServer, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], has_written: bool,
) -> None:  # fmt: skip
    """A resumed run that fails early leaves the page of the trial's earlier run."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path))
    page = tmp_path / "toy-0000beef" / "report.html"
    page.parent.mkdir()
    page.write_text("the earlier run's")
    os.utime(page, (1, 1))

    def fail() -> None:
        if has_written:
            page.write_text("this run's")
        raise StorageError("503 SlowDown")

    monkeypatch.setattr(flow_module, "train", FakeFlow(fail))
    monkeypatch.setattr(command, "_trial_to_resume", lambda *arguments: "toy-0000beef")
    with prefect_server.configured():
        path = write_experiment(tmp_path, **NO_PRELOAD)
        assert train(path, continuation=Continuation(resume=True)) != 0
    said = capsys.readouterr().err
    assert "503 SlowDown" in said
    assert (f"HTML report: {page}" in said) == has_written


def test_follow_prints_what_rank_0_prints(
    tmp_path: Path, prefect_server: PrefectServer, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Beside the lines of the run. With --quiet it would print nothing, and is refused."""

    def print_and_stop() -> None:
        current_observer().rank_logged(0, "step 7")
        os.kill(os.getpid(), signal.SIGINT)

    path = write_experiment(tmp_path, **NO_PRELOAD)
    monkeypatch.setattr(flow_module, "train", FakeFlow(print_and_stop))
    with prefect_server.configured():
        assert train(path, follow=True) == 130
    assert "rank 0: step 7\n" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--follow prints what --quiet would leave out"):
        train(path, follow=True, quiet=True)


@pytest.mark.parametrize("option", ["take_over", "trial"])
def test_an_option_that_needs_resume(tmp_path: Path, option: str) -> None:
    """Without it a run begins a new trial, which no other run has."""
    named = option.replace("_", "-")
    wanted = Continuation(**{option: "toy-0000beef"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"--{named} continues a trial: give --resume as well"):
        train(write_experiment(tmp_path), continuation=wanted)


def test_resume_begins_no_trial_in_a_storage_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty one has nothing to resume, unless this machine's runs have used another there."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    store, said = CheckpointStore(f"file://{tmp_path}/storage"), list[str]()
    assert command._trial_to_resume(store, "toy", None, said.append) is None
    assert said[0].startswith("nothing to resume")
    note_storage(store, "theirs", logging.getLogger(__name__))
    with pytest.raises(StorageError, match="not the storage that runs on this machine have used"):
        command._trial_to_resume(store, "toy", None, said.append)


def test_the_trial_to_resume_can_be_named(tmp_path: Path) -> None:
    """Instead of the experiment's newest. One without a checkpoint is refused."""
    store = CheckpointStore(f"file://{tmp_path}/storage")
    for trial in ("toy-0000beef", "toy-0000cafe"):
        store.commit(new_manifest(4, trial=trial, experiment="toy"))
    said: list[str] = []
    assert command._trial_to_resume(store, "toy", "toy-0000beef", said.append) == "toy-0000beef"
    assert said[0].startswith("continuing trial toy-0000beef")
    assert command._trial_to_resume(store, "toy", "toy-0000b", said.append) == "toy-0000beef"
    with pytest.raises(CheckpointError, match="'' cannot be a trial's id"):  # an unset variable
        command._trial_to_resume(store, "toy", "", said.append)
    with pytest.raises(ConfigError, match=r"--trial toy-0000dead: no checkpoint of this trial"):
        command._trial_to_resume(store, "toy", "toy-0000dead", said.append)
