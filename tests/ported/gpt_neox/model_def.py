"""The shape of Determined's `gpt_neox`: a pipeline with an mpu, loaders of the trial, a reducer for
metrics, and a callback that adds a metric."""

import math
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from determined.pytorch import DataLoader, MetricReducer, PyTorchCallback, deepspeed as det_ds

VOCABULARY, WINDOW = 16, 8


def cross_entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


class LMReducers(MetricReducer):
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.losses: list[float] = []

    def update(self, loss: float) -> None:
        self.losses.append(loss)

    def per_slot_reduce(self) -> Any:
        return sum(self.losses), len(self.losses)

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        sums, counts = zip(*per_slot_metrics, strict=False)
        return {"lm_loss": sum(sums) / sum(counts)}


class Perplexity(PyTorchCallback):
    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        metrics["lm_loss_ppl"] = math.exp(metrics["lm_loss"])


class GPT2Trial(det_ds.DeepSpeedTrial):
    def __init__(self, context: det_ds.DeepSpeedTrialContext) -> None:
        self.context = context
        args = self.context.get_hparams()
        width = args["hidden_size"]
        config = det_ds.overwrite_deepspeed_config(
            args["deepspeed_config"], args.get("overwrite_deepspeed_args", {})
        )
        layers = [
            LayerSpec(torch.nn.Embedding, VOCABULARY, width),
            *(LayerSpec(torch.nn.Linear, width, width) for _ in range(args["num_layers"])),
            LayerSpec(torch.nn.Linear, width, VOCABULARY),
        ]
        model = PipelineModule(
            layers=layers, num_stages=args["pipe_parallel_size"], loss_fn=cross_entropy
        )
        engine, _, _, _ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )
        self.model_engine = self.context.wrap_model_engine(engine)
        self.context.set_mpu(det_ds.make_deepspeed_mpu(self.model_engine.mpu))
        self.reducer = self.context.wrap_reducer(
            LMReducers(), for_training=False, for_validation=True
        )

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"perplexity": Perplexity()}

    def train_batch(
        self, data_iterator: Iterator[Any] | None, epoch_idx: int, batch_idx: int
    ) -> torch.Tensor | dict[str, Any]:
        loss = self.model_engine.train_batch(data_iter=data_iterator)
        return {"lm_loss": loss, "lr": self.model_engine.get_lr()[0]}

    def evaluate_batch(self, data_iterator: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        loss = self.model_engine.eval_batch(data_iterator)
        self.reducer.update(loss.item())
        return {}

    def build_training_data_loader(self) -> DataLoader:
        return self._windows(64)

    def build_validation_data_loader(self) -> DataLoader:
        return self._windows(32)

    def _windows(self, count: int) -> DataLoader:
        generator = torch.Generator().manual_seed(count)
        tokens = torch.randint(0, VOCABULARY, (count, WINDOW + 1), generator=generator)
        return DataLoader(
            torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:]),
            batch_size=self.model_engine.train_micro_batch_size_per_gpu(),
        )
