"""Lightning's names and their equivalents here, for error messages. Does not import Lightning."""

from __future__ import annotations

from typing import Any

_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")
_BASES = ("LightningModule", "LightningDataModule", "Callback")

LIGHTNING_NAMES = {
    "BasePredictionWriter": "Use PredictionWriter.",
    "BatchSizeFinder": "Set auto_find_batch_size=True in TrainingArguments.",
    "Callback": "Use TrainerCallback.",
    "CheckpointIO": "Set output_dir to a URL such as s3://bucket/run to save to a store; the format is fixed.",
    "CSVLogger": "Read trainer.state.log_history, which trainer_state.json in each checkpoint holds too.",
    "DeviceStatsMonitor": "Set skip_memory_metrics=False in TrainingArguments.",
    "EarlyStopping": "Use EarlyStoppingCallback.",
    "Fabric": "Use Engine for a loop of your own, or Trainer with a TaskModule.",
    "GradientAccumulationScheduler": "Set gradient_accumulation_steps in TrainingArguments.",
    "LambdaCallback": "Derive from TrainerCallback and define the methods you need.",
    "LearningRateFinder": "Try several with Trainer.hyperparameter_search.",
    "LearningRateMonitor": "Leave it out: every log has the learning rate.",
    "LightningCLI": "Use HfArgumentParser(TrainingArguments), which turns settings and dataclasses into options.",
    "LightningDataModule": "Pass train_dataset, eval_dataset and data_collator to the Trainer.",
    "LightningModule": "Derive from TaskModule.",
    "ModelCheckpoint": "Set save_strategy, save_steps and save_total_limit in TrainingArguments, or pass a SavePolicy.",
    "ModelSummary": "Print the model, or run `hftrain estimate` for its memory.",
    "RichProgressBar": "Use RichProgressCallback.",
    "StochasticWeightAveraging": "Average the weights in a callback, or use a schedule-free optimizer.",
    "TQDMProgressBar": "Use ProgressCallback.",
    "Timer": "Stop from a callback: control.should_training_stop = True.",
    "TensorBoardLogger": "Set report_to='tensorboard' in TrainingArguments, or use TensorBoardCallback.",
    "WandbLogger": "Set report_to='wandb' in TrainingArguments, or use WandbCallback.",
    "rank_zero_only": "Use trainer.is_world_process_zero(), or state.is_world_process_zero in a callback.",
    "seed_everything": "Use set_seed.",
}

# Lightning's events, and the event here that fires at the same time.
_EVENTS = {
    "on_after_backward": "on_pre_optimizer_step",
    "on_before_optimizer_step": "on_pre_optimizer_step",
    "on_before_zero_grad": "on_optimizer_step",
    "on_fit_end": "on_train_end",
    "on_fit_start": "on_train_begin",
    "on_predict_batch_end": "on_prediction_step",
    "on_predict_end": "on_predict",
    "on_predict_epoch_end": "on_predict",
    "on_save_checkpoint": "on_save",
    "on_test_batch_end": "on_prediction_step",
    "on_test_end": "on_evaluate",
    "on_test_epoch_end": "on_evaluate",
    "on_train_batch_end": "on_step_end",
    "on_train_batch_start": "on_step_begin",
    "on_train_epoch_end": "on_epoch_end",
    "on_train_epoch_start": "on_epoch_begin",
    "on_train_start": "on_train_begin",
    "on_validation_batch_end": "on_prediction_step",
    "on_validation_end": "on_evaluate",
    "on_validation_epoch_end": "on_evaluate",
}
# Lightning's events without an equivalent here, and what to do.
_OTHER_EVENTS = {
    "on_before_backward": "Override training_step of a Trainer subclass.",
    "on_exception": "Wrap train() in try and except.",
    "on_load_checkpoint": "Derive a callback from ExportableState too; its state is saved in each checkpoint.",
    **dict.fromkeys(
        (
            "on_predict_batch_start", "on_predict_epoch_start", "on_predict_start", "on_sanity_check_end",
            "on_sanity_check_start", "on_test_batch_start", "on_test_epoch_start", "on_test_start",
            "on_validation_batch_start", "on_validation_epoch_start", "on_validation_start",
        ),
        "Override evaluate() or prediction_step() of a Trainer subclass.",
    ),
}  # fmt: skip
# Keras's events.
_KERAS = {"on_batch_begin": "on_step_begin", "on_batch_end": "on_step_end"}
# Common wrong names of events.
_MISNOMERS = {
    "on_batch_start": "on_step_begin",
    "on_checkpoint_save": "on_save",
    "on_epoch_start": "on_epoch_begin",
    "on_eval": "on_evaluate",
    "on_eval_end": "on_evaluate",
    "on_evaluate_end": "on_evaluate",
    "on_evaluation": "on_evaluate",
    "on_evaluation_end": "on_evaluate",
    "on_logging": "on_log",
    "on_logs": "on_log",
    "on_save_end": "on_save",
    "on_saved": "on_save",
    "on_step_start": "on_step_begin",
    "on_training_begin": "on_train_begin",
    "on_training_end": "on_train_end",
}


