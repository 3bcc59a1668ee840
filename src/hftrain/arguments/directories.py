"""Where a run writes, and the flags that only scripts read."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True, repr=False)
class DirectoryArguments:
    """Folders, the run's name, and flags for scripts. Source: the documented `TrainingArguments`."""

    output_dir: str | None = field(
        default=None,
        kw_only=False,
        metadata={"help": "Folder for checkpoints and predictions; 'trainer_output' if not given, '~' is expanded."},
    )
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Write into output_dir although it is not empty."}
    )
    do_train: bool = field(
        default=False, metadata={"help": "For scripts: whether to train. The Trainer does not read it."}
    )
    do_eval: bool = field(
        default=False, metadata={"help": "For scripts: whether to evaluate; on as soon as eval_strategy is not 'no'."}
    )
    do_predict: bool = field(
        default=False, metadata={"help": "For scripts: whether to predict on a test set. The Trainer does not read it."}
    )
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={
            "help": "For scripts: the checkpoint folder to hand to train(). The Trainer itself reads it only if it is "
            "'auto': resume the newest valid checkpoint in output_dir if there is one, else start from the beginning."
        },
    )
    run_name: str | None = field(
        default=None, metadata={"help": "The run's label in experiment trackers; output_dir if not given."}
    )
