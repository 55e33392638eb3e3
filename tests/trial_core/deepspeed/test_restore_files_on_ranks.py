"""Ranks on machines of their own restore from no more than what each of them fetches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.slots import toy_config

pytestmark = pytest.mark.slots

SCRIPT = Path(__file__).parents[2] / "support" / "scripts" / "own_share.py"
PIPELINE = {"entrypoint": "parallel_trials:PipelineTrial"}
SHARDS = r"model0/zero_pp_rank_\d_mp_rank_\d\d_\w+\.pt"
OPTIMIZERS = r"model0/\w+_optim_states\.pt"
STATES = r"trialflow/.*"
LAYERS = r"model0/layer_.*"

# How it is saved, how much is restored, and which files are not fetched: the other rank's, and
# those that nobody reads.
CASES: dict[str, tuple[int, dict[str, Any], str, str, str]] = {
    "ZeRO-1": (1, {}, "everything", f"{SHARDS}|{STATES}", ""),
    "ZeRO-3": (3, {}, "everything", f"{SHARDS}|{STATES}", ""),
    "pipeline": (1, PIPELINE, "everything", f"{SHARDS}|{STATES}|{LAYERS}", ""),
    "weights of ZeRO-1": (1, {}, "weights", "", f"{OPTIMIZERS}|{STATES}"),
    "weights of ZeRO-3": (3, {}, "weights", "", STATES),
    "weights of a pipeline": (1, PIPELINE, "weights", LAYERS, f"{OPTIMIZERS}|{STATES}"),
}

Said = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What came of each case, on both ranks."""
    folder = tmp_path_factory.mktemp("shares")
    cases = []
    for i, (stage, fields, restore, *_) in enumerate(CASES.values()):
        config = toy_config(folder / str(i), hyperparameters={"zero_stage": stage}, **fields)
        cases.append({"experiment": config.model_dump(mode="json"), "restore": restore})
    by_rank: list[Any] = run_ranks(
        SCRIPT.read_text(), 2, 1, FOLDER=str(folder), CASES=json.dumps(cases)
    )
    return dict(zip(CASES, map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_rank_goes_on_from_its_own_share(said: Said, case: str) -> None:
    """Bit for bit: the second batch after the checkpoint has the optimizer's moments in it."""
    for rank in said[case]:
        assert rank["restored"] == rank["went on"]
        assert all("loss" in metrics for metrics in rank["restored"])


@pytest.mark.parametrize("case", CASES)
def test_what_a_rank_does_not_read_is_not_fetched(said: Said, case: str) -> None:
    """Of that not one byte; of all the rest every byte."""
    *_, of_others, of_nobody = CASES[case]
    for rank, found in enumerate(said[case]):
        left_out = {
            path: size
            for path, (size, writer) in found["files"].items()
            if (writer != rank and re.fullmatch(of_others, path)) or re.fullmatch(of_nobody, path)
        }
        assert len(left_out) >= 2
        assert not left_out.keys() & found["here"].keys()
        whole = sum(size for size, _ in found["files"].values())
        assert sum(found["here"].values()) == whole - sum(left_out.values())
