"""Check what a subclass defines: documented hooks that are never called, and names that the Trainer uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hftrain.core.elsewhere import TRAINER_ATTRIBUTES
from hftrain.core.errors import ConfigError
from hftrain.core.uncalled import is_meant, warn_of_uncalled, word_uncalled

_STATEFUL = "Keep your own state in a callback that exports it (ExportableState), or override _save_checkpoint."
_LOOP = (
    "There is one loop; override training_step, compute_loss, get_batch_samples or _maybe_log_save_evaluate, or pass a "
    "callback or a loop of your own (loop=)."
)
_SEARCH = "Override train(), which gets the trial, or _report_to_hp_search."

# Hooks that a Trainer calls; also part of `DOCUMENTED`.
_CALLED = (
    "_activate_neftune", "_align_special_tokens", "_deactivate_neftune", "_determine_best_metric", "_evaluate",
    "_get_collator_with_removed_columns", "_get_dataloader", "_get_eval_sampler", "_get_learning_rate",
    "_get_num_items_in_batch", "_get_output_dir", "_get_train_sampler", "_load_best_model", "_load_from_checkpoint",
    "_load_optimizer_and_scheduler", "_load_rng_state", "_maybe_log_save_evaluate", "_nested_gather",
    "_prepare_context_parallel_inputs", "_prepare_input", "_prepare_inputs", "_push_from_checkpoint",
    "_remove_unused_columns", "_report_to_hp_search", "_rotate_checkpoints", "_save", "_save_checkpoint",
    "_save_optimizer_and_scheduler", "_set_signature_columns_if_needed", "_wrap_model", "floating_point_ops",
)  # fmt: skip

# Every underscored hook of the Hugging Face Trainer, and what to do instead if this Trainer does not call it. The hooks
# that it calls are those that its class defines.
DOCUMENTED: dict[str, str] = {
    **dict.fromkeys(_CALLED, ""),
    "_add_sm_patterns_to_gitignore": "Write the file before training.",
    "_finish_current_push": "Push from on_save of a callback.",
    "_fsdp_qlora_plugin_updates": "Pass strategy=FSDPStrategy(...) with the policy you want.",
    "_gather_and_numpify": "Override evaluation_loop or prediction_step.",
    "_hp_search_setup": _SEARCH,
    "_inner_training_loop": _LOOP,
    "_is_attention_mask_causal": "Prepare the batch in the collator or in _prepare_inputs.",
    "_issue_warnings_after_load": "Override _load_from_checkpoint.",
    "_load_callback_state": _STATEFUL,
    "_load_scaler": _STATEFUL,
    "_move_model_to_device": "Override place_model_on_device, or pass a strategy.",
    "_save_rng_state": _STATEFUL,
    "_save_scaler": _STATEFUL,
    "_save_tpu": "Override _save.",
    "_sorted_checkpoints": "Override _rotate_checkpoints.",
    "_tune_save_checkpoint": _SEARCH,
    "compare_trainer_and_checkpoint_args": (
        "A resume checks the arguments and reports changes by itself; compare more in on_train_begin of a callback."
    ),
    "init_git_repo": "Override init_hf_repo, or call it.",
    "ipex_optimize_model": "Override _wrap_model: Intel's extension is discontinued.",
    "store_flos": "",
    "torchdynamo_smart_context_manager": "Set torch_compile=True, which needs no context.",
}

# Hooks added in version 5, common names, and the older loop of evaluations. A class that calls one of them itself has
# its own helper of that name, older than the hook of transformers.
NEWER: dict[str, str] = {
    "_build_accelerator_args": "Pass strategy= and precision=, or set accelerator_config.",
    "_clip_grad_norm": "Set max_grad_norm, or do it in on_pre_optimizer_step of a callback.",
    "_defer_fsdp_gradient_reduction": "Pass strategy=FSDPStrategy(...).",
    "_finalize_training": "Override train(), or do it in on_train_end of a callback.",
    "_get_grad_norm": "Read it in _maybe_log_save_evaluate.",
    "_has_mixed_mesh_grads": "Pass strategy=FSDPStrategy(...).",
    "_init_training_state": "Do it in on_train_begin of a callback, which gets the state.",
    "_mixed_mesh_grad_norm": "Pass strategy=FSDPStrategy(...).",
    "_prepare_for_training": "Override _wrap_model, create_optimizer or create_scheduler.",
    "_run_epoch": _LOOP,
    "_sync_replicated_trainable_parameters": "Pass strategy=FSDPStrategy(...).",
    "_track_num_input_tokens": "Set include_num_input_tokens_seen.",
    "_update_auto_batch_size": "Set auto_find_batch_size.",
    "_validate_args": "Do it in __init__.",
    "end": "Leave it out: trackers and processes end with the program.",
    "prediction_loop": "Override evaluation_loop, or call it: it takes the same arguments.",
    "load_generation_config": "Set generation_config in Seq2SeqTrainingArguments to a GenerationConfig.",
}

# Methods that a subclass may call, but that the Trainer does not call.
HELPERS = frozenset(
    {
        *("_gather_and_numpify", "_issue_warnings_after_load", "_load_scaler", "_move_model_to_device"),
        *("_save_rng_state", "_save_scaler", "_sorted_checkpoints"),
    }
)

# Private names that downstream classes set.
_SETTABLE = frozenset(
    {
        *("_created_lr_scheduler", "_eval_dataloaders", "_loggers_initialized", "_memory_tracker"),
        *("_pad_across_processes", "_past", "_signature_columns"),
    }
)


def check_hooks(
    kind: type,
    base: type,
    *,
    defined: Mapping[str, Any],
    given: Mapping[str, Any],
    attributes: Mapping[str, Any],
) -> None:
    """Raise if a subclass defines a hook that nothing calls, or a private name that the base class uses.

    Args:
        base: The class that calls the hooks; the package's own subclasses of it are not checked.
        defined: What the base class itself defines; whatever else it has, a library has assigned.
        given: The attributes that a subclass set before it called the base class's ``__init__``.
        attributes: The current attributes of the Trainer.
    """
    assigned = {name for name in (*DOCUMENTED, *NEWER) if getattr(base, name, None) is not defined.get(name)}
    is_ours = all(each.__module__.startswith("hftrain.") for each in kind.__mro__[:-1] if each not in base.__mro__)
    if is_ours and not assigned:
        return
    for name, remedy in {**DOCUMENTED, **{name: NEWER[name] for name in assigned & NEWER.keys()}}.items():
        if not hasattr(kind, name) or (name in defined and name not in HELPERS) or is_meant(kind, name):
            continue
        if name in assigned or _defines(kind, base, name):
            raise ConfigError(word_uncalled(kind, name, remedy or "Override one of the documented methods instead."))
    newer = {name: remedy for name, remedy in NEWER.items() if name not in defined}
    warn_of_uncalled(kind, newer)
    own = {name for each in base.__mro__ for name in vars(each) if _is_private(name) and name not in DOCUMENTED}
    taken = {name for name in own - _SETTABLE if _defines(kind, base, name)}
    for name, value in attributes.items():
        is_ours = _is_private(name) and name not in _SETTABLE and (name not in given or given[name] is not value)
        if is_ours and (name in given or hasattr(kind, name)):
            taken.add(name)
    if taken:
        raise ConfigError(
            f"{kind.__name__} defines {', '.join(sorted(taken))}.",
            "Trainer uses this name itself, and the two would conflict.",
            "Choose another name.",
        )


def missing_attribute(kind: type, name: str, *, is_made: bool) -> str:
    """Return the error message for a missing attribute, with a remedy if other Trainers have it.

    Args:
        is_made: Whether the Trainer's ``__init__`` has been called.
    """
    message = f"{kind.__name__!r} object has no attribute {name!r}"
    if not is_made:
        return f"{message}: its __init__ has not called that of Trainer. Call super().__init__(...) in it first."
    remedy = DOCUMENTED.get(name) or NEWER.get(name) or TRAINER_ATTRIBUTES.get(name)
    return f"{message}. {remedy}" if remedy else message


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defines(kind: type, base: type, name: str) -> bool:
    """Tell whether a class outside the package overrides a name."""
    owner = next(each for each in kind.__mro__ if name in vars(each))
    return owner is not base and not owner.__module__.startswith("hftrain.")
