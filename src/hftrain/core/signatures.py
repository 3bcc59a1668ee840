"""The documented hooks of a Trainer, looked up where they are called, also in their older signatures."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hftrain.core.errors import TaskError, shorten


class Shown:
    """Give subclasses a `repr`: the class, and the constructor's arguments that differ from their defaults."""

    _shown = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = _noting(cls.__init__)  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shown})"


def _noting(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if type(self).__init__ is noting:  # not when a subclass calls it
            # The text alone: references would keep the user's objects alive, and be searched for optimizers.
            self._shown = ", ".join(_differing(type(self), inspect.signature(init).bind(self, *args, **kwargs)))

    return noting


def _differing(kind: type, given: inspect.BoundArguments) -> list[str]:
    """Return ``name=value`` of the arguments after `self` that are not defaults, those passed on to a base included."""
    inits = [inspect.signature(vars(each)["__init__"]) for each in kind.__mro__[-2::-1] if "__init__" in vars(each)]
    defaults = {name: shorten(each.default) for init in inits for name, each in init.parameters.items()}
    values = {**dict(list(given.arguments.items())[1:]), **given.kwargs}
    passed_on = {name for name, each in given.signature.parameters.items() if each.kind is each.VAR_KEYWORD}
    texts = {name: shorten(value) for name, value in values.items() if name not in passed_on}
    return [f"{name}={text}" for name, text in texts.items() if text != defaults.get(name)]


def check_overrides(kind: type, base: type) -> None:
    """Raise if a subclass overrides a public method of its base with one that cannot be called in its place.

    Raises:
        TaskError: The message names the method and the signature it needs.
    """
    for name, method in inspect.getmembers(base, inspect.isfunction):
        override = inspect.getattr_static(kind, name)
        if name.startswith("_") or override is method or not inspect.isfunction(override):
            continue
        expected = inspect.signature(method)
        fixed = [p for p in expected.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        named = {p.name: None for p in fixed if p.kind is p.KEYWORD_ONLY}
        try:
            inspect.signature(override).bind(*[None] * (len(fixed) - len(named)), **named)
        except TypeError as error:
            raise TaskError(
                f"Cannot call {kind.__name__}.{name}{inspect.signature(override)}:",
                f"it overrides {base.__name__}.{name} and is called with its arguments ({error}).",
                f"Define {name}{plain_signature(method)}.",
            ) from None


def plain_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return a function's signature without annotations, for messages."""
    found = inspect.signature(function)
    parameters = [each.replace(annotation=each.empty) for each in found.parameters.values()]
    return found.replace(parameters=parameters, return_annotation=found.empty)


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function takes an argument of that name (or any keyword)."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def without(method: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """Return a method that may be called with all keywords of `names`; those that it does not take are left out."""
    try:
        left_out = [name for name in names if not accepts(method, name)]
    except (TypeError, ValueError):  # some functions written in C
        return method

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **{name: value for name, value in kwargs.items() if name not in left_out})

    call.__self__ = getattr(method, "__self__", method)  # type: ignore[attr-defined]
    return call if left_out else method


def takes_trial(model_init: Callable[..., Any]) -> bool:
    """Return whether a `model_init` function takes the trial of a hyper-parameter search."""
    parameters = inspect.signature(model_init).parameters.values()
    return any(p.name == "trial" or (p.default is p.empty and p.kind < p.VAR_POSITIONAL) for p in parameters)


def taking(function: Callable[..., Any], num_positional: int, name: str) -> Callable[..., Any]:
    """Return a function that takes `name` by keyword or as its last positional argument.

    If `function` takes it by keyword only or in another position, it is passed by keyword; if not at all, dropped.

    Args:
        num_positional: Number of positional arguments before it.
        name: The argument that newer signatures have.
    """
    parameters = inspect.signature(function).parameters
    takes_rest = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values())
    takes_name = accepts(function, name)
    in_place = list(parameters.values())[num_positional : num_positional + 1]
    if any(p.name == name and p.kind is p.POSITIONAL_OR_KEYWORD for p in in_place):
        return function

    def adapted(*args: Any, **kwargs: Any) -> Any:
        if takes_name:
            kwargs.update(zip([name], args[num_positional:], strict=False))
        else:
            kwargs.pop(name, None)
        return function(*(args if takes_rest and not takes_name else args[:num_positional]), **kwargs)

    return adapted


def in_context(prepare: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a training step that runs in the context and on the micro-batch that `prepare` returns."""

    def run(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        make_context, inputs = prepare(model, inputs)
        with make_context():
            return step(model, inputs, num_items_in_batch)

    return run


def call_with(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call a hook, of any documented generation, with the documented values that its signature names.

    A hook that takes ``*args`` gets all values in order. If it requires other names, values are passed by position.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return function(*values.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = {p.name for p in positional}
    if {p.name for p in positional if p.default is p.empty} <= values.keys():
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        return function(**{name: value for name, value in values.items() if takes_any or name in names})
    return function(*list(values.values())[: len(positional)])


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
    save = Hook("_save")
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