def _define(events: dict[str, str]) -> dict[str, str]:
    return {name: f"Define {event}(self, args, state, control, **kwargs)." for name, event in events.items()}


# Callback methods of other libraries, which nothing here calls, and what to do.
CALLBACK_METHODS = {
    **_define({**_EVENTS, **_KERAS}),
    **_OTHER_EVENTS,
    "on_save_checkpoint": "Define on_save, or derive from ExportableState too; its state is saved in each checkpoint.",
}

# The same, for wrong names of events.
CALLBACK_MISNOMERS = _define(_MISNOMERS)

_EVALUATES = "Define evaluation_step(self, batch); a torchmetrics child of the task sums over batches."
# Module methods of other libraries, which nothing here calls, and what to do.
MODULE_METHODS = {
    "backward": "Return the loss, whose backward pass the Trainer runs, or override training_step of the Trainer.",
    **{name: f"Do it in {event} of a TrainerCallback." for name, event in _EVENTS.items()},
    **_OTHER_EVENTS,
    "configure_callbacks": "Pass callbacks=[...] to the Trainer.",
    "configure_gradient_clipping": "Set max_grad_norm in TrainingArguments.",
    "configure_model": "Build the network in __init__, as self.model.",
    "configure_optimiser": "Rename it to configure_optimizers.",
    "configure_optimisers": "Rename it to configure_optimizers.",
    "configure_optimizer": "Rename it to configure_optimizers.",
    "configure_sharded_model": "Build the network in __init__, as self.model.",
    "lr_scheduler_step": "Return the schedule from configure_optimizers; it is stepped once per update.",
    "on_after_batch_transfer": "Do it at the start of the step, or in the collator.",
    "on_before_batch_transfer": "Do it in the collator.",
    "on_save_checkpoint": "Keep the state in a buffer of self.model, or in a callback that is an ExportableState.",
    "optimizer_step": "Do it in on_pre_optimizer_step or on_optimizer_step of a TrainerCallback.",
    "optimizer_zero_grad": "Leave it out: gradients are set to None after each update.",
    "predict_dataloader": "Pass the dataset to predict().",
    "predict_step": "Define prediction_step(self, batch).",
    "test_dataloader": "Pass the dataset to evaluate() or predict().",
    "test_epoch_end": "Do it in on_evaluate of a TrainerCallback.",
    "test_step": "evaluation_step serves test sets too: trainer.evaluate(test_set, metric_key_prefix='test').",
    "test_step_end": _EVALUATES,
    "train_dataloader": "Pass train_dataset to the Trainer, or override its get_train_dataloader.",
    "train_step": "Define training_step(self, batch).",
    "training_epoch_end": "Do it in on_epoch_end of a TrainerCallback.",
    "training_step_end": "Do it at the end of training_step(self, batch).",
    "transfer_batch_to_device": "Override _prepare_inputs of a Trainer subclass.",
    "val_dataloader": "Pass eval_dataset to the Trainer, or override its get_eval_dataloader.",
    "validation_epoch_end": "Do it in on_evaluate of a TrainerCallback.",
    "validation_step": "Rename it to evaluation_step(self, batch).",
    "validation_step_end": _EVALUATES,
}

# Common wrong names of module methods.
MODULE_MISNOMERS = dict.fromkeys(
    ("eval_step", "evaluate_step", "val_step", "valid_step"), "Define evaluation_step(self, batch)."
)

# Attributes of a Lightning module that user methods use, and what to do.
MODULE_ATTRIBUTES = {
    "all_gather": "Return the values as outputs, which are gathered over processes.",
    "current_epoch": "A TrainerCallback gets it as state.epoch.",
    "clip_gradients": "Set max_grad_norm in TrainingArguments.",
    "device": "The batch is on the device already; make new tensors with device=batch[...].device.",
    "freeze": "Call self.model.requires_grad_(False).",
    "global_rank": "A TrainerCallback gets state.is_world_process_zero.",
    "global_step": "A TrainerCallback gets it as state.global_step.",
    "hparams": "Keep settings as attributes in __init__.",
    "log": "Return StepOutput(loss=loss, logs={'name': value}).",
    "log_dict": "Return StepOutput(loss=loss, logs={'name': value, ...}).",
    "logger": "Return StepOutput(loss=loss, logs={...}), which every tracker gets.",
    "lr_schedulers": "A TrainerCallback gets it as lr_scheduler.",
    "manual_backward": "Return the loss; the Trainer runs the backward pass.",
    "lr_scheduler": "The Trainer steps it after each update. A TrainerCallback gets it as lr_scheduler.",
    "print": "Use print(), or a logger.",
    "toggle_optimizer": "Call requires_grad_(False) on the other networks, and requires_grad_(True) afterwards.",
    "optimizer": "Return the loss; the Trainer steps the optimizer. A TrainerCallback gets it as optimizer.",
    "optimizers": "Return the loss; the Trainer steps the optimizer. A TrainerCallback gets it as optimizer.",
    "save_hyperparameters": "Keep settings as attributes in __init__.",
    "trainer": "A task does not know its Trainer; a TrainerCallback gets args, state and control.",
}

