"""Journals in the storage, and on this machine, one of which may be damaged."""

from __future__ import annotations

import logging
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from tests.support.driving import TRIAL
from trial_core.checkpoint import layout
from trial_core.checkpoint.store import CheckpointStore
from trial_core.common.decoding import decode
from trial_core.errors import ConfigError
from trial_core.observe.trackers import stored_journal
from trial_core.observe.trackers.in_mlflow import MlflowTracker
from trial_core.observe.trackers.in_trackio import TrackioTracker
from trial_core.observe.trackers.in_wandb import WandbTracker
from trial_core.observe.trackers.journal import (
    FOLDER,
    JOURNAL,
    ORDER,
    State,
    read_state,
    write_state,
)
from trial_core.observe.trackers.records import RunEnded
from trial_core.observe.trackers.sender import SenderOrder
from trial_core.observe.trackers.stored_journal import adopt_stored, keep, sync_trackers
from trial_core.observe.trackers.tracker import TrackedRun, Tracker

LINE = b'{"type":"Began","at":0.0,"batches":0,"attempt":%d}\n'
DAMAGED = LINE % 1 + b'{"type":"Noted","at":0.0,"batches":4,"text":"\xff"}\n'
LOGGER = logging.getLogger("tests.trackers")


class Copies:
    """A journal and the state of a tracker, in a storage and on this machine."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.local = self.run_dir / FOLDER
        self.store = CheckpointStore(f"file://{folder}/store")

    def write_local(self, journal: bytes) -> None:
        self.local.mkdir(parents=True)
        (self.local / JOURNAL).write_bytes(journal)
        write_state(self.state_file, State(run="here", sent=1))

    def write_stored(self, journal: bytes) -> None:
        self.store.storage.write(layout.run_file_key(TRIAL, f"{FOLDER}/{JOURNAL}"), journal)
        state = b'{"run": "there", "sent": 1}'
        self.store.storage.write(layout.run_file_key(TRIAL, f"{FOLDER}/noting.json"), state)

    def adopt(self) -> None:
        adopt_stored(self.store, TRIAL, self.run_dir, LOGGER)

    @property
    def state_file(self) -> Path:
        return self.local / "noting.json"

    @property
    def set_aside(self) -> bytes:
        return (self.local / f"{JOURNAL}.damaged").read_bytes()


@pytest.fixture
def copies(tmp_path: Path) -> Copies:
    return Copies(tmp_path)


def test_a_damaged_local_journal_gives_way_to_the_stored_one(
    copies: Copies, caplog: pytest.LogCaptureFixture
) -> None:
    copies.write_local(DAMAGED)
    copies.write_stored(LINE % 1)
    copies.adopt()
    assert len([line for line in caplog.messages if "is damaged" in line]) == 1
    assert copies.set_aside == DAMAGED
    assert (copies.local / JOURNAL).read_bytes() == LINE % 1
    assert read_state(copies.state_file) == State(run="there", sent=1)


@pytest.mark.parametrize(
    "stored", [DAMAGED, DAMAGED[len(LINE % 1) :]], ids=["last line", "only line"]
)
def test_a_damaged_stored_journal_is_set_aside(
    copies: Copies, caplog: pytest.LogCaptureFixture, stored: bytes
) -> None:
    """The trackers' runs are continued, and the next journal replaces the stored one."""
    copies.write_stored(stored)
    copies.adopt()
    assert len([line for line in caplog.messages if "is damaged" in line]) == 1
    assert copies.set_aside == stored
    assert not (copies.local / JOURNAL).exists()
    assert read_state(copies.state_file) == State(run="there", sent=0)
    (copies.local / JOURNAL).write_bytes(LINE % 2)
    keep(copies.store, TRIAL, copies.run_dir, LOGGER)
    key = layout.run_file_key(TRIAL, f"{FOLDER}/{JOURNAL}")
    assert copies.store.storage.read(key) == LINE % 2


