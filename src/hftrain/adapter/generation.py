"""What generation is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def generation_options(args: Any, given: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return what `generate` is called with: what a call gave wins over the arguments, and they over the config.

    Args:
        args: The training arguments.
        given: The keyword arguments of `evaluate` or `predict`; None counts as not given. A `generation_config` among
            them takes the place of everything the arguments say.
        config: The model's `generation_config`, None if it has none.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    if "generation_config" in chosen:
        config = chosen["generation_config"]
    else:
        if "max_new_tokens" not in chosen and args.generation_max_length is not None:
            chosen.setdefault("max_length", args.generation_max_length)
        if args.generation_num_beams is not None:
            chosen.setdefault("num_beams", args.generation_num_beams)
    if "max_length" in chosen and "max_new_tokens" not in chosen and getattr(config, "max_new_tokens", None):
        # Beside it, generate would not look at max_length.
        chosen["max_new_tokens"] = None
    return chosen
