"""`trial_core.init` in a script without a driver, in this process."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import signal
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trial_core
from trial_core.checkpoint import layout
from trial_core.checkpoint.store import CheckpointStore
from trial_core.core import Context, DistributedContext
from trial_core.errors import CheckpointError, CheckpointNotFound, ConfigError, TrialError
from trial_core.retention.pins import pin, unpin
from trial_core.transfer.trial_code import code_of_checkpoint

Init = Callable[..., AbstractContextManager[Context]]


@pytest.fixture
def init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Init:
    """`trial_core.init` of an experiment whose files are below `tmp_path`."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    exp_conf = {
        "name": "core",
        "hyperparameters": {"lr": 0.5},
        "data": {"folder": "/data"},
        "searcher": {"metric": "loss"},
        "checkpoint_storage": str(tmp_path / "stored"),
    }
    return lambda **arguments: trial_core.init(**{"exp_conf": exp_conf, **arguments})


def store(context: Context, steps: int, **metadata: Any) -> str:
    metadata = {"steps_completed": steps, **metadata}
    with context.checkpoint.store_path(metadata) as (path, uuid):
        (path / "state").write_text(str(steps))
    return uuid


def manifests(tmp_path: Path) -> list[Any]:
    return CheckpointStore(str(tmp_path / "stored")).list()


def test_a_script_continues_its_trial_with_latest(init: Init, tmp_path: Path) -> None:
    """The checkpoint holds the metrics that were reported before it."""
    with init() as context:
        assert context.info.latest_checkpoint is None
        context.train.report_training_metrics(4, {"loss": torch.tensor([0.5])})
        context.train.report_validation_metrics(4, {"loss": np.float32(0.25), "parts": [1, None]})
        uuid = store(context, 4, note="kept")
    with init(latest_checkpoint="latest") as context:
        assert context.info.latest_checkpoint == uuid
        assert trial_core.get_cluster_info() is context.info
        with context.checkpoint.restore_path(uuid) as path:
            assert (path / "state").read_text() == "4"
        assert context.checkpoint.get_metadata(uuid) == {"steps_completed": 4, "note": "kept"}
        store(context, 8)
    assert trial_core.get_cluster_info() is not context.info
    first, second = manifests(tmp_path)
    assert first.trial == second.trial
    assert first.metrics == {
        "training": {"loss": 0.5}, "validation": {"loss": 0.25, "parts": [1, None]}
    }  # fmt: skip
    assert (second.progress.batches_trained, second.progress.best_metric) == (8, 0.25)
    assert second.earlier_validation == {"loss": 0.25, "parts": [1, None]}
    assert second.entrypoint.startswith("python ")


def test_the_script_reads_its_experiment(init: Init) -> None:
    """As with `det.get_cluster_info()`."""
    with init() as context:
        assert context.info.trial.hparams == {"lr": 0.5}
        assert context.info.user_data == {"folder": "/data"}


def test_folders_are_uploaded_and_downloaded(init: Init, tmp_path: Path) -> None:
    """Any checkpoint by the beginning of its uuid, whole or in part."""
    (tmp_path / "model" / "deep").mkdir(parents=True)
    (tmp_path / "model" / "deep" / "weights").write_text("w")
    (tmp_path / "model" / "log").write_text("l")
    with init() as context:
        uuid = context.checkpoint.upload(tmp_path / "model", {"steps_completed": 1})
    with init() as context:
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
    assert manifests(tmp_path) == []


def test_a_checkpoint_that_is_needed_is_not_deleted(init: Init, tmp_path: Path) -> None:
    """Neither its manifest nor a file. The pin says who needs it."""
    with init() as context:
        uuid = store(context, 1)
        stored = CheckpointStore(str(tmp_path / "stored"))
        pin(stored, uuid, "for the paper")
        with pytest.raises(CheckpointError, match=rf"{uuid} is not deleted: .*for the paper"):
            context.checkpoint.delete(uuid)
        assert stored.verify(uuid).progress.batches_trained == 1
        unpin(stored, uuid)
        context.checkpoint.delete(uuid)
    assert stored.list() == []
    assert stored.storage.sizes(layout.DELETIONS) == {}


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
        context.train._host._must_stop = True
        assert context.preempt.should_preempt()
        store(context, 1)
    assert sorted(kept()) == ["metadata.json", "state"]


