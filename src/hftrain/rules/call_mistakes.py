"""Errors of user functions that have other parameters or results than the Trainer expects."""

from __future__ import annotations

import re
import traceback
from types import FrameType

from hftrain.core.errors import TaskError
from hftrain.core.notes import describe

# Functions that the Trainer calls -> their signatures.
_DOCUMENTED = {
    "compute_loss": "(self, model, inputs, return_outputs=False, num_items_in_batch=None)",
    "compute_loss_func": "(outputs, labels, num_items_in_batch=None)",
    "compute_metrics": "(prediction), which has predictions and label_ids",
    "configure_optimizers": "(self)",
    "create_optimizer": "(self)",
    "create_scheduler": "(self, num_training_steps, optimizer=None)",
    "evaluate": "(self, eval_dataset=None, ignore_keys=None, metric_key_prefix='eval')",
    "evaluation_loop": "(self, dataloader, description, prediction_loss_only=None, ignore_keys=None, "
    "metric_key_prefix='eval')",
    "get_eval_dataloader": "(self, eval_dataset=None)",
    "get_train_dataloader": "(self)",
    "log": "(self, logs, start_time=None)",
    "metrics": "(self, stage)",
    "prediction_step": "(self, model, inputs, prediction_loss_only, ignore_keys=None)",
    "preprocess_logits_for_metrics": "(logits, labels)",
    "training_step": "(self, model, inputs, num_items_in_batch=None)",
}
_REFUSED = re.compile(r"(\S+)\(\) ((?:missing|takes|got an unexpected|got multiple) .*)")


def explain_calls(error: Exception, frames: list[FrameType]) -> TaskError | None:
    """Return an error that explains why our call of a user's function failed; None if that is not the cause.

    Args:
        error: The raised error.
        frames: The frames of its traceback, the outermost first.
    """
    frames = frames[:-1] if frames and frames[-1].f_globals.get("__name__") == "torch._tensor" else frames
    last = frames[-1] if frames else None
    if last is None or not last.f_globals.get("__name__", "").startswith("hftrain."):
        return None
    if last.f_code.co_name == "_fold" and isinstance(error, TypeError):
        wrong = next((each for each in last.f_locals["self"].pending if not hasattr(each, "detach")), None)
        return TaskError(
            f"Cannot log what the Trainer's training_step returned ({describe(wrong)}):",
            "it is not a tensor.",
            "Return the detached loss of the micro-batch: loss.detach().",
        )
    if last.f_code.co_name == "add" and isinstance(error, AttributeError) and "logs" in last.f_locals:
        return TaskError(
            f"Cannot log {describe(last.f_locals['logs'])}:", "it is not a dict.", "Return logs={'name': number, ...}."
        )
    if "unpack" in str(error) or "iteration over a 0-d tensor" in str(error):
        return _wrong_parts(error, last)
    refused = _REFUSED.match(str(error)) if isinstance(error, TypeError) else None
    if refused is None:
        return None
    name = refused[1].rpartition(".")[2]
    # Functions given as arguments may have any name; the line that calls them shows their role.
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    role = next((each for each in _DOCUMENTED if f"{each.removesuffix('_for_metrics')}(" in line), None)
    known = name if name in _DOCUMENTED else role
    if known is None:
        return None
    return TaskError(
        f"Cannot call {refused[1].replace('.<locals>', '')} ({refused[2]}):",
        f"the Trainer calls it as {known}{_DOCUMENTED[known]}.",
        "Give it these parameters.",
    )


def _wrong_parts(error: Exception, caller: FrameType) -> TaskError | None:
    """Return an error for an override whose result is not what its caller unpacks."""
    returned = {"step": ("prediction_step", "(loss, logits, labels), each of which may be None")}
    returned["predict_batch"] = ("compute_loss", "(loss, outputs) if return_outputs=True")
    if caller.f_code.co_name not in returned:
        return None
    name, parts = returned[caller.f_code.co_name]
    return TaskError(f"Cannot use what {name} returned:", f"{error}.", f"Return {parts}.")
