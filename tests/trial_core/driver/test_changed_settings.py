"""What a run says of changes since the checkpoint that it resumes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.manifests import new_manifest
from trial_core.checkpoint.resume_point import Restore, ResumePoint
from trial_core.config import ExperimentConfig
from trial_core.config.sections import EnvironmentConfig
from trial_core.driver.changed_settings import (
    changes_since_checkpoint,
    check_keep,
    other_hyperparameters,
)
from trial_core.errors import ConfigError
from trial_core.messages import RestoredSettings

NEW = "optimizer 0 (SGD): lr 0.1 -> 0.2"
KEPT = "scheduler 0 (OneCycleLR): total_steps stays 8 (not 4), because it is over"
UUID = "4f0c21aa-0000-4000-8000-000000000000"


def told(
    saved: dict[str, Any],
    given: dict[str, Any],
    settings: RestoredSettings = RestoredSettings(),  # noqa: B008 - frozen
    restore: Restore = "everything",
    lengths: tuple[int, int] = (4, 4),
    torch: str = "1",
) -> str:
    """The text; empty if there is none."""
    before, now = (
        experiment(length, each) for length, each in zip(lengths, (saved, given), strict=True)
    )
    manifest = new_manifest(
        4, uuid=UUID, hyperparameters=before.hyperparameters, config=before.digested(),
        versions={"torch": "1"},
    )  # fmt: skip
    point = ResumePoint(checkpoint=manifest, restore=restore)
    return ". ".join(changes_since_checkpoint(point, now, {"torch": torch}, settings))


def experiment(batches: int, hyperparameters: dict[str, Any]) -> ExperimentConfig:
    return ExperimentConfig(
        name="toy", entrypoint="toy:Trial", hyperparameters=hyperparameters,
        searcher={"name": "single", "metric": "loss", "max_length": {"batches": batches}},
    )  # fmt: skip


def test_changes_and_what_counts() -> None:
    """Both values of each; then what counts, and what stays."""
    settings = RestoredSettings([NEW], [KEPT])
    assert told({"lr": 0.1}, {"lr": 0.2}, settings, lengths=(8, 4), torch="2") == (
        f"checkpoint {UUID} (batch 4): changed since it was saved: hyperparameters.lr 0.1 -> 0.2, "
        f"searcher.max_length.batches 8 -> 4, torch 1 -> 2. The new values count: {NEW}. "
        f"The checkpoint's values stay: {KEPT}"
    )


@pytest.mark.parametrize(
    ("saved", "given", "text"),
    [
        ({"opt": {"lr": 0.1, "wd": 1}}, {"opt": {"lr": 0.2, "wd": 1}}, "opt.lr 0.1 -> 0.2"),
        ({}, {"depth": 12}, "depth 12, which is new"),
        ({"depth": 12}, {}, "depth 12, which is gone"),
        ({"betas": [0.9, 0.99]}, {"betas": (0.9, 0.999)}, "betas [0.9, 0.99] -> [0.9, 0.999]"),
        ({"opt": "adam"}, {"opt": None}, "opt adam -> None"),
    ],
)
def test_how_changes_are_named(saved: dict[str, Any], given: dict[str, Any], text: str) -> None:
    """By dotted names, also those that are new or gone."""
    assert told(saved, given).endswith(f"changed since it was saved: hyperparameters.{text}")


def test_names_out_of_a_storage_are_cleaned() -> None:
    """They are printed to terminals."""
    text = told({"a\x1b[31m\nb": 1}, {})
    assert text.endswith("hyperparameters.a 1, which is gone")


def test_of_many_changes_the_first_are_named() -> None:
    """And how many more there are."""
    text = told({str(i): 0 for i in range(20)}, {str(i): 1 for i in range(20)})
    assert text.endswith("hyperparameters.11 0 -> 1 and 8 more")


@pytest.mark.parametrize(
    ("saved", "given"),
    [
        ({"lr": 0.1}, {"lr": 0.1}),
        ({"lr": 1}, {"lr": 1.0}),
        ({"betas": [0.9, 0.99]}, {"betas": (0.9, 0.99)}),
        ({"layers": {1: "a"}}, {"layers": {"1": "a"}}),
        ({"model": {}}, {}),
    ],
)
def test_without_a_change_nothing_is_said(saved: dict[str, Any], given: dict[str, Any]) -> None:
    """Equal values may have another type in a manifest."""
    assert told(saved, given) == ""


def test_the_trial_may_build_its_optimizer_otherwise() -> None:
    """Its code has changed, or it takes a value from elsewhere."""
    assert told({}, {}, RestoredSettings([NEW])).endswith(f"(batch 4): The new values count: {NEW}")


def test_a_checkpoint_without_a_record() -> None:
    """It is compared as far as it goes, and keeps its values."""
    unknown = RestoredSettings(is_known=False)
    assert told({"lr": 0.1}, {"lr": 0.2}, unknown).endswith("so their values stay")
    assert told({"lr": 0.1}, {"lr": 0.1}, unknown) == ""


def test_a_new_trial_with_anothers_state() -> None:
    """Its experiment is another one: only the hyperparameters are compared. Weights have none."""
    text = told({"lr": 0.1}, {"lr": 0.2}, restore="state", lengths=(4, 8))
    assert text.endswith("changed since it was saved: hyperparameters.lr 0.1 -> 0.2")
    assert told({"lr": 0.1}, {"lr": 0.2}, restore="weights") == ""
    assert not changes_since_checkpoint(ResumePoint(), experiment(4, {}), {}, RestoredSettings())


def test_a_checkpoint_that_is_only_validated() -> None:
    """Its metrics depend on the hyperparameters; the experiment's others may have changed."""
    saved = new_manifest(4, uuid=UUID, hyperparameters={"dropout": 0.1})
    assert other_hyperparameters(saved, experiment(8, {"dropout": 0.1})) == []
    assert other_hyperparameters(saved, experiment(4, {"dropout": 0.0})) == [
        f"checkpoint {UUID} (batch 4) was trained with other hyperparameters than these, which "
        "count: hyperparameters.dropout 0.1 -> 0"
    ]
    of_another_program = new_manifest(4, hyperparameters={})
    assert other_hyperparameters(of_another_program, experiment(4, {"dropout": 0.0})) == []


