"""Which names of tied weights a folder of Hugging Face's has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trial_core.checkpoint.weights.model_files import HFFacts, read_facts
from trial_core.checkpoint.weights.weights import SavedWeight
from trial_core.checkpoint.weights.write_hf_folder import write_model
from trial_core.errors import CheckpointError

FACTS = HFFacts(tied=["decoder.weight", "decoder.bias"])


def weight(value: float) -> SavedWeight:
    return SavedWeight(torch.Size([2]), torch.float32, lambda: torch.full((2,), value))


@pytest.mark.parametrize(
    ("is_bias_tied", "names", "word"),
    [
        (True, {"embed.weight", "embed.bias"}, True),
        (False, {"embed.weight", "embed.bias", "decoder.weight", "decoder.bias"}, False),
    ],
)
def test_all_ties_are_written_out_or_none(
    tmp_path: Path, is_bias_tied: bool, names: set[str], word: bool
) -> None:
    """`from_pretrained` ties all or none: a name that is left out would get random weights."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "config.json").write_text('{"tie_word_embeddings": true}')
    (tmp_path / "model").mkdir()
    shared, bias = weight(1), weight(2)
    own = {
        "embed.weight": shared, "embed.bias": bias, "decoder.weight": shared,
        "decoder.bias": bias if is_bias_tied else weight(3),
    }  # fmt: skip
    written = write_model(own, FACTS, tmp_path / "files", tmp_path / "model", "2GB")
    assert set(written) == names
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["tie_word_embeddings"] == word


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.safetensors", "{}"), ("pytorch_model.bin", "{}"), ("config.json", "[]"),
        ("model.safetensors.index.json", "{}"), ("config.json", "{"), ("other.json", "{}"),
    ],
)  # fmt: skip
def test_files_beside_the_config_are_no_weights(tmp_path: Path, name: str, text: str) -> None:
    """They would replace the exported ones, or run code. There is a config."""
    if name != "other.json":
        (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(text)
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match=name.replace("other", "config")):
        write_model({"a": weight(1)}, HFFacts(), tmp_path, tmp_path / "model", "2GB")


def test_a_stored_pattern_is_not_searched_for(tmp_path: Path) -> None:
    """A search for `(a+)+$` would not end."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model").mkdir()
    shared = weight(1)
    own = {"embed.weight": shared, "decoder.weight": shared}
    written = write_model(own, HFFacts(tied=[".*"]), tmp_path, tmp_path / "model", "2GB")
    assert set(written) == set(own)


@pytest.mark.parametrize(
    "text", ["[]", '{"hf": 1}', '{"frozen": 7}', '{"hf": {"merged": {"a": "b"}}}', "{" * 9999, "\0"]
)
def test_facts_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    """By their file; they come from the storage."""
    (tmp_path / "facts_00.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"facts_00\.json does not have a model's facts"):
        read_facts(tmp_path)
