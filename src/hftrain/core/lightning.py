"""What Lightning's names are called here, for the errors that meet them."""

from __future__ import annotations

LIGHTNING_NAMES = {
    "Callback": "Use TrainerCallback.",
    "CSVLogger": "Read trainer.state.log_history, which trainer_state.json in each checkpoint holds too.",
    "DeviceStatsMonitor": "Set skip_memory_metrics=False in TrainingArguments.",
    "EarlyStopping": "Use EarlyStoppingCallback.",
    "Fabric": "Use Trainer with a TaskModule.",
    "LearningRateMonitor": "Leave it out: every log has the learning rate.",
    "LightningDataModule": "Pass train_dataset, eval_dataset and data_collator to the Trainer.",
    "LightningModule": "Derive from TaskModule.",
    "ModelCheckpoint": "Set save_strategy, save_steps and save_total_limit in TrainingArguments, or pass a SavePolicy.",
    "RichProgressBar": "Use ProgressCallback.",
    "StochasticWeightAveraging": "Average the weights in a callback, or use a schedule-free optimizer.",
    "TQDMProgressBar": "Use ProgressCallback.",
    "TensorBoardLogger": "Set report_to='tensorboard' in TrainingArguments, or use TensorBoardCallback.",
    "WandbLogger": "Set report_to='wandb' in TrainingArguments, or use WandbCallback.",
    "seed_everything": "Use set_seed.",
}
