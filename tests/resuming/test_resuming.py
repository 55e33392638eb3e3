"""Each cell of the table of docs/guides/resuming.md, by runs that are changed and resumed.

All ways besides one are long tests, and so are the resumes that end ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.resuming.studies import OTHERS, SETTINGS, InScripts, OnSlots, Seen, Study
from tests.resuming.table import KEPT, NEW, NONE, PAGE, REFUSED, ROWS, SAME, with_table
from tests.support.slots import SlotGroup

pytestmark = pytest.mark.slots
OLD = {"lr": 0.01, "weight_decay": 0.1, "betas": [0.9, 0.99], "eps": 1e-8, "clip": 0.5, "ema": 0.5}

Way = tuple[str, str, int, str, dict[str, Any]]
"""Column, how its ranks start, their number, the class of the trial, its hyperparameters."""

WAYS: dict[str, Way] = {
    "FSDP2": ("torch", "slots", 2, "Torch", {"sharding": "fsdp2"}),
    "ZeRO 2": ("deepspeed", "slots", 2, "Deep", {"zero_stage": 2, "own": True}),
    "script": ("trainer", "script", 1, "Torch", {}),
}
"""With ``own``, schedule and optimizer are DeepSpeed's, else torch's."""

LONG: dict[str, Way] = {
    "one rank": ("torch", "slots", 1, "Torch", {}),
    "DDP": ("torch", "slots", 2, "Torch", {}),
    **{
        f"ZeRO {stage}{'' if own else ' client'}": (
            "deepspeed", "slots", 2, "Deep", {"zero_stage": stage, "own": own},
        )
        for stage in range(4) for own in (True, False) if (stage, own) != (2, True)
    },
    "ZeRO 2 bf16": ("deepspeed", "slots", 2, "Deep", {"zero_stage": 2, "bf16": True}),
    "DeepSpeedTrial in a script": ("trainer", "script", 1, "Deep", {"zero_stage": 2}),
}  # fmt: skip

DEFAULT = "ZeRO 2"
FAILING = {key for key, row in ROWS.items() if REFUSED in row}
"""Ranks end with such a resume. A script catches the error."""


@pytest.fixture(scope="module")
def study(
    warm_slots: Callable[[int], SlotGroup], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Study]:
    """The study of a way."""
    known: dict[str, Study] = {}

    def of(name: str) -> Study:
        if name not in known:
            _, start, ranks, trial, hparams = {**WAYS, **LONG}[name]
            given = (tmp_path_factory.mktemp("study"), ranks, trial, hparams)
            known[name] = OnSlots(warm_slots, *given) if start == "slots" else InScripts(*given)
        return known[name]

    return of


def cases() -> list[Any]:
    found = []
    for way, (column, _, _, trial, _) in {**WAYS, **LONG}.items():
        for key, row in ROWS.items():
            if getattr(row, column) == NONE or (key == "scale" and trial == "Deep"):
                continue
            is_default = way == DEFAULT and key not in FAILING
            # The default way's tests share the warm ranks of all others.
            marks = [] if way == DEFAULT else [pytest.mark.xdist_group(f"resuming {way}")]
            found.append(
                pytest.param(
                    way, key, id=f"{key}-{way}",
                    marks=marks if is_default else [*marks, pytest.mark.long],
                )
            )  # fmt: skip
    return found


@pytest.mark.parametrize(("way", "key"), cases())
def test_what_counts(study: Callable[[str], Study], way: str, key: str) -> None:
    """As the table says, in all batches after the resume."""
    runs, column = study(way), {**WAYS, **LONG}[way][0]
    assert OBSERVED[key](runs) == getattr(ROWS[key], column)


@pytest.mark.long
@pytest.mark.xdist_group("resuming script")
def test_a_fit_keeps_what_it_is_asked_to_keep(study: Callable[[str], Study]) -> None:
    """One setting of an optimizer; the others are the new ones. What keeps nothing is told."""
    kept = study("script")["kept"]
    assert kept.values("lr") == [OLD["lr"]] * 4
    assert kept.values("weight_decay") == [SETTINGS["weight_decay"]] * 4
    assert "lr stays 0.01 (not 0.02), because you asked for it (keep)" in kept.told
    assert "Not kept: scaler, because it has not changed" in kept.told


def test_the_page_has_the_table() -> None:
    """Else: ``python -m tests.resuming.table``."""
    page = PAGE.read_text()
    assert with_table(page) == page


# ------------------------------------------------------------------------------ what was observed


def counting(new: bool, old: bool) -> str:
    return NEW if new and not old else KEPT if old and not new else f"neither: {new}, {old}"


def of_optimizer(name: str) -> Callable[[Study], str]:
    """In each batch the new value; the weights are those of a run whose trial has set it itself."""

    def observed(runs: Study) -> str:
        changed, by_hand = runs["settings"], runs["by hand"]
        seen = changed.values(name)
        assert f"{name} " in changed.told
        assert len(seen) == 4
        assert changed.values("weights") == by_hand.values("weights")
        assert changed.values("weights") != runs["unchanged"].values("weights")
        return counting(seen == [SETTINGS[name]] * 4, seen == [OLD[name]] * 4)

    return observed


def clip(runs: Study) -> str:
    """The length of the gradient with which the optimizer steps."""
    seen = runs["settings"].values("clipped")
    old = runs["unchanged"].values("clipped")
    assert old == pytest.approx([OLD["clip"]] * 4, rel=1e-3)
    return counting(
        seen == pytest.approx([OTHERS["clip"]] * 4, rel=1e-3),
        seen == pytest.approx([OLD["clip"]] * 4, rel=1e-3),
    )


def length(runs: Study) -> str:
    """The rates of a run that has had the new length, and rate, from its start."""
    assert "scheduler 0" in runs["rescheduled"].told
    seen = runs["rescheduled"].values("lr")
    return counting(
        seen == runs["from the start"].values("lr")[4:],
        seen == runs["whole scheduled"].values("lr")[4:],
    )


def scale(runs: Study) -> str:
    """The interval; the scale itself is what training had made of it."""
    seen = runs["settings"].values("grows")
    assert runs["settings"].values("scale") == [8.0] * 4
    return counting(seen == [OTHERS["growth_interval"]] * 4, seen == [100] * 4)


def micro(runs: Study) -> str:
    """More micro-batches of fewer samples; or steps in every second batch."""
    if runs.is_torch:
        weights = runs["accumulated"].values("weights")
        return counting(len({*weights}) == 3, len({*weights}) == 4)
    sizes = {len(line["samples"]) for each in runs["settings"].batches[0] for line in each}
    return counting(sizes == {OTHERS["micro_batch"]}, sizes == {4})


def smaller(runs: Study) -> str:
    """The same samples as in batches of the old size: two batches make up one of those."""
    assert "batch size 16 -> 8" in runs["smaller"].told
    halves, whole = in_batches(runs["smaller"]), in_batches(runs["whole"])
    assert [len(each) for each in halves] == [8] * 4
    seen = [sorted(halves[i] + halves[i + 1]) for i in (0, 2)]
    return counting(seen == [sorted(each) for each in whole[4:6]], halves == whole[4:])


def in_batches(run: Seen) -> list[list[float]]:
    """The samples of each batch, of all ranks."""
    return [[each for rank in ranks for each in rank] for ranks in zip(*run.samples(), strict=True)]


def seed(runs: Study) -> str:
    """The samples of a run that has had the seed from its start."""
    assert "seed 1 -> 5" in runs["rescheduled"].told
    seen = runs["rescheduled"].samples()
    return counting(
        seen == [rank[4:] for rank in runs["from the start"].samples()],
        seen == [rank[4:] for rank in runs["whole scheduled"].samples()],
    )


def shuffle(runs: Study) -> str:
    """The samples in their order."""
    assert "order " in runs["settings"].told
    by_rank = runs["settings"].samples()
    seen = [sorted(sample for rank in by_rank for sample in rank[i]) for i in range(4)]
    expected = [[float(i) for i in range(16 * batch, 16 * batch + 16)] for batch in range(4, 8)]
    return counting(seen == expected, by_rank == runs["unchanged"].samples())


def ema(runs: Study) -> str:
    """The average of each batch, from the checkpoint's."""
    seen = runs["settings"].values("average")
    first = runs["settings"].batches[0][0][0]  # a batch may have several micro-batches
    assert first["average"][0] == runs["whole"].values("average")[3][2]
    by = [{d: d * was + (1 - d) * weight for d in (0.25, 0.5)} for was, weight, _ in seen]
    now = [each[2] for each in seen]
    return counting(now == [each[0.25] for each in by], now == [each[0.5] for each in by])


def refused(name: str, text: str) -> Callable[[Study], str]:
    """By name, with the way to do it."""

    def observed(runs: Study) -> str:
        error = runs[name].error
        assert text in error, error
        assert "source_weights_only" in error, error
        return REFUSED

    return observed


def nothing(runs: Study) -> str:
    """Weights, samples and settings of each batch and rank, with and without a schedule."""
    for whole, resumed in (("whole", "unchanged"), ("whole scheduled", "unchanged schedule")):
        assert runs[resumed].told == ""
        assert len(runs[resumed].batches[0]) == 4
        assert runs[resumed].batches == [rank[4:] for rank in runs[whole].batches]
    return SAME


OBSERVED: dict[str, Callable[[Study], str]] = {
    **{name: of_optimizer(name) for name in SETTINGS},
    "clip": clip,
    "length": length,
    "schedule": refused("schedule", "scheduler 0 was of "),
    "scale": scale,
    "smaller": smaller,
    "batch": refused("batch", "a batch had 16 samples"),
    "micro": micro,
    "seed": seed,
    "shuffle": shuffle,
    "optimizer": refused("optimizer", "optimizer 0 was of AdamW"),
    "groups": refused("groups", "group"),
    "ema": ema,
    "nothing": nothing,
}
