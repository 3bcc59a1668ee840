"""When to evaluate, on what, and what to keep of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hftrain.arguments.enums import IntervalStrategy


@dataclass(kw_only=True, repr=False)
class EvaluationArguments:
    """Evaluation. Source: the documented `TrainingArguments`."""

    eval_strategy: IntervalStrategy | str = field(
        default="no", metadata={"help": "When to evaluate while training: 'no', 'steps' (every eval_steps) or 'epoch'."}
    )
    eval_steps: float | None = field(
        default=None,
        metadata={
            "help": "Optimizer updates between two evaluations, or below 1 a share of all; -1: at the end only; not "
            "given: logging_steps."
        },
    )
    eval_delay: float | None = field(
        default=0, metadata={"help": "Epochs or steps (following eval_strategy) to train before the first evaluation."}
    )
    eval_accumulation_steps: int | None = field(
        default=None,
        metadata={
            "help": "Prediction batches to keep on the device before moving them to the CPU; None moves all at the end."
        },
    )
    eval_do_concat_batches: bool = field(
        default=True, metadata={"help": "Join the outputs of all batches; otherwise keep one item per batch."}
    )
    eval_on_start: bool = field(default=False, metadata={"help": "Evaluate once before the first training step."})
    eval_use_gather_object: bool | None = field(
        default=False, metadata={"help": "Gather nested non-tensor objects from all processes."}
    )
    batch_eval_metrics: bool = field(
        default=False,
        metadata={
            "help": "Call compute_metrics per batch, with compute_result=True at the last, and keep no predictions."
        },
    )
    prediction_loss_only: bool = field(
        default=False, metadata={"help": "Return only the loss from evaluation and prediction."}
    )
    include_for_metrics: list[str] = field(
        default_factory=list,
        metadata={"help": "What compute_metrics gets besides predictions and labels: 'inputs', 'loss'."},
    )
    label_names: list[str] | None = field(
        default=None,
        metadata={
            "help": "Input keys that are labels; the arguments of the model's forward named like 'label' if not given."
        },
    )
    past_index: int = field(
        default=-1,
        metadata={"help": "Position of the output that is fed back as `mems` at the next step; -1 for none."},
    )
    use_legacy_prediction_loop: bool = field(
        default=False, metadata={"help": "Evaluate through prediction_loop instead of evaluation_loop."}
    )
    jit_mode_eval: bool = field(default=False, metadata={"help": "Trace the model with torch.jit before evaluating."})
    bf16_full_eval: bool = field(default=False, metadata={"help": "Evaluate entirely in bfloat16."})
    fp16_full_eval: bool = field(default=False, metadata={"help": "Evaluate entirely in float16."})
    evaluation_strategy: IntervalStrategy | str | None = field(
        default=None, metadata={"help": "Old name of eval_strategy."}
    )
    include_inputs_for_metrics: bool = field(
        default=False, metadata={"help": "Old form of include_for_metrics=['inputs']."}
    )
