"""The public names of the library."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import trial_core
import trial_core.core
import trial_core.deepspeed
import trial_core.experimental.client
import trial_core.experimental.core_v2
import trial_core.pytorch
from trial_core.deepspeed import dsat


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (module, name)
        for module in (trial_core, trial_core.core, trial_core.deepspeed, trial_core.pytorch)
        for name in module.__all__
    ],
)
def test_every_exported_name_exists(module: object, name: str) -> None:
    """Every exported name exists, and `dir` lists it."""
    assert getattr(module, name) is not None
    assert name in dir(module)


@pytest.mark.parametrize("module", [trial_core, trial_core.deepspeed])
def test_unknown_names_are_refused(module: object) -> None:
    """An unknown name raises AttributeError."""
    with pytest.raises(AttributeError, match="has no attribute 'Estimator'"):
        module.Estimator  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("module", "name", "hint"),
    [
        (trial_core, "TrialContext", "use trial_core.deepspeed.DeepSpeedTrialContext"),
        (trial_core.core, "DummyTrainContext", "did you mean 'TrainContext'?"),
        (trial_core.experimental.core_v2, "url_reverse_webui_exp_view", "use the report in the"),
        (trial_core.experimental.client, "create_experiment", "use trialflow train"),
        (trial_core.pytorch, "CheckpointLoadContext", "use trial_core.pytorch.PyTorchTrialContext"),
        (trial_core.pytorch, "Dataloader", "did you mean 'DataLoader'?"),
        (dsat, "autotune", "use DeepSpeed's own autotuner"),
        (trial_core.deepspeed, "DataLoader", "use trial_core.pytorch.DataLoader"),
        (trial_core.deepspeed, "DeepspeedTrial", "did you mean 'DeepSpeedTrial'?"),
    ],
)
def test_unknown_names_say_what_to_use(module: object, name: str, hint: str) -> None:
    """A replacement, or a similar name."""
    with pytest.raises(AttributeError, match=re.escape(f"no attribute {name!r}; {hint}")):
        getattr(module, name)


REFERENCE_LINES = """
import trial_core as det; det.pytorch.deepspeed.DeepSpeedTrial; det.pytorch.DataLoader
from trial_core import deepspeed, pytorch; pytorch.MetricReducer; deepspeed.DeepSpeedTrial
from trial_core.pytorch import DataLoader, PyTorchCallback, TorchData, deepspeed
from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext, ModelParallelUnit
from trial_core.deepspeed import overwrite_deepspeed_config, DeepSpeedTrialController
import trial_core.rank.trial.device_transfer
from trial_core.pytorch import adapt_batch_sampler, data_length, to_device
assert callable(to_device)
det.errors.InvalidExperimentException; assert det.get_cluster_info() is None
import logging; logging.basicConfig(format=det.LOG_FORMAT); det.InvalidHP; det.ClusterInfo
from trial_core.rank.data.samplers import RepeatSampler; import trial_core.rank.data.samplers
from trial_core.pytorch import experimental; experimental.torch_batch_process
from trial_core.pytorch.experimental import TorchBatchProcessor, TorchBatchProcessorContext
from trial_core.experimental import client, Determined; client.get_checkpoint
import trial_core.transformers; det.transformers.DetCallback
from trial_core.pytorch import dsat; dsat.get_ds_config_from_hparams; det.pytorch.dsat
from trial_core import util; util.merge_dicts; det.util.merge_dicts; det.import_from_path
det.core.init; det.core.DistributedContext; det.init
from trial_core import core; core.PreemptMode.WorkersAskChief; core.DownloadMode.NoSharedDownload
"""


def test_determineds_import_lines_work() -> None:
    """With ``determined`` replaced by ``trial_core``, in a fresh interpreter."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", REFERENCE_LINES], check=True)


def test_the_checkpoint_store_does_not_import_torch() -> None:
    """So it can be used on a machine without torch."""
    look = "import sys, trial_core; trial_core.CheckpointStore; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "ignore", "-c", look], check=True)
