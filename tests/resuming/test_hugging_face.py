"""What Hugging Face's Trainer makes of changed arguments, as docs/guides/resuming.md says.

`TrialflowCallback` gives it the folder to resume from; the restore is its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
pytestmark = pytest.mark.long
Batches = list[dict[str, Any]]
GIVEN = {
    "learning_rate": 0.01, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_epsilon": 1e-8,
    "max_grad_norm": 0.5, "max_steps": 8, "warmup_steps": 0, "per_device_train_batch_size": 4,
    "logging_strategy": "no", "save_strategy": "no", "report_to": "none", "use_cpu": True,
    "disable_tqdm": True,
}  # fmt: skip
SETTINGS = {"learning_rate": 0.02, "weight_decay": 0.3, "adam_beta1": 0.8, "adam_epsilon": 1e-4}
Fit = Callable[..., Batches]


class _Samples(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.drawn: list[int] = []

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.drawn.append(index)
        ids = torch.arange(index, index + 8) % 16
        return {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory) -> Fit:
    """Trains with other arguments, from the start or from step 4 of 8; the steps, as noted."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    folder = tmp_path_factory.mktemp("out")
    shape = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}

    def train(latest: Path | None, **arguments: Any) -> Batches:
        samples, batches = _Samples(), []

        class Notes(TrainerCallback):
            def on_pre_optimizer_step(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
                gradients = [each.grad.flatten() for each in model.parameters()]
                group = optimizer.param_groups[0]
                batches.append(
                    {
                        "learning_rate": group["lr"], "weight_decay": group["weight_decay"],
                        "adam_beta1": group["betas"][0], "adam_epsilon": group["eps"],
                        "max_grad_norm": float(torch.cat(gradients).norm()),
                        "weights": [each.tolist() for each in model.parameters()],
                    }
                )  # fmt: skip

        torch.manual_seed(1)
        given = TrainingArguments(**{**GIVEN, "output_dir": str(folder), **arguments})
        model = GPT2LMHeadModel(GPT2Config(**shape))
        trainer = Trainer(model, given, train_dataset=samples, callbacks=[Notes()])
        trainer.train(resume_from_checkpoint=latest and str(latest))
        batches.append({"drawn": samples.drawn})
        return batches

    train(None, save_strategy="steps", save_steps=4)

    def of(resumes: bool = True, **arguments: Any) -> Batches:
        return train(folder / "checkpoint-4" if resumes else None, **arguments)

    return of


def rates(batches: Batches) -> list[float]:
    return [each["learning_rate"] for each in batches[:-1]]


def test_nothing_is_changed(fit: Fit) -> None:
    """Weights and settings of each step, and the samples, bit for bit."""
    whole, resumed = fit(resumes=False), fit()
    assert resumed[:-1] == whole[4:-1]
    assert whole[-1]["drawn"][16:] == resumed[-1]["drawn"]


def test_the_optimizer_is_the_checkpoints(fit: Fit) -> None:
    """Rate, weight decay, betas and eps; the clipping is new."""
    changed, same = fit(**SETTINGS, max_grad_norm=0.25), fit()
    for name in SETTINGS:
        assert [each[name] for each in changed[:-1]] == [each[name] for each in same[:-1]]
    clipped = [each["max_grad_norm"] for each in changed[:-1]]
    assert clipped == pytest.approx([0.25] * 4, rel=1e-3)


@pytest.mark.parametrize(
    "changed", [{"max_steps": 16}, {"warmup_steps": 8}, {"lr_scheduler_type": "cosine"}]
)
def test_the_schedule_is_new_one_step_late(fit: Fit, changed: dict[str, Any]) -> None:
    """Its function is not saved; the first rate and the base rate are the checkpoint's."""
    seen, start = rates(fit(**changed, learning_rate=0.02)), rates(fit(resumes=False, **changed))
    assert seen[0] == rates(fit())[0]
    assert seen[1:] == pytest.approx(start[5:])


@pytest.mark.parametrize(
    ("changed", "drawn"),
    [({"per_device_train_batch_size": 2}, 8), ({"gradient_accumulation_steps": 2}, 32)],
)
def test_another_batch_begins_elsewhere_in_the_data(
    fit: Fit, changed: dict[str, Any], drawn: int
) -> None:
    """It skips as many batches of the new size as it had trained of the old one."""
    whole = fit(resumes=False, max_steps=20)[-1]["drawn"]
    assert fit(**changed)[-1]["drawn"][:4] == whole[drawn : drawn + 4]


def test_another_seed_is_new_at_once(fit: Fit) -> None:
    """Also for the rest of the epoch."""
    seen, start = fit(seed=7)[-1]["drawn"], fit(resumes=False, seed=7)[-1]["drawn"]
    assert seen == start[16:]


def test_another_class_of_optimizer_ends_in_the_first_step(fit: Fit) -> None:
    """With a KeyError of torch's."""
    with pytest.raises(KeyError):
        fit(optim="sgd")
