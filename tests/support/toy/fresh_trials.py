"""A toy trial whose data the experiment names."""

from __future__ import annotations

from toy_trial import ToyTrial, samples

from trial_core.pytorch import DataLoader


class Fresh(ToyTrial):
    """Validates on the number of samples in the experiment's data, a text from a template."""

    def build_validation_data_loader(self) -> DataLoader:
        count = int(self.context.get_data_config()["validation_samples"])
        return DataLoader(samples(count), batch_size=self.hparams["micro_batch_size"])
