"""The parts of a trial that PyTorchTrial and DeepSpeedTrial share."""
