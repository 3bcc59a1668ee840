"""Names of Lightning, transformers and memory, and what to do instead, for error messages. Imports none of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")
_BASES = ("LightningModule", "LightningDataModule", "Callback")


def by_name(answers: Mapping[str, str]) -> dict[str, str]:
    """Return the answer to each name; the table has the names of each answer."""
    return {name: answer for answer, names in answers.items() for name in names.split()}


_LOGGERS = "Pass loggers=..., or set report_to in TrainingArguments."

# Public names of Lightning's.
LIGHTNING_NAMES = by_name(
    {
        "Use SWA or EMA, or a schedule-free optimizer.": "StochasticWeightAveraging",
        "Derive from TaskModule.": "LightningModule",
        "Use TrainerCallback, and define the methods you need.": "Callback LambdaCallback",
        "Leave it out: every log has the learning rate.": "LearningRateMonitor",
        _LOGGERS: "TensorBoardLogger WandbLogger",
        "Pass train_dataset, eval_dataset and data_collator to the Trainer.": "LightningDataModule",
        "Print parameter_table(model), or run `hftrain estimate` for its memory.": "ModelSummary",
        "Read trainer.state.log_history, which trainer_state.json in each checkpoint holds too.": "CSVLogger",
        "Call trainer.tune.batch_size(), or set auto_find_batch_size=True in TrainingArguments.": "BatchSizeFinder",
        "Use hftrain's, or set gradient_accumulation_steps in TrainingArguments.": "GradientAccumulationScheduler",
        "Set output_dir to a URL such as s3://bucket/run to save to a store; the format is fixed.": "CheckpointIO",
        "Set save_strategy, save_steps and save_total_limit in TrainingArguments, or pass a SavePolicy.": (
            "ModelCheckpoint"
        ),
        "Set skip_memory_metrics=False in TrainingArguments.": "DeviceStatsMonitor",
        "Pass max_time='2h' to the Trainer.": "Timer",
        "Call trainer.tune.lr(), or try several with Trainer.hyperparameter_search.": "LearningRateFinder",
        "Use EarlyStoppingCallback.": "EarlyStopping",
        "Use Engine for a loop of your own, or Trainer with a TaskModule.": "Fabric",
        "Use hftrain.cli.fit(MyTask), which trains from a YAML file and options.": "LightningCLI",
        "Use PredictionWriter.": "BasePredictionWriter",
        "Use ProgressCallback or RichProgressCallback.": "RichProgressBar TQDMProgressBar",
        "Use set_seed.": "seed_everything",
        "Use trainer.is_world_process_zero(), or state.is_world_process_zero in a callback.": "rank_zero_only",
    }
)

# Events here, and what Lightning, Keras and memory call them.
_EVENTS = by_name(
    {
        "on_epoch_begin": "on_train_epoch_start on_epoch_start",
        "on_epoch_end": "on_train_epoch_end training_epoch_end",
        "on_evaluate": (
            "on_eval on_eval_end on_evaluate_end on_evaluation on_evaluation_end on_test_end on_test_epoch_end "
            "on_validation_end on_validation_epoch_end test_epoch_end validation_epoch_end"
        ),
        "on_log": "on_logging on_logs",
        "on_optimizer_step": "on_before_zero_grad",
        "on_pre_optimizer_step": "on_after_backward on_before_optimizer_step",
        "on_predict": "on_predict_end on_predict_epoch_end",
        "on_prediction_step": "on_predict_batch_end on_test_batch_end on_validation_batch_end",
        "on_save": "on_checkpoint_save on_save_end on_saved",
        "on_step_begin": "on_batch_begin on_batch_start on_step_start on_train_batch_start",
        "on_step_end": "on_batch_end on_train_batch_end",
        "on_train_begin": "on_fit_start on_train_start on_training_begin",
        "on_train_end": "on_fit_end on_training_end",
    }
)
# Events without an equivalent here.
_OTHER_EVENTS = by_name(
    {
        "Override training_step of a Trainer subclass.": "on_before_backward",
        "Wrap train() in try and except.": "on_exception",
        "Let a callback derive from ExportableState too; its state is saved in each checkpoint.": (
            "on_load_checkpoint on_save_checkpoint"
        ),
        "Override evaluate() or prediction_step() of a Trainer subclass.": (
            "on_predict_batch_start on_predict_epoch_start on_predict_start on_sanity_check_end on_sanity_check_start "
            "on_test_batch_start on_test_epoch_start on_test_start on_validation_batch_start "
            "on_validation_epoch_start on_validation_start"
        ),
    }
)
# Methods of a callback that nothing here calls.
CALLBACK_METHODS = {
    **{name: f"Define {event}(self, args, state, control, **kwargs)." for name, event in _EVENTS.items()},
    **_OTHER_EVENTS,
    "on_save_checkpoint": "Define on_save, or derive from ExportableState too; its state is saved in each checkpoint.",
}
# Methods of a module that nothing here calls.
MODULE_METHODS = {
    **{name: f"Do it in {event} of a TrainerCallback." for name, event in _EVENTS.items()},
    **_OTHER_EVENTS,
    **by_name(
        {
            "Build the network in __init__, as self.model.": "configure_model configure_sharded_model",
            "Define training_step(self, batch).": "train_step",
            "Define prediction_step(self, batch).": "predict_step",
            "Do it at the end of the step.": "test_step_end training_step_end validation_step_end",
            "Do it in on_pre_optimizer_step or on_optimizer_step of a TrainerCallback.": "optimizer_step",
            "Do it in the collator, or at the start of the step.": "on_after_batch_transfer on_before_batch_transfer",
            "Leave it out: gradients are set to None after each update.": "optimizer_zero_grad",
            "Override _prepare_inputs of a Trainer subclass.": "transfer_batch_to_device",
            "Pass callbacks=[...] to the Trainer.": "configure_callbacks",
            "Pass train_dataset and eval_dataset to the Trainer and other datasets to evaluate() and predict(), or "
            "override its get_train_dataloader and get_eval_dataloader.": (
                "predict_dataloader test_dataloader train_dataloader val_dataloader"
            ),
            "Rename it to configure_optimizers.": "configure_optimiser configure_optimisers configure_optimizer",
            "Rename it to evaluation_step(self, batch).": "eval_step evaluate_step val_step valid_step validation_step",
            "Return the loss, whose backward pass the Trainer runs, or override training_step of the Trainer.": (
                "backward"
            ),
            "Return the schedule from configure_optimizers; it is stepped once per update.": "lr_scheduler_step",
            "Set max_grad_norm in TrainingArguments, or add GradientClipping.": "configure_gradient_clipping",
            "evaluation_step serves test sets too: trainer.evaluate(test_set, metric_key_prefix='test').": "test_step",
        }
    ),
}
# Attributes of a module that its methods use.
MODULE_ATTRIBUTES = by_name(
    {
        "A task does not know its Trainer. A TrainerCallback gets args, control, state.epoch, state.global_step and "
        "state.is_world_process_zero.": "current_epoch global_rank global_step trainer",
        "Call requires_grad_(False) on a network, and requires_grad_(True) afterwards.": "freeze",
        "Use self.optimizers['name'].toggle().": "toggle_optimizer",
        "Keep settings as attributes in __init__.": "hparams save_hyperparameters",
        "Return StepOutput(loss=loss, logs={'name': value}), which every tracker gets.": "log log_dict logger",
        "Return the loss; the Trainer steps the optimizer and the schedule. A TrainerCallback gets optimizer and "
        "lr_scheduler.": "lr_scheduler lr_schedulers optimizer",
        "With automatic_optimization = False, training_step calls self.optimizers['name'].minimize(loss); "
        "otherwise return the loss.": "manual_backward optimizers",
        "Return the values as outputs, which are gathered over processes.": "all_gather",
        "Set max_grad_norm in TrainingArguments, or add GradientClipping.": "clip_gradients",
        "The batch is on the device already; make new tensors with device=batch[...].device.": "device",
        "Use print(), or a logger.": "print",
    }
)
# Keywords of Lightning's Trainer and of loops from memory; those that rename a setting are in `COMMON_NAMES`.
TRAINER_KEYWORDS = by_name(
    {
        "A GPU is used if there is one; set use_cpu=True in TrainingArguments to avoid it.": "accelerator device",
        "Call torch.autograd.set_detect_anomaly(True).": "detect_anomaly",
        "Compute the loss in the task's training_step, or pass compute_loss_func=....": "criterion loss_fn",
        "Convert the model: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).": "sync_batchnorm",
        _LOGGERS: "logger",
        "Pass limit_eval_batches=... to the Trainer.": "limit_val_batches limit_test_batches",
        "Pass limit_train_batches=... to the Trainer.": "steps_per_epoch",
        "Pass data_collator=....": "collate_fn",
        "Pass eval_dataset=..., or override get_eval_dataloader to return the loader.": (
            "eval_dataloader eval_loader val_dataloader val_dataloaders val_loader"
        ),
        "Pass strategy= and precision=.": "plugins",
        "Pass the task as model=....": "task",
        "Pass train_dataset=..., eval_dataset=... and data_collator=....": "datamodule",
        "Pass train_dataset=..., or override get_train_dataloader to return the loader.": (
            "train_dataloader train_dataloaders train_loader"
        ),
        "Pass profiler='simple' or profiler='torch' to the Trainer.": "profiler",
        "Set disable_tqdm=True in TrainingArguments.": "enable_progress_bar",
        "Pass sanity_eval_batches=... to the Trainer.": "num_sanity_val_steps",
        "Set eval_strategy='epoch', or eval_strategy='steps' and eval_steps in TrainingArguments.": (
            "check_val_every_n_epoch val_check_interval"
        ),
        "Set full_determinism=True in TrainingArguments.": "deterministic",
        "Set save_strategy='no' in TrainingArguments.": "enable_checkpointing",
        "Set torch.backends.cudnn.benchmark = True.": "benchmark",
        "Start one process per device: torchrun --nproc_per_node=N script.py, or hftrain.launch; several machines with "
        "--nnodes=N.": "devices gpus num_gpus num_nodes",
        "Set num_train_epochs or max_steps, or pass max_time='2h' to the Trainer.": "max_duration",
    }
)
# Attributes of Lightning's Trainer.
TRAINER_ATTRIBUTES = by_name(
    {
        "Call evaluate(), for a test set evaluate(test_set, metric_key_prefix='test').": "test validate",
        "Call is_world_process_zero().": "is_global_zero",
        "Call save_model(), or set control.should_save = True in a callback.": "save save_checkpoint save_pretrained",
        "Call train().": "fit",
        "Call train(resume_from_checkpoint=folder), or load its weights into the model.": "load_from_checkpoint",
        "Read args.device.": "device",
        "Read callback_handler.callbacks.": "callbacks",
        "Read state.epoch, state.global_step, state.max_steps.": "current_epoch estimated_stepping_batches global_step",
        "Read state.log_history.": "callback_metrics logged_metrics",
        "Read task, or model.": "lightning_module",
        "Set control.should_training_stop.": "should_stop",
    }
)
# Public names of transformers' training modules that hftrain lacks.
TRANSFORMERS_NAMES = by_name(
    {
        "Annotate with collections.abc.Callable.": "DataCollator",
        "Call model.get_base_model().": "unwrap_peft_model",
        "It is a method of the Trainer.": (
            "get_learning_rates get_num_trainable_parameters get_optimizer_group log_metrics save_metrics save_state"
        ),
        "Leave it out: a resume compares them.": "compare_trainer_and_checkpoint_args",
        "Leave it out: checkpoints are read with weights_only=True.": "safe_globals",
        "Leave it out: the Trainer does it, or does not need it.": (
            "align_special_tokens get_tpu_sampler reissue_pt_warnings remove_dummy_checkpoint "
            "validate_quantization_for_training"
        ),
        "Neptune closed its service in March 2026; use WandbCallback or another tracker.": "NeptuneCallback",
        "Override _load_rng_state.": "set_rng_state_for_device",
        "Pass the folder to from_pretrained, or override _load_from_checkpoint.": "load_sharded_checkpoint",
        "Read attention_mask.": "is_attention_mask_causal",
        "Read loader.sampler, or loader.batch_sampler.sampler.": "get_dataloader_sampler",
        "Read logging_dir of the arguments.": "default_logdir",
        "Set disable_tqdm=True.": "suppress_progress_bars",
        "Set fsdp_config={'transformer_layer_cls_to_wrap': [name]}.": "get_module_class_from_name",
        "Set optim='galore_adamw_layerwise' or another layerwise optimizer, which needs no stand-in.": (
            "LayerWiseDummyOptimizer LayerWiseDummyScheduler"
        ),
        "Set optim_target_modules, which is matched by the Trainer.": "check_target_module_exists",
        "Set save_total_limit.": "rotate_checkpoints",
        "Set skip_memory_metrics=False.": "TrainerMemoryTracker",
        "SigOpt is discontinued; use default_hp_space_optuna.": "default_hp_space_sigopt",
        "Use DataCollatorForLanguageModeling(tokenizer, whole_word_mask=True).": "DataCollatorForWholeWordMask",
        "Use GreedyLR, which averages losses itself.": "StreamingAverage",
        "Use HfArgumentParser, which reads booleans.": "str_to_bool",
        "Use IntervalStrategy.": "EvaluationStrategy",
        "Use LengthGroupedSampler, or train_sampling_strategy='group_by_length'.": "BatchRebalanceSampler",
        "Use ProgressCallback.": "DEFAULT_PROGRESS_CALLBACK",
        "Use [DefaultFlowCallback].": "DEFAULT_CALLBACKS",
        "Use get_last_checkpoint.": "sort_checkpoints",
        "Use nested_concat, which pads.": (
            "expand_like nested_new_like numpy_pad_and_concatenate torch_pad_and_concatenate"
        ),
        "Use nested_gather and nested_truncate.": "DistributedTensorGatherer nested_xla_mesh_reduce",
        "Use nested_concat for batches, and nested_numpify at the end.": "EvalLoopContainer",
        "Use nested_gather with torch.tensor(scalars).": "distributed_broadcast_scalars",
        "Use the name of the file: 'optimizer.pt', 'scaler.pt', 'scheduler.pt', 'trainer_state.json' or "
        "'training_args.bin'.": "OPTIMIZER_NAME SCALER_NAME SCHEDULER_NAME TRAINER_STATE_NAME TRAINING_ARGS_NAME",
        "Use torch.atleast_1d or numpy.atleast_1d.": "atleast_1d",
        "Use torch.optim.AdamW, or optim='adamw_torch'.": "AdamW",
        "Use torch.utils.data.DistributedSampler, which repeats samples to fill up.": (
            "DistributedSamplerWithLoop SequentialDistributedSampler ShardSampler"
        ),
        "Write a function, or a class with __call__(self, features).": "DataCollatorMixin",
    }
)


def lightning_base(thing: Any) -> str | None:
    """Return which of Lightning's classes an object, or a class, derives from; None if none."""
    kind = thing if isinstance(thing, type) else type(thing)
    names = [each.__name__ for each in kind.__mro__ if each.__module__.partition(".")[0] in _PACKAGES]
    return next((name for name in _BASES if name in names), None)
