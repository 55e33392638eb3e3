"""`trialflow train` from the outside: what is on the terminal, what is left, the exit code."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cli import TRIALFLOW, environment_in, trialflow, write_experiment
from tests.support.prefect import PrefectServer, isolated
from tests.support.processes import descendants, wait_until_gone
from tests.support.slots import lines as seen
from trialflow.flows.lifecycle.stop_monitor import SAME_REQUEST_SECONDS

pytestmark = [pytest.mark.slots, pytest.mark.server]

LIMIT_SECONDS = 180.0
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
TRIAL = re.compile(r"toy-[0-9a-f]{8}")


@pytest.fixture
def server(prefect_server: PrefectServer) -> Mapping[str, str]:
    """Variables of a command that uses a server which runs already."""
    return prefect_server.environment


def test_a_run_into_a_file(tmp_path: Path) -> None:
    """With nothing but the command: plain lines, a summary whose places exist, nothing else."""
    path = write_experiment(tmp_path)
    done = trialflow(
        tmp_path, "train", str(path), "--resume",
        variables={"PREFECT_API_URL": "", **isolated(tmp_path / "prefect")},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert CONTROL.findall(done.stdout) == []
    lines = done.stdout.splitlines()
    assert lines[0].startswith("nothing to resume: no checkpoint of experiment toy in file://")
    for begins in ("watch it at http://127.0.0.1:", "build-trial: ", "train-workload [4→8]: ",
                   "validate @8: ", "checkpoint-upload @8: "):  # fmt: skip
        assert sum(line.startswith(begins) for line in lines) == 1, (begins, done.stdout)
    summary = dict(line.split(maxsplit=1) for line in lines if line.startswith("  "))
    assert list(summary) == ["loss", "mean_index", "checkpoint", "report", "logs", "UI"]
    assert (Path(summary["checkpoint"].removeprefix("file://")) / "latest").is_file()
    assert Path(summary["report"]).read_text().startswith("# toy")
    assert (Path(summary["logs"]) / "rank-0.log").is_file()
    assert "http://127.0.0.1:4200/v2/runs/flow-run/" in summary["UI"]


def test_quiet(tmp_path: Path, server: Mapping[str, str]) -> None:
    """`--quiet` leaves the summary alone; with a server of one's own, its link stays good."""
    path = write_experiment(tmp_path)
    done = trialflow(tmp_path, "train", str(path), "--quiet", variables=server)
    assert (done.returncode, done.stderr) == (0, "")
    first, *facts = done.stdout.splitlines()
    assert re.match(r"toy-[0-9a-f]{8} completed after 8 batches \(", first)
    assert all(fact.startswith("  ") for fact in facts)
    assert f"UI          {server['PREFECT_API_URL'].removesuffix('/api')}/runs/" in facts[-1]