def test_no_state_is_taken_of_a_journal_that_is_not(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that is ahead of its journal would lose records: later ones count as sent."""
    copies.write_local(LINE % 1)
    copies.write_stored(LINE % 2)
    replace = stored_journal.replace_file

    def full(path: Path, data: bytes) -> None:
        if path.name == JOURNAL:
            raise OSError(28, "No space left on device")
        replace(path, data)

    monkeypatch.setattr(stored_journal, "replace_file", full)
    copies.adopt()
    assert (copies.local / JOURNAL).read_bytes() == LINE % 1
    assert read_state(copies.state_file) == State(run="here", sent=1)


def test_a_newer_local_journal_stays(copies: Copies) -> None:
    """Whatever the stored one is."""
    copies.write_local(LINE % 2)
    copies.write_stored(DAMAGED)
    copies.adopt()
    assert (copies.local / JOURNAL).read_bytes() == LINE % 2
    assert read_state(copies.state_file) == State(run="here", sent=1)


@pytest.mark.parametrize("name", ["noting.json", ORDER, JOURNAL])
@pytest.mark.parametrize("text", [b"the key of this user", b'{"auths": "the key of this user"}'])
def test_a_link_brings_no_file_of_this_user_into_the_storage(
    copies: Copies, tmp_path: Path, name: str, text: bytes
) -> None:
    """Who writes to a shared folder can make one in a record's place."""
    copies.write_stored(LINE % 1)
    (tmp_path / "key").write_bytes(text)
    link = tmp_path / "store" / layout.run_file_key(TRIAL, f"{FOLDER}/{name}")
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path / "key")
    copies.adopt()
    keep(copies.store, TRIAL, copies.run_dir, LOGGER)
    there = [each for each in (tmp_path / "store").rglob("*") if each.is_file()]
    assert not [each for each in there if not each.is_symlink() and b"key" in each.read_bytes()]


def test_no_record_chooses_a_file_to_send(tmp_path: Path) -> None:
    """The report has one place, and is a file of its own: who writes to the storage could have any
    file of the next machine sent."""
    secret = tmp_path / "id_rsa"
    secret.write_text("secret")
    ended = b'{"type":"RunEnded","at":1.0,"outcome":"completed","why":"","report":"%s"}'
    record = decode(ended % str(secret).encode(), RunEnded)
    assert str(secret) not in repr(record)
    run = TrackedRun("toy-1", "toy", tmp_path / "folder", tmp_path)
    assert run.report is None
    (tmp_path / "report.html").symlink_to(secret)
    assert run.report is None
    (tmp_path / "report.html").unlink()
    (tmp_path / "report.html").write_text("page")
    assert run.report == tmp_path / "report.html"


def order(**trackers: dict[str, object]) -> bytes:
    """An order with these trackers, as a run stores it."""
    return msgspec.json.encode(SenderOrder(
        trial=TRIAL, experiment="toy", run_dir="", patience_seconds=1.0, trackers=trackers
    ))  # fmt: skip


def sync(copies: Copies) -> None:
    sync_trackers(copies.store, TRIAL, copies.run_dir, 60.0, print, LOGGER)


@pytest.mark.parametrize("is_own", [False, True])
def test_no_stored_order_chooses_a_folder(copies: Copies, tmp_path: Path, is_own: bool) -> None:
    """Also when it is read again; the order of a run on this machine may."""
    logdir = tmp_path / "elsewhere"
    data = order(tensorboard={"logdir": str(logdir)})
    copies.write_stored(LINE % 1)
    copies.store.storage.write(layout.run_file_key(TRIAL, f"{FOLDER}/{ORDER}"), data)
    copies.local.mkdir(parents=True)
    if is_own:
        (copies.local / ORDER).write_bytes(data)
    sync(copies)
    (copies.local / "tensorboard.json").unlink()
    sync(copies)
    assert logdir.exists() == is_own
    assert (copies.run_dir / "tensorboard").exists() != is_own


