"""What follows from other settings, where the user left it open."""

from __future__ import annotations

from typing import Any

from hftrain.arguments.enums import FOLLOW_METRIC, IntervalStrategy, SaveStrategy
from hftrain.arguments.fields import ArgumentFields


def derive(args: ArgumentFields) -> None:
    """Fill in what other settings imply; mutates the arguments, and changes nothing the second time."""
    if args.run_name is None:
        args.run_name = args.output_dir
    if args.use_cpu:
        args.dataloader_pin_memory = False
    _derive_intervals(args)
    _derive_best_metric(args)
    _derive_compilation(args)


def _whole(value: Any) -> Any:
    """Return a number of steps as an integer where it is one; shares of the run stay as they are."""
    return int(value) if isinstance(value, float) and value >= 1 and value.is_integer() else value


def _derive_intervals(args: ArgumentFields) -> None:
    if args.eval_strategy != IntervalStrategy.NO:
        args.do_eval = True
    if args.eval_strategy == IntervalStrategy.STEPS and args.eval_steps is None:
        args.eval_steps = args.logging_steps
    for name in ("logging_steps", "eval_steps", "save_steps"):
        setattr(args, name, _whole(getattr(args, name)))
    if args.save_steps == -1 and args.save_strategy == SaveStrategy.STEPS:
        args.save_strategy = SaveStrategy.NO


def _derive_best_metric(args: ArgumentFields) -> None:
    needs_metric = args.load_best_model_at_end or args.lr_scheduler_type in FOLLOW_METRIC
    if needs_metric and args.metric_for_best_model is None:
        args.metric_for_best_model = "loss"
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")


def _derive_compilation(args: ArgumentFields) -> None:
    if args.torch_compile_backend is not None or args.torch_compile_mode is not None:
        args.torch_compile = True
    if args.torch_compile and args.torch_compile_backend is None:
        args.torch_compile_backend = "inductor"
