"""What Hugging Face's Trainer makes of changed arguments, as docs/guides/resuming.md says.

`TrialflowCallback` gives it the folder to resume from, and says what counts; the restore is the
Trainer's own. A run's own words are compared with what is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trial_core.errors import CheckpointError
from trial_core.messages import RestoredSettings
from trial_core.rank.core_api.trainer_arguments import (
    TrainerRecord,
    changes,
    record_of,
    require_same_place,
    require_same_types,
)
from trial_core.rank.state_files.built_settings import read_resume_file

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

    def train(latest: Path | None, sets_rate: float | None = None, **arguments: Any) -> Batches:
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
        trainer = Trainer(
            model, given, train_dataset=samples, eval_dataset=samples, callbacks=[Notes()]
        )
        before = latest and read_resume_file(latest, TrainerRecord)
        record, refusal = record_of(trainer, True), ""
        told = RestoredSettings()

        class Sets(TrainerCallback):
            def on_train_begin(self, *_: Any, optimizer: Any, lr_scheduler: Any, **__: Any) -> None:
                if sets_rate is not None:
                    lr_scheduler.base_lrs = [sets_rate] * len(optimizer.param_groups)

        class Compares(TrainerCallback):
            """As `TrialflowCallback`, which refuses."""

            def on_epoch_begin(self, args: Any, state: Any, _: Any, **parts: Any) -> None:
                nonlocal record, told, refusal
                record = record.with_loader(parts["train_dataloader"], args, state)
                if before is not None:
                    now = state.global_step, parts["optimizer"], parts["lr_scheduler"]
                    told = changes(before, record, args, *now)
                    refusal = _refusal(require_same_place, before, record, args, now[0])

            def on_save(self, args: Any, state: Any, _: Any, **__: Any) -> None:
                record.write(folder / f"checkpoint-{state.global_step}")

        trainer.add_callback(Sets())
        trainer.add_callback(Compares())
        if before is not None and (refused := _refusal(require_same_types, before, record)):
            batches.append({"refusal": refused})
            return batches
        trainer.train(resume_from_checkpoint=latest and str(latest))
        batches.append({"drawn": samples.drawn, "told": told, "refusal": refusal})
        return batches

    train(None, save_strategy="steps", save_steps=4)

    def of(resumes: bool = True, **arguments: Any) -> Batches:
        return train(folder / "checkpoint-4" if resumes else None, **arguments)

    return of


def _refusal(check: Callable[..., None], *given: Any) -> str:
    try:
        check(*given)
    except CheckpointError as error:
        return str(error)
    return ""


def rates(batches: Batches) -> list[float]:
    return [each["learning_rate"] for each in batches[:-1]]


def test_nothing_is_changed(fit: Fit) -> None:
    """Weights and settings of each step, and the samples, bit for bit."""
    whole, resumed = fit(resumes=False), fit()
    assert resumed[:-1] == whole[4:-1]
    assert whole[-1]["drawn"][16:] == resumed[-1]["drawn"]
    assert (resumed[-1]["told"], resumed[-1]["refusal"]) == (RestoredSettings(), "")


def test_the_optimizer_is_the_checkpoints(fit: Fit) -> None:
    """Rate, weight decay, betas and eps; the clipping is new."""
    changed, same = fit(**SETTINGS, max_grad_norm=0.25), fit()
    for name in SETTINGS:
        assert [each[name] for each in changed[:-1]] == [each[name] for each in same[:-1]]
    clipped = [each["max_grad_norm"] for each in changed[:-1]]
    assert clipped == pytest.approx([0.25] * 4, rel=1e-3)
    stay = ", ".join(f"{name} stays {GIVEN[name]:g} (not {SETTINGS[name]:g})" for name in SETTINGS)
    why = "because it restores its optimizer and schedule whole"
    assert changed[-1]["told"] == RestoredSettings(
        new=["Trainer: max_grad_norm 0.5 -> 0.25"], kept=[f"Trainer: {stay}, {why}"]
    )


def test_what_a_callback_sets_at_the_start_counts(fit: Fit) -> None:
    """It is not told as the checkpoint's."""
    told = fit(learning_rate=0.02, sets_rate=0.02)[-1]["told"]
    assert told == RestoredSettings(new=["Trainer: learning_rate 0.01 -> 0.02"])


@pytest.mark.parametrize(
    "changed", [{"max_steps": 16}, {"warmup_steps": 8}, {"lr_scheduler_type": "cosine"}]
)
def test_the_schedule_is_new_one_step_late(fit: Fit, changed: dict[str, Any]) -> None:
    """Its function is not saved; the first rate and the base rate are the checkpoint's."""
    seen, start = rates(fit(**changed, learning_rate=0.02)), rates(fit(resumes=False, **changed))
    assert seen[0] == rates(fit())[0]
    assert seen[1:] == pytest.approx(start[5:])
    [text] = fit(**changed)[-1]["told"].new
    subject = "Trainer, its schedule after the next step and with the checkpoint's base rate"
    [(name, value)] = changed.items()
    assert text == f"{subject}: {name} {GIVEN.get(name, 'linear')} -> {value}"


@pytest.mark.parametrize(
    ("changed", "drawn"),
    [({"per_device_train_batch_size": 2}, 8), ({"gradient_accumulation_steps": 2}, 32)],
)
def test_another_batch_begins_elsewhere_in_the_data(
    fit: Fit, changed: dict[str, Any], drawn: int
) -> None:
    """It skips as many batches of the new size as it had trained of the old one."""
    whole = fit(resumes=False, max_steps=20)[-1]["drawn"]
    seen = fit(**changed)[-1]
    assert seen["drawn"][:4] == whole[drawn : drawn + 4]
    what = "8 samples of the epoch come twice" if drawn < 16 else "16 samples of the epoch are left"
    assert what in seen["refusal"]


@pytest.mark.parametrize(
    "changed",
    [
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 2, "ignore_data_skip": True},
    ],
)
def test_a_batch_that_loses_no_sample_is_not_refused(fit: Fit, changed: dict[str, Any]) -> None:
    """As many samples a step, or an epoch that begins anew."""
    seen = fit(**changed)[-1]
    assert seen["refusal"] == ""
    begin = 0 if "ignore_data_skip" in changed else 16
    whole = fit(resumes=False)[-1]["drawn"]
    assert seen["drawn"][:8] == whole[begin : begin + 8]


def test_another_seed_is_new_at_once(fit: Fit) -> None:
    """Also for the rest of the epoch."""
    seen, start = fit(seed=7)[-1]["drawn"], fit(resumes=False, seed=7)[-1]["drawn"]
    assert seen == start[16:]
    told = fit(seed=7)[-1]["told"]
    assert told.new == ["training data, also for the rest of this epoch: seed 42 -> 7"]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"optim": "sgd"}, "the optimizer (optim) was torch.AdamW"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, "was linear"),
    ],
)
def test_another_class_is_refused(fit: Fit, changed: dict[str, Any], says: str) -> None:
    """The Trainer would end in its first step, with a KeyError of torch's; or be at a loss."""
    assert says in fit(**changed)[-1]["refusal"]


def test_another_kind_of_the_same_class_is_not_refused(fit: Fit) -> None:
    """Such as the fused one, which another release of transformers has as its default."""
    assert fit(optim="adamw_torch_fused")[-1]["told"] == RestoredSettings()
