"""What a checkpoint of Hugging Face's Trainer may contain before the Trainer reads it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.pickle_fuzz import archive
from tests.trial_core.rank.state_files.test_safe_load import Trap
from trial_core.errors import CheckpointError
from trial_core.rank.state_files.trainer_folder import name_best_beside, require_safe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint-5" / "global_step5").mkdir(parents=True)
    return tmp_path / "checkpoint-5"


def test_what_a_trainer_saves_is_accepted(folder: Path) -> None:
    """numpy's random state, and arguments that the Trainer does not read."""
    torch.save(
        {"numpy": np.random.get_state(), "cpu": torch.get_rng_state()}, folder / "rng_state.pth"
    )
    torch.save(
        {"module": {"weight": torch.ones(2)}}, folder / "global_step5/mp_rank_00_model_states.pt"
    )
    torch.save(Trap(folder / "sprung"), folder / "training_args.bin")
    (folder / "latest").write_text("global_step5")
    require_safe(folder.parent, ())


@pytest.mark.parametrize(
    "name",
    [
        "optimizer.pt", "global_step5/mp_rank_00_model_states.pt", "rng_state.pth",
        "global_step5/training_args.bin", "../other/mp_rank_00_model_states.pt",
    ],
)  # fmt: skip
def test_hidden_code_is_refused_by_name(folder: Path, name: str) -> None:
    """Of the file and the class, with the way to allow it."""
    (folder.parent / "other").mkdir()
    torch.save({"module": Trap(folder / "sprung")}, folder / name)
    with pytest.raises(CheckpointError, match=r"checkpointing\.trusted") as refusal:
        require_safe(folder.parent, ())
    assert str(refusal.value).startswith(f"checkpoint-5/{name}".replace("checkpoint-5/../", ""))
    assert "pathlib.Path.touch" in str(refusal.value) or "getattr" in str(refusal.value)
    assert not (folder / "sprung").exists()


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_0/.metadata", "optimizer_0/__0_0.distcp"])
def test_a_distributed_checkpoint_needs_trust(folder: Path, name: str) -> None:
    """torch unpickles it, and pickles in it."""
    (folder / name).parent.mkdir()
    (folder / name).write_bytes(b"anything")
    with pytest.raises(CheckpointError, match=r"checkpointing\.trusted"):
        require_safe(folder.parent, ())


@pytest.mark.parametrize(
    "tag", ["../other", "/any", "..", "a/b", "", f"global_step5{' ' * 188}/../../other"]
)
def test_deepspeeds_tag_is_a_folder_next_to_it(folder: Path, tag: str) -> None:
    """Else files that were not read before would be."""
    (folder / "latest").write_text(tag)
    with pytest.raises(CheckpointError, match="global_step100"):
        require_safe(folder.parent, ())


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("/elsewhere/out/checkpoint-3", "checkpoint-3"), ("out/checkpoint-3", "checkpoint-3"),
        ("/shared/evil", None), ("..", None), ("checkpoint-3/..", None), (["a"], None),
    ],
)  # fmt: skip
def test_the_best_checkpoint_is_beside_the_fetched_one(
    folder: Path, stored: object, name: str | None
) -> None:
    """DeepSpeed unpickles the folder that the state names: only a checked one may be there."""
    file = folder / "trainer_state.json"
    file.write_text(json.dumps({"best_model_checkpoint": stored, "log": [math.nan, 3]}))
    name_best_beside(folder)
    state = json.loads(file.read_text())
    assert state["best_model_checkpoint"] == (name and str(folder.parent / name))
    assert math.isnan(state["log"][0])


@pytest.mark.parametrize(
    "text", [None, "{", "[]", "[" * 100_000, '{"best_model_checkpoint": null}']
)
def test_a_state_that_names_no_best_checkpoint_stays(folder: Path, text: str | None) -> None:
    """The Trainer says what is wrong with it."""
    file = folder / "trainer_state.json"
    if text is not None:
        file.write_text(text)
    name_best_beside(folder)
    assert (file.read_text() if file.exists() else None) == text


def test_an_adapter_names_no_module_to_import(folder: Path) -> None:
    """The Trainer loads adapters that lie below its folder, with their configs."""
    (folder / "second").mkdir()
    config = folder / "second" / "adapter_config.json"
    for text in ('{"megatron_core": "megatron.core"}', '{"peft_type": "LORA"}', "{"):
        config.write_text(text)
        require_safe(folder.parent, ())
    config.write_text('{"megatron_config": {"a": 1}, "megatron_core": "out.checkpoint-5.evil"}')
    with pytest.raises(CheckpointError, match=r"adapter_config\.json names .*evil"):
        require_safe(folder.parent, ())


DTYPE = b"cnumpy\ndtype\n"
OBJECT = DTYPE + b"(X\x01\x00\x00\x00O\x89\x88t"
CORE = f"c{np.random.get_state()[1].__reduce__()[0].__module__}\n_reconstruct\n".encode()
NEW = CORE + b"(cnumpy\nndarray\n(K\x00tccodecs\nencode\n".replace(b"ccodecs", b"c_codecs")
NEW += b"(X\x01\x00\x00\x00bX\x06\x00\x00\x00latin1tRtR"


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        (OBJECT + b"R", "dtype"), (OBJECT + b"\x81", "dtype"),
        (NEW + b"(K\x01(K\x01t" + DTYPE + b"(X\x02\x00\x00\x00u4\x89\x88tR\x89Ntb", "array"),
        (CORE + b"(cnumpy\nndarray\n(K\x05tNtR", "array"),
    ],
    ids=["call", "new object", "state", "size"],
)  # fmt: skip
def test_numpys_classes_make_nothing_but_a_random_state(
    folder: Path, program: bytes, kind: str
) -> None:
    """The Trainer allows them in rng_state.pth, and numpy believes what a pickle says."""
    (folder / "rng_state.pth").write_bytes(archive(b"\x80\x02" + program + b"."))
    with pytest.raises(CheckpointError, match=f"expected the {kind} of a random state"):
        require_safe(folder.parent, ())
