"""Compares the GPT with two baselines, and prints text that it generates.

    python examples/gpt_stdlib/sample.py
    python examples/gpt_stdlib/sample.py s3://bucket/checkpoints --trial gpt-stdlib-1a2b3c4d
    python examples/gpt_stdlib/sample.py --prompt "class Queue" --bytes 800 --seed 7

Reads the trial's newest checkpoint from the storage. Needs neither a GPU nor DeepSpeed.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path

import torch
from data import Windows, baselines, load_text
from model import GPT, GPTConfig, next_byte_loss
from rich.console import Console, Group
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table

from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.fetch import fetch_files
from trial_core.config import load_config
from trial_core.errors import CheckpointError, CheckpointNotFound, TrialflowError

EXPERIMENT = Path(__file__).with_name("experiment.yaml")
WEIGHTS = "model0/mp_rank_00_model_states.pt"  # DeepSpeed's name under ZeRO 0 to 2
MICRO_BATCH = 64  # windows at a time


def main() -> None:
    """Find the checkpoint, compare it with the baselines and generate text."""
    arguments = _parse_arguments()
    torch.set_num_threads(1)  # more threads are slower with such small matrices
    try:
        store, manifest = find_checkpoint(arguments.storage, arguments.trial)
        model = load_model(store, manifest)
    except TrialflowError as error:
        sys.exit(f"sample.py: {error}")
    generator = torch.Generator().manual_seed(arguments.seed)
    prompt = arguments.prompt.encode()
    written = model.generate(prompt, arguments.bytes, arguments.temperature, generator)
    table = compare(model, manifest)
    Console().print(Group("", table, "", _panel(prompt + written), ""))


def find_checkpoint(storage: str | None, trial: str | None) -> tuple[CheckpointStore, Manifest]:
    """The newest checkpoint of a trial, by default of the experiment's newest trial.

    Raises:
        CheckpointNotFound: there is none.
    """
    config = load_config(EXPERIMENT)
    default = config.checkpoint_storage
    store = CheckpointStore(storage) if storage else CheckpointStore(default.url, default.options)
    trial = trial or store.newest_trial(config.name)
    manifest = store.newest(trial) if trial else None
    if manifest is None:
        raise CheckpointNotFound(
            f"no checkpoint of {trial or f'the experiment {config.name}'} in {store.url}; train "
            "one first, or give the storage of its checkpoints"
        )
    return store, manifest


def load_model(store: CheckpointStore, manifest: Manifest) -> GPT:
    """The model with the checkpoint's weights, on the CPU.

    Raises:
        CheckpointError: the weights are in several files, or damaged.
    """
    entries = [entry for entry in manifest.files if entry.path == WEIGHTS]
    if not entries:
        raise CheckpointError(
            f"checkpoint {manifest.uuid} has no {WEIGHTS}, because it was saved with ZeRO stage "
            f"{manifest.topology.zero_stage}; this script reads checkpoints of stages 0 to 2"
        )
    with tempfile.TemporaryDirectory() as folder:
        fetch_files(store, manifest.uuid, entries, Path(folder))
        states = torch.load(Path(folder, WEIGHTS), map_location="cpu", weights_only=True)
    model = GPT(GPTConfig.from_hparams(manifest.hyperparameters))
    model.load_state_dict(states["module"])
    return model.eval()


def compare(model: GPT, manifest: Manifest) -> Table:
    """A table of the losses of the model and of the baselines on the validation windows."""
    text = load_text()
    hparams = manifest.hyperparameters
    windows = Windows(text.validation, hparams["window"], hparams["validation_windows"])
    counted = baselines(text.training, windows)
    rows = {
        "how often each byte occurs (unigram)": counted.unigram,
        "the byte before (bigram)": counted.bigram,
        f"[bold]the GPT, after {manifest.progress.batches_trained} batches": bits_per_byte(
            model, windows
        ),
    }
    table = Table(title=f"Validation text, predicted from …  [dim]({manifest.trial})")
    table.add_column("")
    table.add_column("bits per byte", justify="right")
    table.add_column("loss (nats)", justify="right")
    for name, bits in rows.items():
        table.add_row(name, f"{bits:.3f}", f"{bits * math.log(2):.3f}")
    return table


@torch.no_grad()
def bits_per_byte(model: GPT, windows: Windows) -> float:
    """The model's mean loss on all windows, in bits."""
    inputs, targets = (side.view(len(windows), -1) for side in windows.pairs())
    total = 0.0
    for indices in torch.arange(len(windows)).chunk(-(-len(windows) // MICRO_BATCH)):
        total += next_byte_loss(model(inputs[indices]), targets[indices]).item() * len(indices)
    return total / len(windows) / math.log(2)


def _panel(text: bytes) -> Panel:
    decoded = text.decode(errors="replace")
    shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in decoded)
    code = Syntax(shown, "python", theme="ansi_dark", background_color="default", word_wrap=True)
    return Panel(code, title="Generated text", title_align="left")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare the GPT with baselines, and generate text."
    )
    parser.add_argument("storage", nargs="?", help="folder or URL of the checkpoints")
    parser.add_argument("--trial", help="id of the trial (default: the newest)")
    parser.add_argument("--prompt", default="def ", help="the beginning of the text")
    parser.add_argument("--bytes", type=int, default=500, help="length of the generated text")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="below 1: prefer likely bytes"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the generated text")
    arguments = parser.parse_args()
    if not arguments.prompt:
        parser.error("--prompt: expected at least one character, got none")
    if arguments.bytes < 1 or arguments.temperature <= 0:
        parser.error("--bytes and --temperature must be positive")
    return arguments


if __name__ == "__main__":
    main()
