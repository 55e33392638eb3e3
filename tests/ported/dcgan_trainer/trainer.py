"""Its script: in a cluster the searcher's length counts, locally 100 batches."""

import logging

import determined as det
import model
import yaml
from determined import pytorch
from determined.pytorch import deepspeed as det_ds


def main(config_file: str, local: bool) -> None:
    info = det.get_cluster_info()
    if local:
        with open(config_file) as f:
            experiment_config = yaml.load(f, Loader=yaml.SafeLoader)
        hparams = experiment_config["hyperparameters"]
        data_config = experiment_config["data"]
        max_length = pytorch.Batch(100)
        latest_checkpoint = None
    else:
        hparams = info.trial.hparams
        data_config = info.trial._config["data"]
        max_length = None
        latest_checkpoint = info.latest_checkpoint
    with det_ds.init() as train_context:
        trial = model.DCGANTrial(train_context, hparams, data_config)
        trainer = det_ds.Trainer(trial, train_context)
        trainer.fit(max_length=max_length, latest_checkpoint=latest_checkpoint)


if __name__ == "__main__":
    local = det.get_cluster_info() is None
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    main(config_file="mnist.yaml", local=local)
