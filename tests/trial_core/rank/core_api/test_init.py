"""`trial_core.init` in a script that plain python starts: this process.

Each block starts a driver, which takes a second or two. Tests that only use a context share one.
"""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import signal
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trial_core
from trial_core.checkpoint import layout
from trial_core.checkpoint.retention.protections import pin, unpin
from trial_core.checkpoint.storage.base import MAX_OBJECT_BYTES
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.checkpoint_source import CheckpointSource
from trial_core.checkpoint.transfer.trial_code import code_of_checkpoint
from trial_core.core import Context, DistributedContext
from trial_core.errors import CheckpointError, CheckpointNotFound, ConfigError, TrialError
from trial_core.rank.core_api.init import script_command
from trial_core.schedule.command import command_of

Init = Callable[..., AbstractContextManager[Context]]


def init_in(folder: Path) -> Init:
    """`trial_core.init` of an experiment that stores in a folder."""
    exp_conf = {
        "name": "core",
        "hyperparameters": {"lr": 0.5},
        "data": {"folder": "/data"},
        "searcher": {"metric": "loss"},
        "checkpoint_storage": str(folder / "stored"),
    }
    return lambda **arguments: trial_core.init(**{"exp_conf": exp_conf, **arguments})


@pytest.fixture
def init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Init:
    """`trial_core.init` of an experiment whose files are below `tmp_path`."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    return init_in(tmp_path)


@dataclass
class Shared:
    """A context for several tests, and where it stores."""

    context: Context
    folder: Path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """For tests that leave a context as it was."""
    folder = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIALFLOW_HOME", str(folder / "home"))
        with init_in(folder)() as context:
            yield Shared(context, folder)


def store(context: Context, steps: int, **metadata: Any) -> str:
    metadata = {"steps_completed": steps, **metadata}
    with context.checkpoint.store_path(metadata) as (path, uuid):
        (path / "state").write_text(str(steps))
    return uuid


def manifests(tmp_path: Path) -> list[Any]:
    return CheckpointStore(str(tmp_path / "stored")).list()


def test_a_script_continues_its_trial_with_latest(
    init: Init, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint holds the metrics that were reported before it."""
    with init() as context:
        assert context.info.latest_checkpoint is None
        context.train.report_training_metrics(4, {"loss": torch.tensor([0.5])})
        context.train.report_validation_metrics(4, {"loss": np.float32(0.25), "parts": [1, None]})
        uuid = store(context, 4, note="kept")
    monkeypatch.setenv("DET_LATEST_CHECKPOINT", "latest")  # as latest_checkpoint="latest"
    # Its own argument says where checkpoints are, too.
    here = {"name": "core", "searcher": {"metric": "loss"}}
    with init(checkpoint_storage=str(tmp_path / "stored"), exp_conf=here) as context:
        assert context.info.latest_checkpoint == uuid
        assert context.train.get_experiment_best_validation() == 0.25
        assert trial_core.get_cluster_info() is context.info
        with context.checkpoint.restore_path(uuid) as path:
            assert (path / "state").read_text() == "4"
        assert context.checkpoint.get_metadata(uuid) == {"steps_completed": 4, "note": "kept"}
        store(context, 8)
    assert trial_core.get_cluster_info() is None
    first, second = manifests(tmp_path)
    assert first.trial == second.trial
    assert first.metrics == {
        "training": {"loss": 0.5}, "validation": {"loss": 0.25, "parts": [1, None]}
    }  # fmt: skip
    assert (second.progress.batches_trained, second.progress.best_metric) == (8, 0.25)
    assert second.earlier_validation == {"loss": 0.25, "parts": [1, None]}
    assert second.entrypoint.startswith("python ")


def test_the_script_reads_its_experiment(shared: Shared) -> None:
    """As with `det.get_cluster_info()`."""
    assert shared.context.info.trial.hparams == {"lr": 0.5}
    assert shared.context.info.user_data == {"folder": "/data"}


