"""The report of a retraining."""

from __future__ import annotations

from typing import Any

import pytest

from trial_core.models.journal import Challenger, Champion, PromotionDecision, RetrainingPlan
from trial_core.models.promotion_rule import PromotionRule
from trial_core.models.records import Version
from trial_core.observe.report.retraining_report import RetrainingFacts

PLAN = RetrainingPlan(
    trial="gpt-0000beef",
    scheduled_at="2026-03-01T03:00:00+00:00",
    begun_at="2026-03-01T03:01:05Z",
    data={"begin": "2026-02-22", "text": "```\n# no heading"},
    champion=3,
    move=5,
)
CHAMPION = Version(
    number=3, model="gpt", checkpoint="aaaa", trial="gpt-old", experiment="gpt",
    batches_trained=700, metric="loss", smaller_is_better=True, value=0.6,
    at="2026-02-01T00:00:00Z", by="me@here",
)  # fmt: skip


def facts(**changes: Any) -> RetrainingFacts:
    given = {
        "model": "gpt",
        "start": "warm",
        "rule": PromotionRule("loss", True, 0.05),
        "plan": PLAN,
        "champion": CHAMPION,
        "champion_result": Champion(metrics={"accuracy": 0.5, "loss": 0.7, "old": "x"}, value=0.7),
        "challenger": Challenger(
            version=4, checkpoint="bbbb", batches_trained=900,
            metrics={"accuracy": 0.75, "loss": 0.5, "new": 3}, value=0.5,
        ),
        "outcome": PromotionDecision(promoted=True, why="better by 0.2"),
        **changes,
    }  # fmt: skip
    return RetrainingFacts(**given)


def test_champion_and_challenger() -> None:
    """All metrics with differences, the searcher metric first; versions, data and times."""
    lines = facts(places={"this report": "s3://b/report.md"}).render().splitlines()
    assert lines[:5] == ["# gpt", "", "**version 4 promoted**", "", "better by 0.2"]
    table = lines.index("| metric | champion | challenger | challenger - champion |")
    assert lines[table + 2 : table + 6] == [
        "| loss (decides) | 0.7 | 0.5 | -0.2 |",
        "| accuracy | 0.5 | 0.75 | +0.25 |",
        "| new |  | 3 |  |",
        "| old | x |  |  |",
    ]
    for line in (
        "| champion | 3 | `aaaa` | `gpt-old` | 700 |",
        "| challenger | 4 | `bbbb` | `gpt-0000beef` | 900 |",
        "smaller is better, by more than 0.05",
        "- scheduled for 2026-03-01 03:00:00 UTC, begun 1 min 05 s later",
        "- the challenger started with the champion's weights",
        "- this report: `s3://b/report.md`",
    ):
        assert line in lines


def test_data_stays_inside_its_block() -> None:
    """No text in the data ends the code block."""
    lines = facts().render().splitlines()
    begin = lines.index("```json")
    end = lines.index("```", begin)
    assert '  "begin": "2026-02-22",' in lines[begin:end]
    assert lines[end:].count("```") == 1
    assert "# no heading" not in lines


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        ({}, "version 4 promoted"),
        (
            {"outcome": PromotionDecision(promoted=False, why="")},
            "version 3 kept, version 4 not promoted",
        ),
        (
            {"outcome": PromotionDecision(promoted=False, why=""), "challenger": Challenger()},
            "version 3 kept, the challenger not promoted",
        ),
        (
            {"outcome": PromotionDecision(promoted=False, why=""), "champion": None},
            "no champion, version 4 not promoted",
        ),
        ({"outcome": None, "ended": "stopped: cancelled"}, "stopped: cancelled"),
        ({"outcome": None, "challenger": None, "champion_result": None}, "running"),
    ],
)
def test_headlines(changes: dict[str, Any], headline: str) -> None:
    """The outcome, or how the run ended without one."""
    assert f"**{headline}**" in facts(**changes).render()


def test_failures_after_the_decision() -> None:
    """Failed callbacks and other errors are shown below the decision."""
    text = facts(failed_callbacks={"hooks:tell": "ValueError: *no*"}, ended="failed: x").render()
    assert "**version 4 promoted**" in text
    assert "Callback hooks:tell failed: ValueError: \\*no\\*" in text
    assert "After the decision the run failed: x" in text


def test_a_challenger_of_a_search() -> None:
    """The report names the search, its trials, and the best trial with its hyperparameters."""
    found = Challenger(
        version=4, checkpoint="bbbb", value=0.5, trial="gpt-best", trials=3,
        hyperparameters={"lr": 0.1},
    )  # fmt: skip
    text = facts(challenger=found).render()
    assert "| challenger | 4 | `bbbb` | `gpt-best` | 0 |" in text
    assert "Search `gpt-0000beef` has begun 3 trials." in text
    assert '```json\n{\n  "lr": 0.1\n}\n```' in text
    assert "## Search" not in facts().render()