def test_a_trial_that_raises(tmp_path: Path, server: Mapping[str, str]) -> None:
    """The user's own traceback, where the log is, and how to go on; exit code 1."""
    path = write_experiment(
        tmp_path,
        # One save later than the one that has certainly been committed by then.
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
    assert re.search(r"the last checkpoint is that of batch [48]; to go on", done.stderr)
    log = Path(done.stderr.partition("whole log: ")[2].splitlines()[0])
    assert log.is_file()


def test_an_entrypoint_that_is_missing(tmp_path: Path, server: Mapping[str, str]) -> None:
    """What the ranks find wrong with the trial is a message too, not a traceback; exit code 2."""
    path = write_experiment(tmp_path, entrypoint="toy_trail:ToyTrial")
    done = trialflow(tmp_path, "train", str(path), variables=server)
    assert done.returncode == 2
    assert done.stderr.startswith('error: entrypoint "toy_trail:ToyTrial": there is no module')
    assert "Traceback" not in done.stderr


def test_json(tmp_path: Path, server: Mapping[str, str]) -> None:
    """Stdout is the result alone, here of a run that Ctrl-C has ended: saved where it was, which
    is said to people as well, with how to go on."""
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
    assert f"stopped by Ctrl-C after {trained} batches" in said
    assert (
        f"the last checkpoint is that of batch {trained}; to go on from it, give --resume" in said
    )


class Terminal:
    """A command on a terminal of its own.

    Attributes:
        process: the command.
        text: all that it has shown so far.
    """

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self.text = ""
        self._descriptor = descriptor
        self._deadline = time.monotonic() + LIMIT_SECONDS

    def read_until(self, expected: str) -> None:
        """Read until the terminal has shown `expected`."""
        while expected not in self.text:
            assert self._read(), f"no {expected!r}; the terminal shows:\n{self.text}"

    def read_for(self, seconds: float) -> None:
        """Read for so long; nothing is to end meanwhile."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self._read(), f"the terminal shows:\n{self.text}"

    def read_to_the_end(self) -> int:
        """Read all; the exit code."""
        while self._read():
            pass
        return self.process.wait(LIMIT_SECONDS)

    def press_ctrl_c(self) -> None:
        """As a person does: the terminal sends SIGINT to whatever runs in it."""
        os.write(self._descriptor, b"\x03")

    def _read(self) -> bool:
        ready, _, _ = select.select([self._descriptor], [], [], 0.5)
        if not ready:
            return self.process.poll() is None and time.monotonic() < self._deadline
        try:
            data = os.read(self._descriptor, 65536)
        except OSError:  # Linux's way of saying that the other end is closed
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
    ("number", "grace_seconds", "code", "words"),
    [
        pytest.param(signal.SIGINT, 3600, 130, "stopped by Ctrl-C", id="Ctrl-C, twice"),
        pytest.param(signal.SIGTERM, 1, 143, "stopped by SIGTERM", id="SIGTERM, its grace over"),
    ],
)
def test_a_run_that_is_stopped(
    number: signal.Signals, grace_seconds: int, code: int, words: str,
    tmp_path: Path, server: Mapping[str, str],
) -> None:  # fmt: skip
    """In a batch that never ends: the ranks are gone, the terminal is as it was, all is said."""
    path = write_experiment(
        tmp_path,
        hyperparameters={"do": "sleep", "at_batch": 6},
        min_checkpoint_period={"batches": 4},
        stopping={"grace_seconds": grace_seconds},
    )
    with on_a_terminal(tmp_path, "train", str(path), **server) as terminal:
        terminal.read_until("train-workload [4→8]")
        terminal.read_until("checkpoint @4")
        assert "samples/s · loss" in terminal.text
        pids = descendants(terminal.process.pid)
        assert pids
        if number == signal.SIGINT:
            terminal.press_ctrl_c()
            terminal.read_for(SAME_REQUEST_SECONDS + 0.2)  # sooner, it would count as the same
            terminal.press_ctrl_c()
        else:
            terminal.process.send_signal(number)
        assert terminal.read_to_the_end() == code
        assert wait_until_gone(pids, 0) == []
    _, _, end = terminal.text.rpartition("\x1b[?25h")  # the cursor is shown again
    assert words in end
    assert "the last checkpoint is that of batch 4; to go on from it, give --resume" in end
    assert "Traceback" not in terminal.text


def test_a_run_on_a_terminal(tmp_path: Path, server: Mapping[str, str]) -> None:
    """What stays on the terminal is our lines and the summary: the display cleans up."""
    path = write_experiment(tmp_path)
    with on_a_terminal(tmp_path, "train", str(path), **server) as terminal:
        assert terminal.read_to_the_end() == 0
    stays = screen(terminal.text)
    assert [re.split(r"[ :]", line)[0] for line in stays[:3]] == ["watch", "trial", "validate"]
    assert TRIAL.match(stays[3])
    assert [line.split()[0] for line in stays[4:]] == [
        "loss", "mean_index", "checkpoint", "report", "logs", "UI",
    ]  # fmt: skip


def screen(text: str) -> list[str]:
    """The lines that are left after cursor moves and erasures, without colours."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines if line.strip()]