# Keywords of Lightning's Trainer, and what to do.
TRAINER_KEYWORDS = {
    "accelerator": "A GPU is used if there is one; set use_cpu=True in TrainingArguments to avoid it.",
    "accumulate_grad_batches": "Set gradient_accumulation_steps in TrainingArguments.",
    "benchmark": "Set torch.backends.cudnn.benchmark = True.",
    "check_val_every_n_epoch": "Set eval_strategy='epoch' in TrainingArguments.",
    "default_root_dir": "Pass the folder to TrainingArguments.",
    "detect_anomaly": "Call torch.autograd.set_detect_anomaly(True).",
    "datamodule": "Pass train_dataset=..., eval_dataset=... and data_collator=....",
    "deterministic": "Set full_determinism=True in TrainingArguments.",
    "device": "A GPU is used if there is one; set use_cpu=True in TrainingArguments to avoid it.",
    "devices": "Start one process per device: torchrun --nproc_per_node=N script.py, or hftrain.launch.",
    "enable_checkpointing": "Set save_strategy='no' in TrainingArguments.",
    "enable_progress_bar": "Set disable_tqdm=True in TrainingArguments.",
    "gpus": "Start one process per device: torchrun --nproc_per_node=N script.py, or hftrain.launch.",
    "gradient_clip_val": "Set max_grad_norm in TrainingArguments.",
    "limit_train_batches": "Pass a shorter train_dataset, set max_steps, or use fast_dev_run.",
    "limit_val_batches": "Pass a shorter eval_dataset, or use fast_dev_run.",
    "log_every_n_steps": "Set logging_steps in TrainingArguments.",
    "logger": "Pass loggers=..., or set report_to in TrainingArguments.",
    "max_epochs": "Set num_train_epochs in TrainingArguments.",
    "max_time": "Stop from a callback: control.should_training_stop = True.",
    "num_nodes": "Start the processes with torchrun --nnodes=N.",
    "num_sanity_val_steps": "Set eval_on_start=True in TrainingArguments, or rehearse with fast_dev_run.",
    "overfit_batches": "Pass a shorter train_dataset.",
    "plugins": "Pass strategy= and precision=.",
    "profiler": "Profile train() with torch.profiler, in a callback that steps it.",
    "sync_batchnorm": "Convert the model: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).",
    **dict.fromkeys(
        ("train_dataloaders", "train_loader", "train_dataloader"),
        "Pass train_dataset=..., or override get_train_dataloader to return the loader.",
    ),
    **dict.fromkeys(
        ("eval_dataloader", "eval_loader", "val_dataloader", "val_dataloaders", "val_loader"),
        "Pass eval_dataset=..., or override get_eval_dataloader to return the loader.",
    ),
    **dict.fromkeys(
        ("criterion", "loss_fn"), "Compute the loss in the task's training_step, or pass compute_loss_func=...."
    ),
    "collate_fn": "Pass data_collator=....",
    "task": "Pass the task as model=....",
    "val_check_interval": "Set eval_strategy='steps' and eval_steps in TrainingArguments.",
}

# Attributes of Lightning's Trainer, and what to do.
TRAINER_ATTRIBUTES = {
    "callbacks": "Read callback_handler.callbacks.",
    "callback_metrics": "Read state.log_history.",
    "current_epoch": "Read state.epoch.",
    "device": "Read args.device.",
    "estimated_stepping_batches": "Read state.max_steps.",
    "fit": "Call train().",
    "global_step": "Read state.global_step.",
    "is_global_zero": "Call is_world_process_zero().",
    "lightning_module": "Read task, or model.",
    "logged_metrics": "Read state.log_history.",
    "load_from_checkpoint": "Call train(resume_from_checkpoint=folder), or load its weights into the model.",
    "save": "Call save_model().",
    "save_checkpoint": "Call save_model(), or set control.should_save = True in a callback.",
    "save_pretrained": "Call save_model().",
    "should_stop": "Set control.should_training_stop.",
    "test": "Call evaluate(test_set, metric_key_prefix='test').",
    "validate": "Call evaluate().",
}


def lightning_base(thing: Any) -> str | None:
    """Return which of Lightning's classes an object, or a class, derives from; None if none."""
    kind = thing if isinstance(thing, type) else type(thing)
    names = [each.__name__ for each in kind.__mro__ if each.__module__.partition(".")[0] in _PACKAGES]
    return next((name for name in _BASES if name in names), None)
