"""Convert, complete and check the arguments."""

from __future__ import annotations

from hftrain.arguments.enums import FOLLOW_METRIC, IntervalStrategy, SaveStrategy
from hftrain.arguments.fields import ArgumentFields
from hftrain.arguments.normalize import convert_choices, normalize
from hftrain.arguments.renames import apply_renames
from hftrain.arguments.rules import check_combinations, check_kinds, check_values


def settle(args: ArgumentFields) -> None:
    """Convert arguments to their normal forms, fill in implied values, and check all; mutates them.

    Idempotent, so it may be called again after attributes were assigned.
    """
    check_kinds(args)
    normalize(args)
    apply_renames(args)
    convert_choices(args)
    _derive(args)
    check_values(args)
    check_combinations(args)


def _derive(args: ArgumentFields) -> None:
    """Fill in omitted settings that others imply; idempotent."""
    if args.run_name is None:
        args.run_name = args.output_dir
    if args.use_cpu:
        args.dataloader_pin_memory = False
    if args.eval_strategy != IntervalStrategy.NO:
        args.do_eval = True
    if args.eval_strategy == IntervalStrategy.STEPS and args.eval_steps is None:
        args.eval_steps = args.logging_steps
    for name in ("logging_steps", "eval_steps", "save_steps"):
        value = getattr(args, name)
        # Fractions below 1 are shares of the run, and stay.
        if isinstance(value, float) and value >= 1 and value.is_integer():
            setattr(args, name, int(value))
    if args.save_steps == -1 and args.save_strategy == SaveStrategy.STEPS:
        args.save_strategy = SaveStrategy.NO
    needs_metric = args.load_best_model_at_end or args.lr_scheduler_type in FOLLOW_METRIC
    if needs_metric and args.metric_for_best_model is None:
        args.metric_for_best_model = "loss"
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")
    if args.torch_compile_backend is not None or args.torch_compile_mode is not None:
        args.torch_compile = True
    if args.torch_compile and args.torch_compile_backend is None:
        args.torch_compile_backend = "inductor"
