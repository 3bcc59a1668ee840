"""Build a run completely before its first step, and close everything afterwards, also on errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import cast

from hftrain.arguments.enums import DebugOption
from hftrain.checkpoint.fitting import restoring
from hftrain.checkpoint.manifest import is_foreign
from hftrain.core.extras import extra
from hftrain.loops.fit import FitLoop
from hftrain.preemption.grace import GracePeriod
from hftrain.run.contents import Contents
from hftrain.run.counting import RunCounts
from hftrain.run.parts import RunData, RunParts, make_manager
from hftrain.run.plan import plan_run, start_state
from hftrain.run.ready import check_schedule, making_ready
from hftrain.run.run import Run
from hftrain.run.saving import Saver
from hftrain.strategies.base import Strategy


@contextmanager
def open_run(parts: RunParts, resume: Path | None) -> Iterator[Run]:
    """Build a new or resumed run, and close everything that was opened, also if building fails.

    Collective.
    """
    parts.phase = "set up the training"
    with parts.journal.ending(parts.state), ExitStack() as stack:
        try:
            yield _build(parts, resume, stack)
        except RuntimeError as error:
            report_late_ranks(parts.strategy, error)  # before the description of what the run does is lost
            raise


def _build(parts: RunParts, resume: Path | None, stack: ExitStack) -> Run:
    args, trainer = parts.args, parts.trainer
    loop = parts.loop = cast(FitLoop, parts.loops.get("fit") or FitLoop())
    resume = parts.output.share(resume, is_on_each_node=args.save_on_each_node)
    manager = parts.manager = make_manager(trainer, parts.hooks, parts.output, parts.output.meet())
    model = parts.services.make_model()
    stack.callback(parts.events.close_run)
    data = parts.data = RunData(parts)
    stack.callback(data.close)
    plan = plan_run(parts, resume, data.feed)
    counts = RunCounts(parts, model)
    start_state(parts, resume, num_steps=plan.max_steps, num_epochs=plan.length.num_epochs)
    if resume is not None and plan.manifest is not None and not is_foreign(resume):
        with restoring(resume):
            manager.follow(plan.manifest)
    if plan.is_reshaped and loop.unsupported:
        extra("own_loops").check_features(
            loop, {"reshaping": "a checkpoint of another number of processes or batch size"}
        )
    stack.enter_context(making_ready(parts, resume, max_steps=plan.max_steps))
    stack.callback(loop.detach)
    contents = Contents(parts, plan)
    stack.callback(contents.close)
    saver = Saver(parts, contents, counts)
    check_schedule(args, trainer.lr_scheduler, max_steps=parts.state.max_steps)
    checks = extra("health").TrainingChecks(parts, contents.objects)
    stack.callback(checks.close)
    if DebugOption.UNDERFLOW_OVERFLOW in args.debug:
        stack.callback(extra("underflow_overflow").DebugUnderflowOverflow(parts.model).remove)
    grace = stack.enter_context(closing(GracePeriod(parts.save_policy.grace_s)))  # closed after the last write
    stack.enter_context(saver.writer)
    return Run(parts, plan=plan, counts=counts, saver=saver, checks=checks, grace=grace, resume=resume)


def report_late_ranks(strategy: Strategy, error: Exception) -> None:
    """Raise `StrategyError` instead of an error that only says that a collective timed out."""
    timeout = getattr(strategy, "timeout", None)
    late = strategy.watch.late(error, timeout_s=timeout.total_seconds()) if strategy.watch and timeout else None
    if late is not None:
        raise late from error
