"""Ranks on different machines restore from only the files that each machine fetches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.slots import toy_config

pytestmark = pytest.mark.slots

SCRIPT = Path(__file__).parents[2] / "support" / "scripts" / "restore_on_machines.py"
PIPELINE = {"entrypoint": "parallel_trials:PipelineTrial"}
SHARDS = r"model0/zero_pp_rank_\d_mp_rank_\d\d_\w+\.pt"
OPTIMIZERS = r"model0/\w+_optim_states\.pt"
OF_RANK = r"trialflow/(rank|buffers)-\d+\.pt"
STATES = r"trialflow/.*"
LAYERS = r"model0/layer_.*"

Case = tuple[int, dict[str, Any], str, str, str]

# ZeRO stage, fields of the experiment, what is restored, which files of the other rank are not
# fetched, and which files no rank fetches.
CASES: dict[str, Case] = {
    "ZeRO-1": (1, {}, "everything", f"{SHARDS}|{OF_RANK}", ""),
    "pipeline": (1, PIPELINE, "everything", f"{SHARDS}|{OF_RANK}|{LAYERS}", ""),
    "weights of ZeRO-3": (3, {}, "weights", "", STATES),
}
MORE_CASES: dict[str, Case] = {
    "ZeRO-3": (3, {}, "everything", f"{SHARDS}|{OF_RANK}", ""),
    "weights of ZeRO-1": (1, {}, "weights", "", f"{OPTIMIZERS}|{STATES}"),
    "weights of a pipeline": (1, PIPELINE, "weights", LAYERS, f"{OPTIMIZERS}|{STATES}"),
}


@pytest.mark.long
@pytest.mark.parametrize("cases", [CASES, MORE_CASES])
def test_a_rank_restores_from_only_the_files_it_needs(
    tmp_path: Path, cases: dict[str, Case]
) -> None:
    """Training continues bit for bit, and no byte of another file is fetched.

    The second batch after the checkpoint depends on the optimizer's moments.
    """
    requests = []
    for i, (stage, fields, restore, *_) in enumerate(cases.values()):
        config = toy_config(tmp_path / str(i), hyperparameters={"zero_stage": stage}, **fields)
        requests.append({"experiment": config.model_dump(mode="json"), "restore": restore})
    outcomes: list[Any] = run_ranks(
        SCRIPT.read_text(), 2, 1, FOLDER=str(tmp_path), CASES=json.dumps(requests)
    )
    for rank, by_case in enumerate(outcomes):
        for (name, case), outcome in zip(cases.items(), by_case, strict=True):
            assert outcome["restored"] == outcome["uninterrupted"], name
            assert all("loss" in metrics for metrics in outcome["restored"])
            assert_fetched(outcome, rank, case)


def assert_fetched(outcome: dict[str, Any], rank: int, case: Case) -> None:
    """All files were fetched but those that the case excludes."""
    *_, of_other_rank, of_no_rank = case
    excluded = {
        path
        for path, (_, writer) in outcome["files"].items()
        if (writer != rank and re.fullmatch(of_other_rank, path)) or re.fullmatch(of_no_rank, path)
        if not path.startswith("trialflow/fingerprints-")  # what is loaded is compared with all
    }
    assert len(excluded) >= 2
    assert outcome["fetched"] == {
        path: size for path, (size, _) in outcome["files"].items() if path not in excluded
    }
