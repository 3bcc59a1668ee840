"""Run a script up to its first training, for commands that ask its Trainer something instead."""

from __future__ import annotations

import copy
import inspect
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn, TypeVar

import torch

from hftrain import compat
from hftrain.arguments.processes import changed_settings
from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks.base import TrainerCallback
from hftrain.core.errors import ConfigError
from hftrain.core.extras import extra, is_available
from hftrain.core.preserve import temporarily
from hftrain.extras.flight.observing import own_part
from hftrain.trainer.trainer import Trainer

T = TypeVar("T")


class _Reached(BaseException):
    """Ends a script at its first training; not an `Exception`, because the script may catch those."""


@contextmanager
def until_training(act: Callable[..., object], kind: type[Any] = Trainer) -> Iterator[None]:
    """Run a script in the context up to its first `train()`, in whose place `act` is called with its arguments.

    What the script prints is not the answer of a command. Its arguments and search path are restored. `kind` is the
    class of its Trainer, which may be transformers'.
    """
    train = kind.train

    def stand_in(*args: Any, **kwargs: Any) -> NoReturn:
        with temporarily(kind, train=train):  # `act` may train
            act(*args, **kwargs)
        raise _Reached

    kept = temporarily(sys, argv=sys.argv, path=list(sys.path))
    with temporarily(kind, train=stand_in), kept, suppress(_Reached), redirect_stdout(sys.stderr):
        yield


def changed_construction(
    change: Callable[[dict[str, Any]], object], kind: type[Any] = Trainer
) -> AbstractContextManager[None]:
    """Give every Trainer that is made in the context other arguments: `change` gets them by name, and changes them."""
    build = kind.__init__
    signature = inspect.signature(build)

    def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(trainer, *args, **kwargs)
        change(bound.arguments)
        build(*bound.args, **bound.kwargs)

    return temporarily(kind, __init__=init)


def redirect(given: dict[str, Any], folder: str | Path, changes: Mapping[str, Any] | None = None) -> Any:
    """Let a Trainer that is constructed write into a folder only; return its arguments, a copy of the script's.

    Args:
        given: What its constructor gets by name, see `changed_construction`.
        changes: Settings to change, which are checked as the script's are.
    """
    args = given.get("args") or TrainingArguments(str(folder))
    quiet = {"output_dir": str(folder), "report_to": [], "push_to_hub": False, "load_best_model_at_end": False}
    if changes:
        args = type(args)(**{**changed_settings(args.to_dict(), type(args)), **quiet, **changes})
    args = given["args"] = copy.copy(args)
    for name, value in quiet.items():
        setattr(args, name, value)
    return args


def only_with(trainer: Any, *callbacks: Any, without: type[Any] | tuple[()] = ()) -> None:
    """Take trackers, and those of a class, from a Trainer's callbacks; add others, each unless its class is there."""
    own = trainer.callback_handler.callbacks
    own[:] = [each for each in extra("trackers").without_trackers(own) if not isinstance(each, without)]
    for each in callbacks:
        if not any(isinstance(other, type(each)) for other in own):
            trainer.add_callback(each)


def at_training(script: str | Path, arguments: Sequence[str], act: Callable[..., T], kind: type[Any] = Trainer) -> T:
    """Run a script up to its first `train()`, and return what `act` returns for its Trainer, which is a `kind`.

    What it prints is shown if it fails.
    """
    if not Path(script).is_file():
        reason = "There is no such file."
        raise ConfigError(f"Cannot run {str(script)!r}.", reason, "Check the path.")
    found: list[T] = []
    try:
        stopped = until_training(lambda *given, **named: found.append(act(*given, **named)), kind)
        with redirect_stderr(StringIO()) as said, ExitStack() as stack, stopped:
            if kind is Trainer and is_available("transformers") and resolve_name("transformers:Trainer") is not Trainer:
                compat.install()  # the script, or a library that it uses, may import transformers' Trainer
                stack.callback(compat.uninstall)
            sys.argv, sys.path[:0] = [str(script), *arguments], [str(Path(script).resolve().parent)]
            runpy.run_path(str(script), run_name="__main__")
    except (Exception, SystemExit):
        print(said.getvalue(), file=sys.stderr)
        raise
    if not found:
        raise ConfigError(
            f"Cannot run {str(script)!r}.",
            "The script ended without a call of Trainer.train.",
            "After its name, give the arguments with which it trains.",
        )
    return found[0]


@dataclass(eq=False)
class Perturb(TrainerCallback):
    """Move every trained parameter up or down by one unit in the last place when training begins.

    Args:
        unit: Such a unit of 1; at least that of the parameter's own type.
    """

    unit: float

    @torch.no_grad()
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move them, in all processes alike."""
        generator = torch.Generator().manual_seed(0)
        for own in (own_part(each) for each in kwargs["model"].parameters() if each.requires_grad):
            signs = own.sign().float() * (2 * torch.randint(2, own.shape, generator=generator) - 1).to(own.device)
            unit = max(self.unit, torch.finfo(own.dtype).eps)
            own.add_(torch.ldexp(signs * unit / 2, torch.frexp(own.float()).exponent).to(own.dtype))