def test_a_downloaded_file_is_never_half_written(
    init: Init, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that share a folder replace each other's files while some rank reads them."""
    with init() as context:
        uuid = store(context, 1)
        context.checkpoint.download(uuid, tmp_path / "shared")

        def break_off(source: Any, copy: Any, *_: Any) -> None:
            copy.write(b"half")
            copy.flush()
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(shutil, "copyfileobj", break_off)
        with pytest.raises(OSError, match="No space left"):
            context.checkpoint.download(uuid, tmp_path / "shared")
    assert (tmp_path / "shared" / "state").read_text() == "1"
    assert len(list((tmp_path / "shared").iterdir())) == 2


@pytest.mark.parametrize(
    ("started_as", "module", "entrypoint", "has_code"),
    [
        ("train.py", None, "python train.py --lr 1", True),
        ("package/train.py", "package.train", "python -m package.train --lr 1", True),
        ("package/__main__.py", "package.__main__", "python -m package --lr 1", True),
        ("site-packages/package/train.py", None, "python train.py --lr 1", False),
    ],
)
def test_a_checkpoint_names_the_scripts_code(
    init: Init,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    started_as: str,
    module: str | None,
    entrypoint: str,
    has_code: bool,
) -> None:
    """The folder that the program was started from, unless it holds installed packages."""
    script = tmp_path / "mine" / started_as
    script.parent.mkdir(parents=True)
    for path in (script, tmp_path / "mine" / "helper.py"):
        path.write_text("")
    program = types.ModuleType("__main__")
    program.__file__ = str(script)
    program.__spec__ = None if module is None else importlib.machinery.ModuleSpec(module, None)
    monkeypatch.setitem(sys.modules, "__main__", program)
    monkeypatch.setattr(sys, "argv", [str(script), "--lr", "1"])
    with init() as context:
        store(context, 1)
    (manifest,) = manifests(tmp_path)
    assert manifest.entrypoint == entrypoint
    if not has_code:
        assert manifest.code is None
        return
    stored = CheckpointStore(str(tmp_path / "stored"))
    folder = code_of_checkpoint(stored, manifest, tmp_path / "fetched").folder
    assert {started_as, "helper.py"} == {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    }


def test_names_of_determined_say_what_to_use(init: Init) -> None:
    """An AttributeError, so that `hasattr` works."""
    with init() as context:
        with pytest.raises(AttributeError, match=r"no attribute 'profiler'; use torch\.profiler"):
            context.profiler  # noqa: B018 - the access raises
        with pytest.raises(AttributeError, match="no attribute 'report_metrics'; use report_train"):
            context.train.report_metrics("training", 1, {})
        assert not hasattr(context, "preemption")


def test_a_block_that_raises_stores_nothing(init: Init, tmp_path: Path) -> None:
    """The error is the script's."""

    def store_half(context: Context) -> None:
        with context.checkpoint.store_path({"steps_completed": 1}) as (path, _):
            (path / "half").write_text("half")
            raise ZeroDivisionError

    with init() as context, pytest.raises(ZeroDivisionError):
        store_half(context)
    assert manifests(tmp_path) == []
    assert list(tmp_path.rglob("half")) == []


def test_sigterm_is_a_request_to_stop(init: Init) -> None:
    """From the first question on; before it, the signal would end the script."""
    with init() as context:
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
        (lambda c: c.train.report_training_metrics(-1, {}), "an integer of at least 0, got -1"),
        (lambda c: c.train.report_training_metrics(1, [1]), "is a mapping of names to values"),
        (
            lambda c: c.train.report_validation_metrics(1, {"loss": c}),
            'report_validation_metrics: metric "loss" is of type Context',
        ),
    ],
)
def test_mistakes_are_named(init: Init, call: Callable[[Context], Any], problem: str) -> None:
    """With the method, and with what it takes."""
    with init() as context, pytest.raises(TrialError, match=problem):
        call(context)


def test_another_rank_neither_reports_nor_stores_alone(init: Init) -> None:
    """It would store parts of a checkpoint that nothing commits."""
    second = DistributedContext(
        rank=1, size=2, local_rank=1, local_size=2, cross_rank=0, cross_size=1
    )
    with init() as context:
        context.train._host.distributed = second
        with pytest.raises(TrialError, match="was called on rank 1: reduce the metrics"):
            context.train.report_training_metrics(1, {})
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
