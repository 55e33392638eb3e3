"""Toy trials whose data the experiment names."""

from __future__ import annotations

from toy_trial import ToyTrial, samples

from trial_core.pytorch import DataLoader


class Fresh(ToyTrial):
    """Validates on as many samples as the experiment's data says, in text, as templates give it."""

    def build_validation_data_loader(self) -> DataLoader:
        count = int(self.context.get_data_config()["validation_samples"])
        return DataLoader(samples(count), batch_size=self.hparams["micro_batch_size"])
