"""The documented hooks of a Trainer, looked up where they are called: classes override them, scripts assign them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hftrain.core.signatures import in_context, taking


class Hook:
    """A documented method or attribute with a private name; reading it gives the owner's present one."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, hooks: Hooks, kind: type) -> Any:
        return getattr(hooks.owner, self._name)


class Hooks:
    """What the parts of a Trainer call of it that its users may replace, and whether they have.

    Args:
        owner: The Trainer.
        defined: Returns what its class defines; whatever else a subclass, an instance or a library has, is an override.
            A function of a module, because a search sends Trainers to other processes.

    Attributes:
        trial: The current trial of a search, from its backend, which several hooks are given.
        compute_loss: The documented method, callable in its newer form; like the next three set by `resolve`.
    """

    trial: Any = None
    compute_loss: Callable[..., Any]
    training_step: Callable[..., Any]
    get_batch_samples: Callable[..., Any]
    log: Callable[..., Any]

    # The model.
    align_special_tokens = Hook("_align_special_tokens")
    activate_neftune = Hook("_activate_neftune")
    deactivate_neftune = Hook("_deactivate_neftune")
    wrap_model = Hook("_wrap_model")
    # A step, and what follows it.
    prepare_context_parallel_inputs = Hook("_prepare_context_parallel_inputs")
    prepare_inputs = Hook("_prepare_inputs")
    nested_gather = Hook("_nested_gather")
    get_learning_rate = Hook("_get_learning_rate")
    maybe_log_save_evaluate = Hook("_maybe_log_save_evaluate")
    evaluate_in_training = Hook("_evaluate")
    determine_best_metric = Hook("_determine_best_metric")
    loss_shifts_labels = Hook("_loss_shifts_labels")
    created_lr_scheduler = Hook("_created_lr_scheduler")
    # Checkpoints.
    get_output_dir = Hook("_get_output_dir")
    save_checkpoint = Hook("_save_checkpoint")
    save_optimizer_and_scheduler = Hook("_save_optimizer_and_scheduler")
    push_from_checkpoint = Hook("_push_from_checkpoint")
    rotate_checkpoints = Hook("_rotate_checkpoints")
    load_from_checkpoint = Hook("_load_from_checkpoint")
    load_optimizer_and_scheduler = Hook("_load_optimizer_and_scheduler")
    load_rng_state = Hook("_load_rng_state")
    load_best_model = Hook("_load_best_model")
    # Data.
    get_dataloader = Hook("_get_dataloader")
    train_batch_size = Hook("_train_batch_size")
    get_train_sampler = Hook("_get_train_sampler")
    get_eval_sampler = Hook("_get_eval_sampler")
    remove_unused_columns = Hook("_remove_unused_columns")
    get_collator_with_removed_columns = Hook("_get_collator_with_removed_columns")
    set_signature_columns_if_needed = Hook("_set_signature_columns_if_needed")
    signature_columns = Hook("_signature_columns")
    eval_dataloaders = Hook("_eval_dataloaders")

    def __init__(self, owner: Any, defined: Callable[[], Mapping[str, Any]]) -> None:
        self.owner, self._defined = owner, defined

    def is_overridden(self, *names: str) -> bool:
        """Tell whether the user's class or instance, or a library, overrides any of these documented methods."""
        kind, own = type(self.owner), vars(self.owner)
        return any(name in own or getattr(kind, name) is not self._defined()[name] for name in names)

    def is_users(self, *names: str) -> bool:
        """Tell whether any of these methods is overridden outside the package."""
        kind, own = type(self.owner), vars(self.owner)
        modules = [getattr(getattr(kind, name), "__module__", "") for name in names if self.is_overridden(name)]
        return any(name in own for name in names) or not all(each.startswith("hftrain.") for each in modules)

    def resolve(self) -> None:
        """Inspect the hooks of a step, so that overrides in the older forms work and a step makes no decision.

        Done when the Trainer is made, and again at the start of each documented call, for scripts assign hooks.
        """
        owner = self.owner
        self.compute_loss = taking(owner.compute_loss, 3, "num_items_in_batch")
        self.training_step = taking(owner.training_step, 2, "num_items_in_batch")
        if self.is_overridden("_prepare_context_parallel_inputs"):
            self.training_step = in_context(self.prepare_context_parallel_inputs, self.training_step)
        self.get_batch_samples = taking(owner.get_batch_samples, 2, "device")
        self.log = taking(owner.log, 1, "start_time")
        self.walks_inputs = self.is_overridden("_prepare_input")
        self.counts_items_itself = self.is_overridden("_get_num_items_in_batch")
        self.makes_contexts = self.is_overridden("autocast_smart_context_manager")
