"""The example of Hugging Face's libraries: trains under ZeRO-3, whole and with LoRA."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.flow import train
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig, load_config
from trialflow.deployments.cli.main import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_causal_lm"
pytestmark = [pytest.mark.slots, pytest.mark.server]
for needed in ("transformers", "accelerate", "datasets", "peft"):
    if find_spec(needed) is None:  # importing them takes seconds
        pytest.skip("the example needs trialflow[hf]", allow_module_level=True)


def example(file: str, here: Path, *changes: str) -> ExperimentConfig:
    """An experiment of the example on two ranks, whose libraries cache below `here`."""
    return load_config(
        EXAMPLE / file,
        [
            "resources.slots_per_trial=2", f"checkpoint_storage=file://{here}/checkpoints",
            f"environment.environment_variables.HF_HOME={here}/hugging-face", *changes,
        ],
    )  # fmt: skip


@pytest.mark.long
def test_the_example_trains_with_lora(here: Path) -> None:
    """Both ranks use one cache of the data; the metrics are those of all tokens; a checkpoint has
    no frozen weights."""
    config = example("lora.yaml", here, "searcher.max_length={batches: 3}")
    result = train(config)
    metrics = result.validation_metrics
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert 6 < metrics["loss"] < 9  # about that of guessing: log(2048) = 7.6
    caches = here.glob("hugging-face/datasets/**/cache-*.arrow")
    assert len([*caches]) == 6  # the split, tokens and windows of two sets, each made once
    (stored,) = CheckpointStore(config.checkpoint_storage.url).list(result.trial)
    base = here / "hugging-face/trialflow-example/llama/model.safetensors"
    assert sum(entry.size_bytes for entry in stored.files) < base.stat().st_size


@pytest.mark.long
def test_the_example_resumes_with_lora(here: Path) -> None:
    """Although its base model ties two names of a frozen weight, which no checkpoint has."""
    first = train(example("lora.yaml", here, "searcher.max_length={batches: 2}"))
    more = example("lora.yaml", here, "searcher.max_length={batches: 4}")
    assert train(more, trial=first.trial).batches_trained == 4


@pytest.mark.long
def test_the_example_learns_and_is_opened_by_its_libraries(
    here: Path,
) -> None:
    """All weights are trained; the exported folder gives the loss of the validation. LoRA begins
    with it, and the exported adapter fits it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    periods = "min_validation_period={batches: 30}", "min_checkpoint_period={batches: 30}"
    config = example("experiment.yaml", here, "searcher.max_length={batches: 60}", *periods)
    result = train(config)
    store = CheckpointStore(config.checkpoint_storage.url)
    first, last = store.list(result.trial)
    assert last.metrics["validation"]["loss"] < first.metrics["validation"]["loss"] < 7
    folder, adapter = here / "llama", here / "adapter"
    storage = ["--storage", store.url]
    assert main(["export", last.uuid, "--format", "hf", "--to", str(folder), *storage]) == 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The function is called with a list.", return_tensors="pt")["input_ids"]
    full = model(input_ids=ids, labels=ids).loss
    assert full < math.log(2048)

    lora = example(
        "lora.yaml", here, f"hyperparameters.model={folder}", "searcher.max_length={batches: 10}"
    )
    adapted = train(lora)
    assert adapted.validation_metrics["loss"] < last.metrics["validation"]["loss"] + 0.1
    uuid = adapted.checkpoint_uuid
    assert main(["export", uuid, "--format", "adapter", "--to", str(adapter), *storage]) == 0
    both = PeftModel.from_pretrained(model, adapter)
    assert both(input_ids=ids, labels=ids).loss != full
