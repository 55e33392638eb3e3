"""The recipes of docs/guides/cookbook.md, each on two ranks. `test_docs_commands` runs the page."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import save_file

from tests.support.slots import Driven, OwnSlots, drive
from tests.support.snippets import SNIPPETS
from trial_core.config import ExperimentConfig
from trial_core.processes.slots.fork_server import ForkServer
from trial_core.processes.slots.launcher import launch_locally
from trial_core.processes.slots.slot_group import SlotGroup
from trialflow.deployments.cli.init import template_files

FILES = {s.title: s.text for s in SNIPPETS if s.document == "docs/guides/cookbook.md" and s.title}


class Cooked(NamedTuple):
    """What a recipe has reported, and its last checkpoint."""

    run: Driven
    saved: dict[str, Any]


pytestmark = pytest.mark.slots


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder: the files of `trialflow init`, and the recipes beside them."""
    made = tmp_path_factory.mktemp("cookbook")
    for title, text in {**template_files("pytorch"), **FILES}.items():
        (made / title).write_text(text)
    return made


@pytest.fixture(scope="module")
def ranks(folder: Path, warm_server: ForkServer) -> Iterator[SlotGroup]:
    """Two ranks, which import what is in the folder."""
    launcher = partial(launch_locally, warm_server)
    with OwnSlots(2, working_dir=folder, launcher=launcher) as group:
        yield group


@pytest.fixture
def cook(ranks: SlotGroup, folder: Path, tmp_path: Path) -> Callable[..., Cooked]:
    """Trains a recipe for 20 batches, with a validation and a checkpoint at the end."""

    def train(entrypoint: str, **fields: Any) -> Cooked:
        experiment = yaml.safe_load((folder / "experiment.yaml").read_text())
        experiment["searcher"]["max_length"] = {"batches": 20}
        changes = {
            "entrypoint": entrypoint, "code": str(folder), "tensorboard_logging": False,
            "resources": {"slots_per_trial": 2},
            "checkpoint_storage": f"file://{tmp_path}/checkpoints",
        }  # fmt: skip
        config = ExperimentConfig(**{**experiment, **changes, **fields})
        done = drive(ranks, config, tmp_path / "run", persist=True)
        files = tmp_path / "checkpoints" / "checkpoints" / done.checkpoints[-1]
        return Cooked(done, torch.load(files / "state_dict.pth"))

    return train


@pytest.mark.parametrize(
    ("entrypoint", "metrics"),
    [
        ("average:Averaged", {"loss"}),
        ("early:StopsEarly", {"loss"}),
        ("median:MedianError", {"loss", "median_error"}),
        ("two_sets:TwoSets", {"loss", "loss_common", "loss_rare"}),
    ],
)
def test_a_recipe_reports(
    cook: Callable[..., Cooked], entrypoint: str, metrics: Collection[str]
) -> None:
    """It trains, validates and saves; its validation has the metrics that the page names."""
    assert cook(entrypoint).run.validation[-1].keys() == metrics


def test_frozen_layers_are_not_trained(cook: Callable[..., Cooked]) -> None:
    """All layers are saved; the optimizer has the last one's weight and bias alone."""
    saved = cook("freeze:LastLayer").saved
    assert len(saved["models_state_dict"][0]) == 4
    trained = saved["optimizers_state_dict"][0]["state"]
    assert [trained[each]["exp_avg"].shape for each in trained] == [(1, 64), (1,)]


def test_low_rank_changes_are_all_that_is_trained(
    cook: Callable[..., Cooked], folder: Path
) -> None:
    """A checkpoint has the thin matrices of two layers, and nothing of the trained model."""
    layers = torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)
    save_file(torch.nn.Sequential(*layers).state_dict(), folder / "base.safetensors")
    saved = cook("lora:FineTune", checkpointing={"exclude_frozen_parameters": True}).saved
    names = [
        f"{layer}.parametrizations.weight.0.{each}" for layer in "02" for each in ("down", "up")
    ]
    assert list(saved["models_state_dict"][0]) == names
    assert all(saved["models_state_dict"][0][name].any() for name in names)