@pytest.mark.parametrize("is_named", ["by the storage", "by the variable", "by the experiment"])
def test_a_place_that_only_the_storage_names_gets_no_token(
    copies: Copies, monkeypatch: pytest.MonkeyPatch, is_named: str
) -> None:
    """It is shown, with what to set. One that the caller names is tried."""
    got: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            got.append(self.headers.get("Authorization"))
            self.send_error(401)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    pytest.importorskip("mlflow")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "callers-token")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    own = {"mlflow": {"tracking_uri": url}} if is_named == "by the experiment" else {}
    if is_named == "by the variable":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    copies.write_stored(LINE % 1)
    key = layout.run_file_key(TRIAL, f"{FOLDER}/{ORDER}")
    copies.store.storage.write(key, order(mlflow={"tracking_uri": url}))
    copies.local.mkdir(parents=True)
    try:
        if is_named == "by the storage":
            with pytest.raises(ConfigError, match="set MLFLOW_TRACKING_URI") as refusal:
                sync_trackers(copies.store, TRIAL, copies.run_dir, 5.0, print, LOGGER, own)
            assert url in str(refusal.value)
        else:
            before, _ = sync_trackers(copies.store, TRIAL, copies.run_dir, 0.1, print, LOGGER, own)
            assert before == {"mlflow": 1}  # it is tried
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert is_named != "by the storage" or not got


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        (MlflowTracker, "tracking_uri"), (WandbTracker, "base_url"), (WandbTracker, "entity"),
        (TrackioTracker, "server_url"), (TrackioTracker, "space_id"),
    ],
)  # fmt: skip
def test_each_place_of_a_tracker_is_named_by_the_caller(
    monkeypatch: pytest.MonkeyPatch, kind: type[Tracker], option: str
) -> None:
    """By the experiment, or by the tracker's variable."""
    monkeypatch.delenv(kind.place_variables[option], raising=False)
    stored = {option: "elsewhere", "project": "gpt"}
    with pytest.raises(ConfigError, match=f"storage names {option} elsewhere"):
        kind.require_own_place("any", stored, {option: "own"})
    kind.require_own_place("any", stored, {option: "elsewhere"})
    monkeypatch.setenv(kind.place_variables[option], "elsewhere")
    kind.require_own_place("any", stored, {})


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("../../noting", {}, "names a tracker"),
        ("noting:Noting", {}, "names a tracker"),
        ("wandb", {"config": "/any.yaml"}, "unknown field"),
    ],
)
def test_a_stored_order_with_odd_trackers_is_refused(
    copies: Copies, name: str, options: dict[str, object], error: str
) -> None:
    """Before anything is made of its names and options."""
    copies.write_stored(LINE % 1)
    data = order(**{name: options})
    copies.store.storage.write(layout.run_file_key(TRIAL, f"{FOLDER}/{ORDER}"), data)
    copies.local.mkdir(parents=True)
    with pytest.raises(ConfigError, match=error):
        sync(copies)


@pytest.mark.parametrize(
    ("place", "is_kept"),
    [
        ("https://mlflow.example.com/path", True), ("databricks", True),
        ("postgresql+psycopg2://db.example.com/mlflow", True), ("sqlite:////own.db", True),
        ("sqlite:////any.db", False), ("file:///any", False), ("/any", False), ("any", False),
        ("mysql://db/mlflow?read_default_file=/any", False), ("https:///any", False),
    ],
)  # fmt: skip
def test_a_stored_order_names_servers_alone(
    monkeypatch: pytest.MonkeyPatch, place: str, is_kept: bool
) -> None:
    """Or the place that the environment of this machine names."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////own.db")
    kept = MlflowTracker.without_paths({"tracking_uri": place, "experiment": "a"})
    assert kept == {"experiment": "a", **({"tracking_uri": place} if is_kept else {})}


def test_a_superseded_run_does_not_replace_the_stored_journal(copies: Copies) -> None:
    """At its end, when the journal of the run that superseded it is there."""
    copies.write_local(LINE % 1)
    copies.write_stored(LINE % 2)
    keep(copies.store, TRIAL, copies.run_dir, LOGGER)
    stored = layout.run_file_key(TRIAL, FOLDER)
    assert copies.store.storage.read(f"{stored}/{JOURNAL}") == LINE % 2
    assert b"there" in (copies.store.storage.read(f"{stored}/noting.json") or b"")
    (copies.local / JOURNAL).write_bytes(LINE % 3)
    keep(copies.store, TRIAL, copies.run_dir, LOGGER)
    assert copies.store.storage.read(f"{stored}/{JOURNAL}") == LINE % 3


@pytest.mark.parametrize(("sent_here", "taken"), [(0, "there"), (1, "here")])
def test_a_state_is_not_replaced_by_an_older_one(
    copies: Copies, sent_here: int, taken: str
) -> None:
    """Of one journal, the state that has sent more counts: the other would send it again."""
    copies.write_local(LINE % 1)
    write_state(copies.state_file, State(run="here", sent=sent_here))
    copies.write_stored(LINE % 1)
    copies.adopt()
    assert read_state(copies.state_file).run == taken