def test_environment_variables_are_told_without_their_values() -> None:
    """Some are credentials. A checkpoint that does not record them is not compared."""
    now = experiment(4, {}).model_copy(
        update={"environment": EnvironmentConfig(environment_variables={"TOKEN": "SECRET"})}
    )
    texts = []
    for digest in ("none", "", now.environment_digest("gpt-0123abcd")):
        saved = new_manifest(4, uuid=UUID, config=now.digested(), environment_digest=digest)
        point = ResumePoint.continuing(saved)
        texts.append(changes_since_checkpoint(point, now, {}, RestoredSettings()))
    text = "changed since it was saved: environment.environment_variables"
    assert texts == [[f"checkpoint {UUID} (batch 4): {text}"], [], []]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({"source_checkpoint_uuid": "abcd"}, "searcher.source_checkpoint_uuid: no effect, because"),
        (
            {"source_checkpoint": "/there", "source_weights_only": True},
            "searcher.source_checkpoint and searcher.source_weights_only: no effect, because",
        ),
        ({}, None),
    ],
)
def test_a_source_that_does_not_count_is_told(source: dict[str, Any], text: str | None) -> None:
    """The trial continues its own checkpoint. The source that it has begun with is not new."""
    before = experiment(4, {})
    now = before.starting_from(
        uuid=source.get("source_checkpoint_uuid"), path=source.get("source_checkpoint"),
        weights_only=source.get("source_weights_only", False),
    )  # fmt: skip
    for saved, given, expected in ((before, now, text), (now, now, None), (now, before, None)):
        point = ResumePoint.continuing(new_manifest(4, config=saved.digested()))
        told = changes_since_checkpoint(point, given, {}, RestoredSettings())
        found = [each.partition(" the trial")[0] for each in told if "no effect" in each]
        assert found == ([expected] if expected else [])


def test_what_may_be_kept() -> None:
    """A kind of part, or one of its settings."""
    check_keep(["optimizer", "scheduler", "scaler", "engine.gradient_clipping"])
    with pytest.raises(ConfigError, match=r"'lr' is not known; give optimizer, "):
        check_keep(["optimizer", "lr"])
    with pytest.raises(ConfigError, match="kept as a whole: give scheduler"):
        check_keep(["scheduler.T_max"])
