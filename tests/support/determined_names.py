"""The public names of Determined 0.38.1, by module and class, as its modules define them.

Modules and classes that are of no use to a trial or script are named without their own names.
"""

from __future__ import annotations

NAMES: dict[str, str] = {
    "": (
        "ClusterInfo EnvContext ExperimentConfig InvalidHP LOG_FORMAT LegacyTrial RendezvousInfo "
        "ResourcesInfo TrialContext TrialController TrialInfo core errors experimental "
        "get_cluster_info gpu import_from_path keras launch layers lightning pytorch tensorboard "
        "transformers util"
    ),
    "ClusterInfo": (
        "agent_id allocation_id cluster_id container_addrs container_rank container_slot_counts "
        "gpu_uuids latest_checkpoint master_cert_file master_cert_name master_url session_token "
        "slot_ids task_id task_type trial user_data"
    ),
    "EnvContext": (
        "allocation_id container_gpus debug det_agent_id det_cluster_id det_experiment_id "
        "det_trial_id experiment_config hparams latest_checkpoint managed_training "
        "master_cert_file master_cert_name master_url on_cluster slot_ids steps_completed "
        "test_mode trial_run_id trial_seed use_gpu"
    ),
    "ExperimentConfig": (
        "average_training_metrics_enabled debug_enabled experiment_seed get_checkpoint_storage "
        "get_entrypoint get_min_checkpoint_period get_min_validation_period "
        "get_optimizations_config get_records_per_epoch get_searcher_metric "
        "native_parallel_enabled profiling_enabled profiling_interval profiling_sync_timings "
        "scheduling_unit slots_per_trial"
    ),
    "InvalidHP": "msg",
    "LegacyTrial": "trial_context_class trial_controller_class",
    "RendezvousInfo": "container_addrs container_rank container_slot_counts",
    "ResourcesInfo": "gpu_uuids",
    "TrialContext": (
        "distributed env from_config get_data_config get_experiment_config get_experiment_id "
        "get_hparam get_hparams get_initial_batch get_stop_requested get_tensorboard_path "
        "get_trial_id get_trial_seed set_stop_requested"
    ),
    "TrialController": (
        "close context env from_trial is_chief pre_execute_hook profiling_enabled run "
        "scheduling_unit supports_mixed_precision upload_tb_files use_horovod use_torch workloads"
    ),
    "TrialInfo": "experiment_id hparams trial_id trial_seed",
    "core": (
        "CheckpointContext Context DistributedContext DownloadMode DummyCheckpointContext "
        "DummyDistributedContext DummyExperimentalCoreContext DummyPreemptContext "
        "DummyProfilerContext DummySearcherContext DummySearcherOperation DummyTrainContext "
        "EarlyExitReason ExperimentalCoreContext PreemptContext PreemptMode ProfilerContext "
        "SearcherContext SearcherContextMissing SearcherMode SearcherOperation TensorboardMode "
        "TrainContext Unit init"
    ),
    "core.CheckpointContext": "delete download get_metadata restore_path store_path upload",
    "core.Context": (
        "alert checkpoint close distributed experimental info preempt profiler searcher start train"
    ),
    "core.DistributedContext": (
        "allgather allgather_local broadcast broadcast_local close cross_rank cross_size "
        "from_deepspeed from_horovod from_tf_config from_torch_distributed gather gather_local "
        "get_local_rank get_num_agents get_rank get_size local_rank local_size rank size"
    ),
    "core.DownloadMode": "LocalWorkersShareDownload NoSharedDownload",
    "core.EarlyExitReason": "INVALID_HP USER_REQUESTED_STOP",
    "core.ExperimentalCoreContext": "report_task_using_checkpoint report_task_using_model_version",
    "core.PreemptContext": "acknowledge_preemption_signal close should_preempt start",
    "core.PreemptMode": "ChiefOnly WorkersAskChief WorkersAskMaster",
    "core.ProfilerContext": "off on",
    "core.SearcherContext": "acknowledge_out_of_ops get_configured_units operations",
    "core.SearcherContextMissing": "acknowledge_out_of_ops get_configured_units operations",
    "core.SearcherMode": "ChiefOnly WorkersAskChief",
    "core.SearcherOperation": "length report_completed report_progress",
    "core.TensorboardMode": "AUTO MANUAL",
    "core.TrainContext": (
        "get_experiment_best_validation get_metadata get_tensorboard_path report_early_exit "
        "report_metrics report_progress report_training_metrics report_validation_metrics "
        "set_metadata set_status upload_tensorboard_files"
    ),
    "core.Unit": "BATCHES EPOCHS RECORDS",
    "errors": (
        "CheckpointNotFound CheckpointStateException EnterpriseOnlyError InternalException "
        "InvalidCheckpointException InvalidConfigurationException InvalidDataTypeException "
        "InvalidExperimentException InvalidModelException MultipleDownloadsFailed "
        "NoDirectStorageAccess ProxiedDownloadFailed SkipWorkloadException "
        "StopLoadingImplementation WorkerError WorkerFinishedGracefully"
    ),
    "errors.InternalException": "message",
    "experimental": (
        "Checkpoint Determined Experiment ExperimentReference Model ModelOrderBy ModelSortBy "
        "ModelVersion OrderBy Project Trial TrialOrderBy TrialReference TrialSortBy checkpoint "
        "client metrics model test_one_batch"
    ),
    "experimental.client": (
        "Checkpoint CheckpointOrderBy CheckpointSortBy CheckpointState Determined DownloadMode "
        "Experiment ExperimentOrderBy ExperimentSortBy ExperimentState Model ModelOrderBy "
        "ModelSortBy ModelVersion Oauth2ScimClient OrderBy Project ResourcePool TrainingMetrics "
        "Trial TrialMetrics TrialOrderBy TrialSortBy TrialState User ValidationMetrics Workspace "
        "add_oauth_client create_experiment create_model create_user create_workspace "
        "delete_workspace get_checkpoint get_experiment get_model get_model_by_id "
        "get_model_labels get_models get_session_username get_trial get_user_by_id "
        "get_user_by_name get_workspace iter_trials_metrics list_experiments list_models "
        "list_oauth_clients list_users list_workspaces login logout remove_oauth_client "
        "stream_trials_metrics stream_trials_training_metrics stream_trials_validation_metrics "
        "whoami"
    ),
    "experimental.client.Checkpoint": (
        "add_metadata delete download get_metrics get_pachyderm_commit reload remove_files "
        "remove_metadata uuid write_metadata_file"
    ),
    "experimental.client.CheckpointOrderBy": "ASC DESC",
    "experimental.client.CheckpointSortBy": (
        "BATCH_NUMBER END_TIME SEARCHER_METRIC STATE TRIAL_ID UUID"
    ),
    "experimental.client.CheckpointState": "ACTIVE COMPLETED DELETED ERROR PARTIALLY_DELETED",
    "experimental.client.Determined": (
        "add_oauth_client create_experiment create_model create_user create_workspace "
        "delete_workspace get_checkpoint get_experiment get_model get_model_by_id "
        "get_model_labels get_models get_session_username get_trial get_user_by_id "
        "get_user_by_name get_workspace iter_trials_metrics list_experiments list_models "
        "list_oauth_clients list_users list_workspaces logout remove_oauth_client "
        "stream_trials_metrics stream_trials_training_metrics stream_trials_validation_metrics "
        "whoami"
    ),
    "experimental.client.DownloadMode": "AUTO DIRECT MASTER",
    "experimental.client.Experiment": (
        "activate add_label archive await_first_trial cancel delete delete_tensorboard_files "
        "download_code get_pachyderm_config get_trials id iter_trials kill list_checkpoints "
        "list_trials move_to_project pause reload remove_label set_description set_labels "
        "set_name set_notes top_checkpoint top_n_checkpoints unarchive wait"
    ),
    "experimental.client.ExperimentOrderBy": "ASCENDING DESCENDING",
    "experimental.client.ExperimentSortBy": (
        "CHECKPOINT_COUNT CHECKPOINT_SIZE DESCRIPTION END_TIME FORKED_FROM ID NAME NUM_TRIALS "
        "PROGRESS PROJECT_ID RESOURCE_POOL SEARCHER_METRIC_VAL START_TIME STATE USER"
    ),
    "experimental.client.ExperimentState": (
        "ACTIVE CANCELED COMPLETED DELETED DELETE_FAILED DELETING ERROR PAUSED PULLING QUEUED "
        "RUNNING STARTING STOPPING_CANCELED STOPPING_COMPLETED STOPPING_ERROR STOPPING_KILLED"
    ),
    "experimental.client.Model": (
        "add_metadata archive delete get_version get_versions list_versions move_to_workspace "
        "name register_version reload remove_metadata set_description set_labels unarchive"
    ),
    "experimental.client.ModelOrderBy": "ASC ASCENDING DESC DESCENDING",
    "experimental.client.ModelSortBy": (
        "CREATION_TIME DESCRIPTION LAST_UPDATED_TIME NAME NUM_VERSIONS WORKSPACE"
    ),
    "experimental.client.ModelVersion": (
        "delete get_metrics iter_metrics model_name model_version reload set_name set_notes"
    ),
    "experimental.client.Oauth2ScimClient": "domain id name secret",
    "experimental.client.OrderBy": "ASC ASCENDING DESC DESCENDING",
    "experimental.client.Project": (
        "add_note archive id list_experiments reload remove_note set_description set_key set_name "
        "unarchive"
    ),
    "experimental.client.ResourcePool": (
        "add_bindings list_workspaces name remove_bindings replace_bindings"
    ),
    "experimental.client.TrainingMetrics": (
        "batch_metrics end_time group metrics steps_completed total_batches trial_id trial_run_id"
    ),
    "experimental.client.Trial": (
        "get_checkpoints get_experiment id iter_logs iter_metrics kill list_checkpoints logs "
        "reload select_checkpoint stream_metrics stream_training_metrics "
        "stream_validation_metrics top_checkpoint"
    ),
    "experimental.client.TrialMetrics": (
        "batch_metrics end_time group metrics steps_completed total_batches trial_id trial_run_id"
    ),
    "experimental.client.TrialOrderBy": "ASC ASCENDING DESC DESCENDING",
    "experimental.client.TrialSortBy": (
        "BATCHES_PROCESSED BEST_VALIDATION_METRIC CHECKPOINT_SIZE DURATION END_TIME ID "
        "LATEST_VALIDATION_METRIC LOG_RETENTION_DAYS RESTARTS START_TIME STATE"
    ),
    "experimental.client.TrialState": (
        "ACTIVE CANCELED COMPLETED ERROR PAUSED PULLING QUEUED RUNNING STARTING STOPPING_CANCELED "
        "STOPPING_COMPLETED STOPPING_ERROR STOPPING_KILLED"
    ),
    "experimental.client.User": (
        "activate change_display_name change_password deactivate link_with_agent reload rename "
        "user_id"
    ),
    "experimental.client.ValidationMetrics": (
        "batch_metrics end_time group metrics steps_completed total_batches trial_id trial_run_id"
    ),
    "experimental.client.Workspace": (
        "create_project delete_project get_project id list_pools list_projects name reload"
    ),
    "experimental.core_v2": (
        "Config DefaultConfig DistributedContext PreemptMode TensorboardMode UnmanagedConfig "
        "checkpoint close core distributed info init init_context preempt searcher train "
        "url_reverse_webui_exp_view"
    ),
    "experimental.core_v2.Config": (
        "checkpoint_storage data description external_experiment_id external_trial_id hparams "
        "labels name project searcher workspace"
    ),
    "experimental.core_v2.DefaultConfig": (
        "checkpoint_storage data description external_experiment_id external_trial_id hparams "
        "labels name project searcher workspace"
    ),
    "experimental.core_v2.UnmanagedConfig": (
        "checkpoint_storage data description external_experiment_id external_trial_id hparams "
        "labels name project searcher workspace"
    ),
    "pytorch": (
        "Batch CheckpointLoadContext DataLoader Epoch LRScheduler MetricReducer PyTorchCallback "
        "PyTorchExperimentalContext PyTorchTrial PyTorchTrialContext Reducer TorchData TrainUnit "
        "Trainer adapt_batch_sampler data_length deepspeed experimental init "
        "load_trial_from_checkpoint_path samplers to_device"
    ),
    "pytorch.Batch": "should_stop value",
    "pytorch.CheckpointLoadContext": (
        "autocast_forward_pass backward configure_apex_amp current_train_batch "
        "current_train_epoch device distributed experimental get_data_config "
        "get_enable_tensorboard_logging get_experiment_config get_experiment_id "
        "get_global_batch_size get_hparam get_hparams get_initial_batch get_per_slot_batch_size "
        "get_stop_requested get_tensorboard_path get_tensorboard_writer get_trial_id "
        "get_trial_seed is_epoch_end is_epoch_start lr_schedulers models optimizers profiler "
        "reduce_metrics reset_reducers run_cross_slot_reduction set_enable_tensorboard_logging "
        "set_profiler set_stop_requested step_optimizer to_device wrap_lr_scheduler wrap_model "
        "wrap_optimizer wrap_reducer wrap_scaler"
    ),
    "pytorch.DataLoader": (
        "batch_sampler batch_size collate_fn dataset drop_last generator get_data_loader "
        "multiprocessing_context num_workers persistent_workers pin_memory prefetch_factor "
        "sampler timeout worker_init_fn"
    ),
    "pytorch.Epoch": "should_stop value",
    "pytorch.LRScheduler": "StepMode get_last_lr load_state_dict state_dict step",
    "pytorch.MetricReducer": "cross_slot_reduce per_slot_reduce reset",
    "pytorch.PyTorchCallback": (
        "load_state_dict on_checkpoint_end on_checkpoint_load_start on_checkpoint_save_start "
        "on_checkpoint_upload_end on_checkpoint_write_end on_training_epoch_end "
        "on_training_epoch_start on_training_start on_training_workload_end on_trial_shutdown "
        "on_trial_startup on_validation_end on_validation_epoch_end on_validation_epoch_start "
        "on_validation_start state_dict"
    ),
    "pytorch.PyTorchExperimentalContext": (
        "disable_auto_to_device disable_dataset_reproducibility_checks use_amp"
    ),
    "pytorch.PyTorchTrial": (
        "build_callbacks build_training_data_loader build_validation_data_loader evaluate_batch "
        "evaluate_full_dataset evaluation_reducer get_batch_length train_batch "
        "trial_context_class trial_controller_class"
    ),
    "pytorch.PyTorchTrialContext": (
        "autocast_forward_pass backward configure_apex_amp current_train_batch "
        "current_train_epoch device distributed experimental get_data_config "
        "get_enable_tensorboard_logging get_experiment_config get_experiment_id "
        "get_global_batch_size get_hparam get_hparams get_initial_batch get_per_slot_batch_size "
        "get_stop_requested get_tensorboard_path get_tensorboard_writer get_trial_id "
        "get_trial_seed is_epoch_end is_epoch_start lr_schedulers models optimizers profiler "
        "reduce_metrics reset_reducers run_cross_slot_reduction set_enable_tensorboard_logging "
        "set_profiler set_stop_requested step_optimizer to_device wrap_lr_scheduler wrap_model "
        "wrap_optimizer wrap_reducer wrap_scaler"
    ),
    "pytorch.Reducer": "AVG MAX MIN SUM",
    "pytorch.TrainUnit": "should_stop value",
    "pytorch.Trainer": "configure_profiler fit",
    "pytorch.deepspeed": (
        "DeepSpeedTrial DeepSpeedTrialContext DeepSpeedTrialController ModelParallelUnit Trainer "
        "init make_data_parallel_mpu make_deepspeed_mpu overwrite_deepspeed_config"
    ),
    "pytorch.deepspeed.DeepSpeedTrial": (
        "build_callbacks build_training_data_loader build_validation_data_loader evaluate_batch "
        "evaluate_full_dataset evaluation_reducer get_batch_length load save train_batch "
        "trial_context_class trial_controller_class"
    ),
    "pytorch.deepspeed.DeepSpeedTrialContext": (
        "current_train_batch current_train_epoch disable_auto_grad_accumulation "
        "disable_dataset_reproducibility_checks distributed get_data_config "
        "get_enable_tensorboard_logging get_experiment_config get_experiment_id "
        "get_global_batch_size get_hparam get_hparams get_initial_batch "
        "get_num_micro_batches_per_slot get_per_slot_batch_size get_stop_requested "
        "get_tensorboard_path get_tensorboard_writer get_train_micro_batch_size_per_gpu "
        "get_trial_id get_trial_seed is_epoch_end is_epoch_start models "
        "num_micro_batches_per_slot profiler reduce_metrics reset_reducers "
        "run_cross_slot_reduction set_enable_tensorboard_logging set_mpu set_profiler "
        "set_stop_requested to_device train_micro_batch_size_per_gpu use_pipeline_parallel "
        "wrap_model_engine wrap_reducer"
    ),
    "pytorch.deepspeed.ModelParallelUnit": (
        "data_parallel_rank data_parallel_world_size should_build_data_loader should_report_metrics"
    ),
    "pytorch.deepspeed.Trainer": "fit",
    "pytorch.experimental": (
        "TorchBatchProcessor TorchBatchProcessorContext get_default_device torch_batch_process"
    ),
    "pytorch.experimental.TorchBatchProcessor": "on_checkpoint_start on_finish process_batch",
    "pytorch.experimental.TorchBatchProcessorContext": (
        "device get_distributed_rank get_distributed_size get_hparams get_tensorboard_path "
        "prepare_model_for_inference reduce_metrics report_metrics report_task_using_checkpoint "
        "report_task_using_model_version reset_reducers run_cross_slot_reduction to_device "
        "upload_path wrap_reducer"
    ),
    "pytorch.samplers": (
        "DistributedBatchSampler DistributedSampler RepeatBatchSampler RepeatSampler "
        "ReproducibleShuffleBatchSampler ReproducibleShuffleSampler SkipBatchSampler SkipSampler"
    ),
    "pytorch.samplers.DistributedBatchSampler": "batch_sampler num_workers rank",
    "pytorch.samplers.RepeatBatchSampler": "batch_sampler",
    "pytorch.samplers.SkipBatchSampler": "batch_sampler length skip",
    "transformers": "DetCallback",
    "transformers.DetCallback": (
        "core_context filter_metrics info last_eval_metrics last_progress last_save "
        "last_train_metrics load_last_checkpoint on_epoch_end on_log on_save on_step_end "
        "searcher_metric time_metric user_data"
    ),
}
