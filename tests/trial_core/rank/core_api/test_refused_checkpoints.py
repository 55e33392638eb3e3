"""A script stores what cannot be one checkpoint: the error is the script's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.driving import drive
from tests.support.slots import lines, toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import RankFailed

pytestmark = pytest.mark.slots


def script(here: Path, **hparams: Any) -> Any:
    given = {
        "record": str(here), "once": str(here / "once"), "store_every": 3, "shard": True,
        "refused_at": 4, **hparams,
    }  # fmt: skip
    return toy_config(
        here, entrypoint="python3 core_script.py 6", searcher={"metric": "loss"},
        hyperparameters=given, max_restarts=1,
    )  # fmt: skip


@pytest.mark.parametrize("waits", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.usefixtures("warm_home")
def test_a_refused_checkpoint_can_be_caught_on_every_rank(tmp_path: Path, waits: bool) -> None:
    """The script goes on, and stores the next one; nothing of the refused one is committed."""
    config = script(tmp_path, waits=waits)
    result = drive(config)
    stored = CheckpointStore(config.checkpoint_storage.url).list()
    assert [each.progress.batches_trained for each in stored] == [3, 6]
    assert (result.batches_trained, result.checkpoint_at) == (6, 6)
    assert result.checkpoint_uuid == stored[-1].uuid
    for rank in (0, 1):
        seen = lines(tmp_path, "script", rank)
        (error,) = [line["refused"] for line in seen if "refused" in line]
        assert "is not committed: ranks 0 and 1 both saved a file 'same'" in error
        assert [line["step"] for line in seen if "step" in line] == [1, 2, 3, 4, 5, 6]
    assert not list(tmp_path.glob("home/**/staging/*/*")), "a refused checkpoint's files are left"


@pytest.mark.usefixtures("warm_home")
def test_a_refused_checkpoint_that_is_not_caught_ends_the_run(tmp_path: Path) -> None:
    """With the script's line, and without another start: it would be refused again."""
    with pytest.raises(RankFailed, match="both saved a file 'same'") as failure:
        drive(script(tmp_path, waits=True, catches=False))
    assert failure.value.is_trial_mistake
    assert "core_script.py" in str(failure.value.rank_traceback)
    assert [line["step"] for line in lines(tmp_path, "script", 0) if "step" in line] == [1, 2, 3, 4]
