"""Whether and how the model is compiled."""

from __future__ import annotations

import os
from typing import Any

from hftrain.core.log import warn_once
from hftrain.task.compilation import CompileConfig


def compile_config(args: Any) -> CompileConfig | None:
    """Return how to compile, None where nothing asks for it.

    The arguments decide; where they are silent, what `accelerate launch --dynamo_backend` says.
    """
    if args.torch_compile:
        backend, mode = args.torch_compile_backend or "inductor", args.torch_compile_mode
    else:
        launched = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
        if launched in ("no", ""):
            return None
        backend, mode = launched, os.environ.get("ACCELERATE_DYNAMO_MODE")
        for option in ("FULLGRAPH", "DYNAMIC", "REGIONAL_COMPILATION"):
            if os.environ.get(f"ACCELERATE_DYNAMO_USE_{option}", "false").lower() in ("1", "true"):
                warn_once(f"dynamo_use_{option.lower()} of accelerate's configuration changes nothing here.")
    if mode not in (None, "default") and backend != "inductor":
        warn_once(f"torch_compile_mode={mode!r} is inductor's; torch_compile_backend={backend!r} may take no notice.")
    return CompileConfig(backend=backend, mode=mode)
