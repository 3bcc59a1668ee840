"""Keywords of a Trainer that do not exist, answered with what to write instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from hftrain.arguments.renames import COMMON_NAMES
from hftrain.arguments.seq2seq import Seq2SeqTrainingArguments
from hftrain.core.errors import UnknownArgumentError, suggest
from hftrain.core.lightning import TRAINER_KEYWORDS

Init = TypeVar("Init", bound=Callable[..., None])


def refusing_unknown(init: Init) -> Init:
    """Let a constructor refuse keywords that it does not take; its signature stays as it is.

    Raises:
        UnknownArgumentError: When it is called with one.
    """
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                kind = type(self).__name__
                asked = f"Cannot pass {name}= to {kind}."
                raise UnknownArgumentError(asked, f"{kind} has no such argument.", _remedy(name, known))
        init(self, *args, **kwargs)

    return cast(Init, checked)


def _remedy(name: str, known: list[str]) -> str:
    settings = inspect.signature(Seq2SeqTrainingArguments).parameters
    setting = name if name in settings else COMMON_NAMES.get(name)
    if name in TRAINER_KEYWORDS:
        return TRAINER_KEYWORDS[name]
    return f"Set it in the arguments: TrainingArguments({setting}=...)." if setting else suggest(name, known)
