"""Checkpoints to which several ranks contribute: their metadata are merged, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from trial_core.errors import TrialError
from trial_core.rank.core_api.checkpoints import _merged

STORE = """
import json, os, sys
import torch.distributed as dist
from pathlib import Path
from trial_core.errors import TrialError
from tests.trial_core.rank.core_api.test_script_host import Slot

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
slot = Slot(Path(os.environ["RUN_DIR"]), rank)
checkpoint, seen = slot.context.checkpoint, {}


def refused(name, **arguments):
    try:
        checkpoint.upload(shard=True, **arguments)
    except TrialError as error:
        seen[name] = str(error)


metadata = [{"steps_completed": 3, "of": {"0": 1}}, {"of": {"1": [2]}}][rank]
with checkpoint.store_path(metadata, shard=True) as (folder, uuid):
    slot.host.released(uuid)
seen["stored"] = {path.name: path.read_text() for path in folder.iterdir()}
refused("conflict", ckpt_dir=str(folder), metadata={"steps_completed": 3, "of": {"lr": rank}})
refused("no steps", ckpt_dir=str(folder), metadata={"lr": 1})
refused("no data", ckpt_dir=str(folder), metadata=[{"steps_completed": 3}, {"a": checkpoint}][rank])
refused("no folder", ckpt_dir=None, metadata={"steps_completed": 3})
refused("selector", ckpt_dir=[str(folder), None][rank], selector=bool)
print(json.dumps(seen))
dist.barrier()  # the store ends with rank 0
"""


@pytest.mark.long
@pytest.mark.slots
def test_the_metadata_of_all_ranks_are_stored(tmp_path: Path) -> None:
    """A mistake of one rank is refused on all of them, so none waits for another."""
    first, second = run_ranks(STORE, 2, RUN_DIR=str(tmp_path))
    stored = {"steps_completed": 3, "of": {"0": 1, "1": [2]}}
    assert json.loads(first.pop("stored")["metadata.json"]) == stored
    assert second.pop("stored") == {}
    assert first == second
    assert first["conflict"].startswith(
        'checkpoint.store_path: "of/lr" of rank 1 in metadata differs from what an earlier rank'
    )
    assert 'metadata needs "steps_completed"' in first["no steps"]
    assert first["no data"].startswith("rank 1: checkpoint.store_path: metadata is no plain data")
    assert "ckpt_dir is None on every rank" in first["no folder"]
    assert first["selector"].startswith("rank 1: checkpoint.upload: ckpt_dir is None; a rank")


@pytest.mark.parametrize(
    ("parts", "merged"),
    [
        ([{"a": 1}, {"b": 2}], {"a": 1, "b": 2}),
        ([{"a": 1}, {}, {"a": 1}], {"a": 1}),
        ([{"a": [1]}, {"a": [1]}], {"a": [1]}),
        ([{"a": {"c": 1}}, {"a": {"d": 1}}], {"a": {"c": 1, "d": 1}}),
        ([{"a": float("inf")}, {"a": float("inf")}], {"a": float("inf")}),
        ([{"a": [1]}, {"a": [2]}], '"a" of rank 1'),
        ([{"a": []}, {"a": 1}], '"a" of rank 1'),
        ([{"a": []}, {"a": {"c": 1}}], '"a" of rank 1'),
        ([{"a": {"c": 1}}, {"a": 1}], '"a" of rank 1'),
        ([{"a": {"c": 1}, "b": 1}, {"b": 1}, {"a": {"c": 2}, "b": 2}], '"a/c" of rank 2, "b" of'),
        ([{"a": 1}, {"a": 2}, {"a": 3}], '"a" of rank 1, 2 in metadata'),
    ],
)
def test_equal_values_and_mappings_are_merged(parts: list[dict[str, Any]], merged: Any) -> None:
    """As in the reference. A conflict names all names, with their ranks."""
    if isinstance(merged, dict):
        assert _merged(parts, "store_path") == merged
        return
    with pytest.raises(TrialError, match=merged):
        _merged(parts, "store_path")
