"""Measures how much of a model's weights a rank holds while `from_pretrained` loads it.

Four ranks load the same folder, divided by ZeRO-3, because the experiment names the DeepSpeed
config. A small model is loaded first, for the imports. From then on, the growth of a rank's memory
counts: its own, and separately mapped files, whose pages the kernel can drop.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from benchmarks.figures import conclude
from benchmarks.ranks import experiment, launched
from trial_core.checkpoint.store import CheckpointStore
from trial_core.messages import BuildTrial, TrialBuilt

SMALL = "small"  # the small model's folder, below the other's
RANKS = 4
LAYER_MIB = 24
TARGETS = {"peak_share": 0.35}


def save_model(folder: Path, layers: int) -> None:
    """Save a Llama with random bf16 weights, in files of 100 MB.

    With 16 layers the largest weight has 1/46 of all, as in a Llama of 7 billion.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.bfloat16()
    model.save_pretrained(folder, max_shard_size="100MB")


def measure(folder: Path) -> dict[str, float]:
    """Load the folder. Return the figures, each the maximum of all ranks."""
    config = experiment(
        "benchmarks.pretrained_trial:PretrainedTrial",
        RANKS,
        f"file://{folder}/checkpoints",
        hyperparameters={
            "deepspeed_config": str(folder / "ds_config.json"),
            "folder": str(folder),
        },
    )
    build = BuildTrial(
        trial="benchmark-00000000",
        experiment=config.model_dump(mode="json"),
        run_dir=str(folder),
        storage=CheckpointStore(config.checkpoint_storage.url).spec,
    )
    with launched(RANKS) as slots:
        began = time.perf_counter()
        slots.request(build, TrialBuilt)
        seconds = time.perf_counter() - began
    ranks = [json.loads(file.read_text()) for file in folder.glob("rank-*.json")]
    return {"build_seconds": seconds, **{name: max(r[name] for r in ranks) for name in ranks[0]}}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.pretrained", description=__doc__)
    parser.add_argument("--mib", type=int, default=400, help="size of the model, about")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        save_model(folder, max(1, arguments.mib // LAYER_MIB))
        save_model(folder / SMALL, layers=1)
        zero3 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
        (folder / "ds_config.json").write_text(json.dumps(zero3))
        conclude(measure(folder), TARGETS)


if __name__ == "__main__":
    main()