def test_folders_are_uploaded_and_downloaded(shared: Shared, tmp_path: Path) -> None:
    """Any checkpoint of the storage by the beginning of its uuid, whole or in part."""
    (tmp_path / "model" / "deep").mkdir(parents=True)
    (tmp_path / "model" / "deep" / "weights").write_text("w")
    (tmp_path / "model" / "log").write_text("l")
    with init_in(shared.folder)() as another:
        uuid = another.checkpoint.upload(tmp_path / "model", {"steps_completed": 1})
    context = shared.context
    context.checkpoint.download(uuid[:8], tmp_path / "all")
    context.checkpoint.download(uuid, tmp_path / "one", selector=lambda path: "deep" in path)
    alone = trial_core.core.DownloadMode.NoSharedDownload
    context.checkpoint.download(uuid, tmp_path / "alone", alone)
    context.checkpoint.delete(uuid)
    with context.checkpoint.restore_path(uuid) as path:  # what was fetched stays
        assert (path / "log").read_text() == "l"
    assert context.checkpoint.get_metadata(uuid) == {"steps_completed": 1}
    files = {"deep/weights", "log", "metadata.json"}
    for folder, expected in (("all", files), ("one", {"deep/weights"}), ("alone", files)):
        found = (tmp_path / folder).rglob("*")
        names = {str(path.relative_to(tmp_path / folder)) for path in found if path.is_file()}
        assert names == expected
    assert uuid not in [manifest.uuid for manifest in manifests(shared.folder)]


def test_a_selector_chooses_files(shared: Shared, tmp_path: Path) -> None:
    """Of an upload by their paths, and of a restore, which fetches no others."""
    (tmp_path / "model" / "deep").mkdir(parents=True)
    for name in ("deep/weights", "deep/log", "log"):
        (tmp_path / "model" / name).write_text(name)
    checkpoint, given = shared.context.checkpoint, {"steps_completed": 1}
    uuid = checkpoint.upload(tmp_path / "model", given, selector=lambda path: path != "deep/log")
    (stored,) = [each for each in manifests(shared.folder) if each.uuid == uuid]
    assert {each.path for each in stored.files} == {"deep/weights", "log", "metadata.json"}
    alone = trial_core.core.DownloadMode.NoSharedDownload
    for mode in (trial_core.core.DownloadMode.LocalWorkersShareDownload, alone):
        with checkpoint.restore_path(uuid, mode, selector=lambda path: path == "log") as folder:
            assert [path.name for path in folder.rglob("*")] == ["log"]
    with checkpoint.restore_path(uuid, selector=lambda path: False) as folder:
        assert folder.is_dir()
    with checkpoint.restore_path(uuid) as folder:
        assert (folder / "deep" / "weights").read_text() == "deep/weights"


def test_a_checkpoint_that_is_needed_is_not_deleted(shared: Shared) -> None:
    """Neither its manifest nor a file. The pin says who needs it."""
    uuid = store(shared.context, 1)
    stored = CheckpointStore(str(shared.folder / "stored"))
    pin(stored, uuid, "for the paper")
    with pytest.raises(CheckpointError, match=rf"{uuid} is not deleted: .*for the paper"):
        shared.context.checkpoint.delete(uuid)
    assert stored.verify(uuid).progress.batches_trained == 1
    unpin(stored, uuid)
    shared.context.checkpoint.delete(uuid)
    assert uuid not in [manifest.uuid for manifest in stored.list()]
    assert stored.storage.sizes(layout.DELETIONS) == {}


@pytest.mark.long
def test_files_for_a_restart_go_with_the_end_of_the_script(init: Init, tmp_path: Path) -> None:
    """They stay while it runs, and after it was asked to stop: it may then continue here."""

    def kept() -> list[str]:
        return [path.name for path in (tmp_path / "home").glob("*/kept/*/rank-0/*")]

    with init() as context:
        store(context, 1)
        store(context, 2)
        assert sorted(kept()) == ["metadata.json", "state"]
    assert kept() == []
    with init() as context:
        context.train._host.was_preempted = True
        assert context.preempt.should_preempt()
        store(context, 1)
    assert sorted(kept()) == ["metadata.json", "state"]


