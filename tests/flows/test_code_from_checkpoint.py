"""A run on a machine without the code folder: its checkpoint's code is fetched and used."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.flow import one_slot, train
from tests.support.manifests import new_manifest
from tests.support.slots import TOY, drive, lines
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.code_folder import pack_code
from trial_core.checkpoint.transfer.trial_code import upload_code
from trial_core.config import ExperimentConfig
from trial_core.driver.code_source import refuse_missing_code, stored_trial_code
from trial_core.errors import CheckpointError, ConfigError, LaunchError
from trial_core.processes.machine.run_dirs import run_dir_of
from trial_core.processes.slots.slot_group import SlotGroup

TRIAL = "toy-0000beef"
FROM_CHECKPOINT = {"code": "from_checkpoint"}
Warm = Callable[[int], SlotGroup]


def without_code(here: Path, batches: int = 6, **changes: Any) -> ExperimentConfig:
    """An experiment whose code folder is not on this machine."""
    config: ExperimentConfig = one_slot(
        here, batches, code=str(here / "gone"), entrypoint="renamed:ToyTrial",
        hyperparameters={"record": str(here)}, **changes,
    )  # fmt: skip
    return config


def packed_toy(here: Path) -> bytes:
    """The code of the toy trial, whose module has a name that only this archive has."""
    folder = here / "packed"
    folder.mkdir()
    shutil.copy(TOY / "toy_trial.py", folder / "renamed.py")
    data = pack_code(folder).data
    shutil.rmtree(folder)
    assert data is not None
    return data


@pytest.mark.slots
@pytest.mark.server
@pytest.mark.long
def test_a_trial_is_continued_with_the_code_of_its_checkpoint(warm_slots: Warm, here: Path) -> None:
    """The ranks start in a copy of it, and the next checkpoint has the same code."""
    config = without_code(here, environment=FROM_CHECKPOINT)
    before = one_slot(here, 4, hyperparameters={"record": str(here)})
    driven = drive(warm_slots(1), before, here / "before", persist=True)
    store, uuid = CheckpointStore(config.checkpoint_storage.url), driven.checkpoints[-1]
    code = upload_code(store, uuid, packed_toy(here))
    store.commit(
        new_manifest(
            4,
            trial=TRIAL,
            uuid=uuid,
            files=driven.files[uuid],
            topology=driven.topology,
            code=code,
            experiment="toy",
        )
    )
    result = train(config, TRIAL)
    assert result.batches_trained == 6
    assert [line[0] for line in lines(here, "samples", 0)] == list(range(6))
    now = store.open(result.checkpoint_uuid).code
    assert now is not None
    assert now.digest == code.digest
    second_copy = (result.checkpoint_uuid, code.place(uuid)[1])
    assert now.place(result.checkpoint_uuid) in (code.place(uuid), second_copy)
    assert (run_dir_of(TRIAL) / "code" / "renamed.py").is_file()


@pytest.mark.slots
@pytest.mark.server
@pytest.mark.long
def test_a_checkpoint_is_evaluated_with_its_own_code(here: Path) -> None:
    """Of a run of the flow, whose code folder is then deleted."""
    from trialflow.flows.evaluate import evaluate

    folder = here / "code"
    folder.mkdir()
    shutil.copy(TOY / "toy_trial.py", folder / "renamed.py")
    config = without_code(here, 4)
    trained = train(config.model_copy(update={"code": folder}))
    shutil.rmtree(folder)
    with pytest.raises(LaunchError, match=r"environment\.code: from_checkpoint"):
        evaluate(config)
    result: Any = evaluate(without_code(here, 4, environment=FROM_CHECKPOINT))
    assert result.metrics == trained.validation_metrics


def test_a_run_is_refused_before_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its code folder, or with a home folder as one. Stored code needs neither."""
    config = without_code(tmp_path)
    with pytest.raises(LaunchError, match="there is no code folder"):
        refuse_missing_code(config)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "renamed.py").write_text("class ToyTrial: ...")
    home = config.model_copy(update={"code": tmp_path})
    refuse_missing_code(home)  # on this machine alone, code need not be sent
    monkeypatch.setenv("TRIALFLOW_ENGINE", "join")
    with pytest.raises(ConfigError, match="holds the home folder of this user"):
        refuse_missing_code(home)
    refuse_missing_code(without_code(tmp_path, environment=FROM_CHECKPOINT))


def test_what_a_run_needs_for_it(tmp_path: Path) -> None:
    """A checkpoint to begin with, that names its code. A warm start's source is one."""
    logger = logging.getLogger(__name__)
    config = without_code(tmp_path, environment=FROM_CHECKPOINT)
    store = CheckpointStore(config.checkpoint_storage.url)
    with pytest.raises(ConfigError, match=r"trial new-1 has none: give --resume or searcher\."):
        stored_trial_code(config, store, "new-1", tmp_path, logger)
    store.commit(new_manifest(trial="new-1"))
    with pytest.raises(CheckpointError, match="has no code of toy_trial:ToyTrial"):
        stored_trial_code(config, store, "new-1", tmp_path, logger)
    code = upload_code(store, "u-1", packed_toy(tmp_path))
    store.commit(new_manifest(trial="old-1", uuid="u-1", code=code))
    source = {**config.searcher.model_dump(), "source_checkpoint_uuid": "u-1"}
    warm = without_code(tmp_path, environment=FROM_CHECKPOINT, searcher=source)
    found = stored_trial_code(warm, store, "another-1", tmp_path / "run", logger)
    assert found is not None
    assert [path.name for path in found.folder.iterdir()] == ["renamed.py"]
    assert stored_trial_code(without_code(tmp_path), store, "new-1", tmp_path, logger) is None
