"""The table in docs/reference/determined-names.md about the reference's names matches the code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import trial_core
import trial_core.core
import trial_core.deepspeed
import trial_core.pytorch

TABLE = Path(__file__).parents[1] / "docs" / "reference" / "determined-names.md"
ROWS = re.findall(r"^\| `([A-Za-z_.]+)` \| (.+?) \|", TABLE.read_text(), flags=re.MULTILINE)
STATUSES = dict(ROWS)
EXISTS = {"works": True, "differs": True, "replaced": False, "not yet": False}
# Environment variables, and attributes that only instances have.
NOT_ATTRIBUTES = {
    "DET_CHIEF_IP",
    "DET_MANUAL_INIT_DISTRIBUTED",
    "deepspeed.DeepSpeedTrialContext.distributed",
    "pytorch.PyTorchTrialContext.distributed",
    "pytorch.PyTorchTrialContext.experimental",
}
FOR_THE_CONTROLLER = {"run_info", "training_batch", "steps_in_this_batch", "batch_ended"}


def exists(name: str) -> bool:
    found: Any = trial_core
    for part in name.split("."):
        if found is trial_core.pytorch and part == "samplers":
            found = importlib.import_module("trial_core.pytorch.samplers")
        elif not hasattr(found, part):
            return False
        else:
            found = getattr(found, part)
    return True


_CONTEXT = (
    "current_train_batch current_train_epoch distributed from_config get_data_config "
    "get_enable_tensorboard_logging get_experiment_config get_experiment_id "
    "get_global_batch_size get_hparam get_hparams get_initial_batch get_per_slot_batch_size "
    "get_stop_requested get_tensorboard_path get_tensorboard_writer get_trial_id get_trial_seed "
    "is_epoch_end is_epoch_start set_enable_tensorboard_logging set_profiler set_stop_requested "
    "to_device wrap_reducer"
)
_TRIAL = (
    "build_callbacks build_training_data_loader build_validation_data_loader evaluate_batch "
    "train_batch trial_context_class"
)
# The names of the reference's pages, and those of its packages that ported trials use.
REFERENCE: dict[str, str] = {
    "deepspeed": (
        "DeepSpeedTrial DeepSpeedTrialContext DeepSpeedTrialController ModelParallelUnit "
        "make_data_parallel_mpu make_deepspeed_mpu overwrite_deepspeed_config"
    ),
    "deepspeed.DeepSpeedTrial": f"{_TRIAL} load save trial_controller_class",
    "deepspeed.DeepSpeedTrialContext": (
        f"{_CONTEXT} disable_auto_grad_accumulation disable_dataset_reproducibility_checks "
        "get_num_micro_batches_per_slot get_train_micro_batch_size_per_gpu "
        "num_micro_batches_per_slot set_mpu train_micro_batch_size_per_gpu use_pipeline_parallel "
        "wrap_model_engine wrap_mpu"
    ),
    "pytorch": (
        "Batch CheckpointLoadContext DataLoader Epoch LRScheduler MetricReducer PyTorchCallback "
        "PyTorchExperimentalContext PyTorchTrial PyTorchTrialContext Reducer TorchData TrainUnit "
        "Trainer adapt_batch_sampler data_length init load_trial_from_checkpoint_path samplers "
        "to_device"
    ),
    "pytorch.PyTorchTrial": (f"{_TRIAL} evaluate_full_dataset evaluation_reducer get_batch_length"),
    "pytorch.PyTorchTrialContext": (
        f"{_CONTEXT} backward configure_apex_amp experimental step_optimizer wrap_lr_scheduler "
        "wrap_model wrap_optimizer wrap_scaler"
    ),
    "pytorch.PyTorchExperimentalContext": (
        "disable_auto_to_device disable_dataset_reproducibility_checks use_amp wrap_reducer"
    ),
    "pytorch.LRScheduler": "StepMode",
    "pytorch.LRScheduler.StepMode": (
        "MANUAL_STEP STEP_EVERY_BATCH STEP_EVERY_EPOCH STEP_EVERY_OPTIMIZER_STEP"
    ),
    "pytorch.Reducer": "AVG MAX MIN SUM",
    "pytorch.MetricReducer": "cross_slot_reduce per_slot_reduce reset",
    "pytorch.PyTorchCallback": (
        "load_state_dict on_checkpoint_end on_checkpoint_load_start on_checkpoint_save_start "
        "on_checkpoint_upload_end on_checkpoint_write_end on_training_epoch_end "
        "on_training_epoch_start on_training_start on_training_workload_end on_trial_shutdown "
        "on_trial_startup on_validation_end on_validation_epoch_end on_validation_epoch_start "
        "on_validation_start state_dict"
    ),
    "pytorch.Trainer": "configure_profiler fit",
    "pytorch.samplers": (
        "DistributedBatchSampler DistributedSampler RepeatBatchSampler RepeatSampler "
        "ReproducibleShuffleBatchSampler ReproducibleShuffleSampler SkipBatchSampler SkipSampler"
    ),
    "DistributedContext": (
        "allgather allgather_local broadcast broadcast_local from_deepspeed from_horovod "
        "from_torch_distributed gather gather_local get_local_rank get_num_agents get_rank "
        "get_size"
    ),
    "core": (
        "CheckpointContext Context DistributedContext DownloadMode PreemptContext PreemptMode "
        "SearcherContext SearcherMode SearcherOperation TrainContext Unit init"
    ),
    "core.TrainContext": (
        "get_experiment_best_validation get_tensorboard_path report_early_exit "
        "report_training_metrics report_validation_metrics set_status upload_tensorboard_files"
    ),
    "core.CheckpointContext": "delete download get_metadata restore_path store_path upload",
    "core.PreemptContext": "acknowledge_preemption_signal should_preempt",
    "core.SearcherContext": "acknowledge_out_of_ops get_configured_units operations",
    "core.SearcherOperation": "length report_completed report_progress",
    "errors": "InvalidExperimentException",
}
REFERENCE_NAMES = {
    f"{owner}.{name}" for owner, names in REFERENCE.items() for name in names.split()
} | {"DistributedContext", "get_cluster_info", "DET_CHIEF_IP", "DET_MANUAL_INIT_DISTRIBUTED"}


def test_every_name_of_the_reference_has_a_row() -> None:
    """Whatever its status is."""
    assert REFERENCE_NAMES - STATUSES.keys() == set()


@pytest.mark.parametrize(("name", "status"), [row for row in ROWS if row[0] not in NOT_ATTRIBUTES])
def test_the_status_of_a_name_is_right(name: str, status: str) -> None:
    """A name exists exactly if its status says so."""
    assert exists(name) == EXISTS[status], f'docs/reference/determined-names.md says "{status}"'


def test_each_name_has_one_row() -> None:
    """No name has two rows."""
    assert len(ROWS) == len(STATUSES)


def test_every_public_name_has_a_row() -> None:
    """Every exported name and every public method of the exported classes has a row."""
    exported = {f"deepspeed.{name}" for name in trial_core.deepspeed.__all__}
    exported |= {f"pytorch.{name}" for name in trial_core.pytorch.__all__}
    exported |= {f"core.{name}" for name in trial_core.core.__all__}
    assert exported - {"pytorch.deepspeed"} - STATUSES.keys() == set()
    classes = ("deepspeed.DeepSpeedTrial", "deepspeed.DeepSpeedTrialContext", "deepspeed.Trainer")
    of_scripts = ("core.TrainContext", "core.CheckpointContext", "core.PreemptContext",
                  "core.SearcherContext", "core.SearcherOperation")  # fmt: skip
    of_pytorch = ("PyTorchTrial", "PyTorchTrialContext", "PyTorchExperimentalContext",
                  "LRScheduler", "Trainer", "PyTorchCallback", "MetricReducer")  # fmt: skip
    for path in (*classes, *of_scripts, *(f"pytorch.{name}" for name in of_pytorch)):
        package, name = path.split(".")
        found = getattr(getattr(trial_core, package), name)
        methods = {f"{path}.{method}" for method in dir(found) if not method.startswith("_")}
        internal = {f"{path}.{method}" for method in FOR_THE_CONTROLLER}
        assert methods - internal - STATUSES.keys() == set()
