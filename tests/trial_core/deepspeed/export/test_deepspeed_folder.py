"""DeepSpeed's converter gets nothing that the restricted reader has not read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.tensor_fragment import fragment_address

from tests.support.fingerprints import write_fingerprint
from trial_core.deepspeed.checkpoint_engine import CHECKPOINT_CLASSES
from trial_core.deepspeed.export.deepspeed_folder import write_deepspeed, write_universal
from trial_core.errors import CheckpointError
from trial_core.rank.state_files.safe_load import Reader

MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def checkpoint(folder: Path, name: str = "layer.weight", **model: Any) -> Path:
    """The files of one rank under ZeRO-1, of one weight."""
    four = torch.arange(4.0)
    (folder / "model0").mkdir(parents=True)
    torch.save(
        {
            "module": {name: four}, "dp_world_size": 1, "mp_world_size": 1, "iteration": 1,
            "param_shapes": [{name: torch.Size([4])}],
            "universal_checkpoint_info": {"universal_checkpoint_version": 0.2}, **model,
        },
        folder / "model0" / MODEL,
    )  # fmt: skip
    torch.save(
        {
            "optimizer_state_dict": {
                "zero_stage": 1,
                "param_slice_mappings": [{name: fragment_address(start=0, numel=4)}],
                "base_optimizer_state": {
                    "state": {0: {"exp_avg": four, "exp_avg_sq": four}},
                    "param_groups": [{"params": [0]}],
                },
                "single_partition_of_fp32_groups": [four],
                "group_paddings": [0],
                "partition_count": [1],
            }
        },
        folder / "model0" / OPTIMIZER,
    )
    return folder


def convert(folder: Path) -> int:
    reader = Reader(classes=CHECKPOINT_CLASSES)
    return write_universal(folder, 0, folder / "target", "global_step1_universal", reader)


def files(folder: Path) -> set[Path]:
    return {each for each in folder.rglob("*") if each.is_file() and "target" not in each.parts}


def test_a_file_in_a_subfolder_is_not_read(tmp_path: Path) -> None:
    """DeepSpeed would unpickle it because of its name, on any level."""
    folder, sprung = checkpoint(tmp_path / "saved"), tmp_path / "sprung"
    (folder / "model0" / "more").mkdir()
    torch.save({"evil": Trap(sprung)}, folder / "model0" / "more" / "mp_rank_00")
    assert convert(folder) == 1
    assert not sprung.exists()
    assert not (folder / "model0").exists()
    assert not list((folder / "target").rglob("more"))


@pytest.mark.parametrize("file", [MODEL, OPTIMIZER, "layer_00_expert_0_model_states.pt"])
def test_objects_that_are_not_trusted_are_refused(tmp_path: Path, file: str) -> None:
    """In each of the files."""
    folder, sprung = checkpoint(tmp_path / "saved"), tmp_path / "sprung"
    torch.save({"evil": Trap(sprung)}, folder / "model0" / file)
    with pytest.raises(CheckpointError, match="can run code"):
        convert(folder)
    assert not sprung.exists()


@pytest.mark.parametrize(
    "file",
    [MODEL, OPTIMIZER, "more/layer_00_expert_0_model_states.pt", "mp_rank_01", "layer_01-model"],
)
def test_files_that_are_not_trusted_are_not_handed_on(tmp_path: Path, file: str) -> None:
    """To bare DeepSpeed, which would unpickle them without limits."""
    folder, sprung = checkpoint(tmp_path / "saved"), tmp_path / "sprung"
    target, reader = tmp_path / "target", Reader(classes=CHECKPOINT_CLASSES)
    (folder / "model0" / "more").mkdir()
    content = (folder / "model0" / MODEL).read_bytes()
    torch.save({"evil": Trap(sprung)}, folder / "model0" / file)
    with pytest.raises(CheckpointError, match="can run code"):
        write_deepspeed(folder, 0, target, "global_step1", reader)
    assert not target.exists()
    assert not sprung.exists()
    (folder / "model0" / file).write_bytes(content)
    assert write_deepspeed(folder, 0, target, "global_step1", reader) >= 2


@pytest.mark.parametrize("name", ["/{}/weight", "../../{}", "layer/../../../{}", "..", "layer.*"])
def test_names_that_lead_out_of_the_export_are_refused(tmp_path: Path, name: str) -> None:
    """Nothing is written there."""
    folder = checkpoint(tmp_path / "saved", name.format(str(tmp_path / "out").lstrip("/")))
    before = files(tmp_path)
    with pytest.raises(CheckpointError, match="outside of the export"):
        convert(folder)
    assert {each.name for each in files(tmp_path) - before} <= {MODEL, OPTIMIZER}


class Hiding:
    """Unpickled, a Counter that has a name, and whose own `items` tells of none."""

    def __reduce__(self) -> Any:
        return Counter, ({"../../out": 1},), {"items": set}


def test_no_object_hides_its_names(tmp_path: Path) -> None:
    """The reader constructs it, and DeepSpeed would get a copy that tells them."""
    with pytest.raises(CheckpointError, match="outside of the export"):
        convert(checkpoint(tmp_path / "saved", any=Hiding()))


def test_a_path_is_not_a_name(tmp_path: Path) -> None:
    """The reader constructs paths; DeepSpeed would join them, and unpickle what is there."""
    sprung = tmp_path / "sprung"
    name: Any = Path("../../../model0/evil")
    folder = checkpoint(tmp_path / "saved", name)
    evil = folder / "model0" / "evil" / "0"
    evil.mkdir(parents=True)
    torch.save(Trap(sprung), evil / "fp32.01")
    with pytest.raises(CheckpointError, match="outside of the export"):
        convert(folder)
    assert not sprung.exists()


@pytest.mark.parametrize("prefix", [Path("../../out"), "../../out"])
@pytest.mark.parametrize("key", ["ds_autoep_layers", "autoep_layers"])
def test_names_of_experts_that_lead_out_are_refused(tmp_path: Path, key: str, prefix: Any) -> None:
    """DeepSpeed makes names of weights of this text."""
    layers = [{"expert_key_prefix": prefix, "moe_layer_id": 0}]
    with pytest.raises(CheckpointError, match="outside of the export"):
        convert(checkpoint(tmp_path / "saved", **{key: layers}))


def test_a_name_with_a_slash_is_a_weights(tmp_path: Path) -> None:
    """Parts of a module may have such names."""
    folder = checkpoint(tmp_path / "saved", "blocks.a/b.weight")
    assert convert(folder) == 1
    assert (folder / "target/global_step1_universal/zero/blocks.a/b.weight/fp32.pt").exists()


def test_other_weights_than_those_of_the_model_are_refused(tmp_path: Path) -> None:
    """DeepSpeed has confused names before."""
    folder = checkpoint(tmp_path / "saved")
    write_fingerprint(folder, "layer.weight", torch.arange(4.0).flip(0))
    with pytest.raises(CheckpointError, match=r"1 of the exported tensors .* layer\.weight"):
        convert(folder)


@pytest.mark.parametrize(
    "text", ["[1]", "[" * 99_999, '{"engines": [7]}', "{}"], ids=["list", "deep", "number", "none"]
)
def test_fingerprints_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    """By the name of the file."""
    folder = checkpoint(tmp_path / "saved")
    (folder / "trialflow").mkdir()
    (folder / "trialflow" / "fingerprints-00.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"fingerprints-00\.json"):
        convert(folder)