def test_a_downloaded_file_is_never_half_written(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that share a folder replace each other's files while some rank reads them."""
    checkpoint = shared.context.checkpoint
    uuid = store(shared.context, 1)
    checkpoint.download(uuid, tmp_path / "shared")

    def break_off(source: Any, copy: Any, *_: Any) -> None:
        copy.write(b"half")
        copy.flush()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", break_off)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.download(uuid, tmp_path / "shared")
    assert (tmp_path / "shared" / "state").read_text() == "1"
    assert len(list((tmp_path / "shared").iterdir())) == 2


@pytest.mark.parametrize(
    ("started_as", "module", "entrypoint", "has_code"),
    [
        pytest.param("train.py", None, "python train.py --lr ...", True, marks=pytest.mark.long),
        ("package/train.py", "package.train", "python -m package.train --lr ...", True),
        pytest.param(
            "package/__main__.py", "package.__main__", "python -m package --lr ...", True,
            marks=pytest.mark.long,
        ),
        pytest.param(
            "site-packages/package/train.py", None, "python train.py --lr ...", False,
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_a_checkpoint_names_the_scripts_code(
    init: Init,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    started_as: str,
    module: str | None,
    entrypoint: str,
    has_code: bool,
) -> None:
    """The folder that the program was started from, unless it holds installed packages.

    And its options, without their values: one may be a credential.
    """
    script = tmp_path / "mine" / started_as
    script.parent.mkdir(parents=True)
    for path in (script, tmp_path / "mine" / "helper.py"):
        path.write_text("")
    program = types.ModuleType("__main__")
    program.__file__ = str(script)
    program.__spec__ = None if module is None else importlib.machinery.ModuleSpec(module, None)
    monkeypatch.setitem(sys.modules, "__main__", program)
    monkeypatch.setattr(sys, "argv", [str(script), "--lr", value := "0.0001357"])
    with init() as context:
        store(context, 1)
    (manifest,) = manifests(tmp_path)
    assert manifest.entrypoint == entrypoint
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if value.encode() in path.read_bytes()]
    if not has_code:
        assert manifest.code is None
        return
    stored = CheckpointStore(str(tmp_path / "stored"))
    folder = code_of_checkpoint(CheckpointSource(manifest, stored), tmp_path / "fetched").folder
    assert {started_as, "helper.py"} == {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    }


def test_names_of_determined_say_what_to_use(shared: Shared) -> None:
    """An AttributeError, so that `hasattr` works."""
    with pytest.raises(AttributeError, match=r"no attribute 'start'; use a block: with trial_core"):
        shared.context.start()
    with pytest.raises(AttributeError, match="no attribute 'set_metadata'; use metadata of store"):
        shared.context.train.set_metadata({})
    assert not hasattr(shared.context, "preemption")


def test_a_block_that_raises_stores_nothing(shared: Shared) -> None:
    """The error is the script's."""

    def store_half(context: Context) -> None:
        with context.checkpoint.store_path({"steps_completed": 1}) as (path, _):
            (path / "half").write_text("half")
            raise ZeroDivisionError

    before = manifests(shared.folder)
    with pytest.raises(ZeroDivisionError):
        store_half(shared.context)
    assert manifests(shared.folder) == before
    assert list(shared.folder.rglob("half")) == []


@pytest.mark.parametrize("program", ["-c", "", "/usr/local/bin/train"])
def test_any_program_may_be_a_script(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also ``python -c``, a console, an installed command: its name is a valid entrypoint."""
    monkeypatch.setattr(sys, "argv", [program, "--lr", "1 0"])
    command = command_of(script_command())
    assert command is not None
    assert command.arguments == ("--lr", "...")


@pytest.mark.parametrize(("code", "status"), [(0, "**completed**"), (3, "**failed: ")])
def test_exit_code_0_is_a_success(init: Init, tmp_path: Path, code: int, status: str) -> None:
    """As a process's: the report tells which it was."""
    with pytest.raises(SystemExit), init():
        sys.exit(code)
    (report,) = (tmp_path / "home").rglob("report.md")
    assert status in report.read_text()


def test_sigterm_is_a_request_to_stop(init: Init) -> None:
    """From the first question on; before it, the signal would end the script."""
    with init() as context:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert not context.preempt.should_preempt()
        handler = signal.getsignal(signal.SIGTERM)
        assert not context.preempt.should_preempt()
        assert signal.getsignal(signal.SIGTERM) == handler, "installed once"
        os.kill(os.getpid(), signal.SIGTERM)
        while not context.preempt.should_preempt():
            pass
        assert context.preempt.should_preempt()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda c: c.checkpoint.store_path().__enter__(), 'metadata needs "steps_completed"'),
        (
            lambda c: c.checkpoint.store_path({"steps_completed": "4"}).__enter__(),
            "steps_completed is an integer of at least 0, got '4'",
        ),
        (
            lambda c: c.checkpoint.store_path({"steps_completed": 4, "x": c}).__enter__(),
            "metadata is no plain data",
        ),
        (
            lambda c: c.checkpoint.store_path(
                {"steps_completed": 4, "x": " " * MAX_OBJECT_BYTES}
            ).__enter__(),
            r"metadata has 33,554,4\d\d bytes as JSON, expected at most 33,554,432: store",
        ),
        (lambda c: c.train.report_training_metrics(-1, {}), "an integer of at least 0, got -1"),
        (lambda c: c.train.report_training_metrics(1, [1]), "is a mapping of names to values"),
        (
            lambda c: c.train.report_validation_metrics(1, {"loss": c}),
            'report_validation_metrics: metric "loss" is of type Context',
        ),
    ],
)
def test_mistakes_are_named(shared: Shared, call: Callable[[Context], Any], problem: str) -> None:
    """With the method, and with what it takes."""
    with pytest.raises(TrialError, match=problem):
        call(shared.context)


def test_another_rank_does_not_store_alone(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would store parts of a checkpoint that nothing commits."""
    second = DistributedContext(
        rank=1, size=2, local_rank=1, local_size=2, cross_rank=0, cross_size=1
    )
    context = shared.context
    monkeypatch.setattr(context.train._host, "distributed", second)
    with pytest.raises(TrialError, match="was called on rank 1 without shard=True"):
        context.checkpoint.store_path({"steps_completed": 1}).__enter__()


def test_several_ranks_need_torch_distributed(init: Init) -> None:
    """The script initialises it, as it does under torchrun without us."""
    two = DistributedContext(rank=0, size=2, local_rank=0, local_size=2, cross_rank=0, cross_size=1)
    with pytest.raises(TrialError, match=r"call torch\.distributed\.init_process_group before"):
        init(distributed=two).__enter__()


def test_what_cannot_be_resumed_is_refused(init: Init) -> None:
    """A new trial begins only if none is asked for, or none is there."""
    with pytest.raises(CheckpointNotFound):
        init(latest_checkpoint="abcdef").__enter__()
    with pytest.raises(ConfigError, match="checkpoint_storage: expected"):
        trial_core.init(exp_conf={"checkpoint_storage": 3}).__enter__()
    with init(latest_checkpoint="latest") as context:
        assert context.info.latest_checkpoint is None


def test_an_experiment_that_is_no_mapping_is_named() -> None:
    """As the path of its file."""
    with pytest.raises(ConfigError, match=r'exp_conf: expected a mapping, got "train\.yaml"'):
        trial_core.init(exp_conf="train.yaml").__enter__()  # type: ignore[arg-type]
