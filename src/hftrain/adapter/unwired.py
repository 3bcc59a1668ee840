"""Settings that are documented but that nothing acts on yet: refused, never ignored."""

from __future__ import annotations

import functools
import os
from typing import Any

from hftrain.arguments import Seq2SeqTrainingArguments
from hftrain.core.errors import ConfigError, explain

UNWIRED: dict[str, str] = {}


def check_wired(args: Any) -> None:
    """Refuse documented settings that nothing acts on yet; fields that a subclass adds are its own business.

    Args:
        args: The training arguments.

    Raises:
        ConfigError: Such settings differ from their defaults; all of them are listed.
    """
    found = _changed_fields(args)
    if found:
        features = ", ".join(dict.fromkeys(found[name][1] for name in found))
        raise ConfigError(
            explain(
                f"Settings of {features} were given.",
                f"Not wired in this version: {', '.join(found)}.",
                "Remove each of them, or set it to its default.",
                **{name: value for name, (value, _) in found.items()},
            )
        )


def check_local_rank(args: Any) -> None:
    """Refuse a `local_rank` that the launcher does not confirm.

    Raises:
        ConfigError: `local_rank` is set, and the environment variable LOCAL_RANK is absent or says otherwise.
    """
    launched = os.environ.get("LOCAL_RANK")
    if args.local_rank not in (-1, int(launched or -1)):
        raise ConfigError(
            explain(
                f"local_rank={args.local_rank} was asked for.",
                "The launcher's environment variable LOCAL_RANK decides the rank, and it does not say so.",
                "Launch with torchrun, and leave local_rank out.",
                local_rank=args.local_rank,
                LOCAL_RANK=launched,
            )
        )


@functools.cache
def _defaults() -> Seq2SeqTrainingArguments:
    return Seq2SeqTrainingArguments()


def _changed_fields(args: Any) -> dict[str, tuple[Any, str]]:
    changed = {}
    for name, feature in UNWIRED.items():
        default = getattr(_defaults(), name)
        value = getattr(args, name, default)
        if value != default:
            changed[name] = ("<hidden>" if name.endswith("_token") else value, feature)
    return changed
