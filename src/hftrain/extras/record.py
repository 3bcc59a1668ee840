"""What a run's journal says about where the run came from: its code, command and model."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hftrain.optim.groups import get_model_param_count
from hftrain.run.parts import RunParts

_LIMIT_S = 2.0
# An option that names a secret, or a URL with one, and its value.
SECRET = re.compile(r"(?i)(-\S*(?:{0})[ =]|\S*(?:{0})=|://[^\s/:@]+:)\S+".format("token|passw(?:or)?d|secret|key"))


def origin_of(parts: RunParts) -> dict[str, Any]:
    """Return the code's version, the seed, the number of parameters, the command line and the configuration.

    The configuration is that of callbacks with a `run_config`: what `hftrain fit` read of the task and the data.
    """
    script = str(getattr(sys.modules["__main__"], "__file__", None) or "")
    version = code_version(Path(script).resolve().parent if script.endswith(".py") else Path.cwd())
    configs = [vars(callback).get("run_config") for callback in parts.events.callbacks]
    return {
        **({"code": version} if version else {}),
        "seed": parts.args.seed,
        "parameters": get_model_param_count(parts.model),
        "command": SECRET.sub(r"\1***", " ".join(sys.argv)),
        "config": {name: config[name] for config in configs if isinstance(config, Mapping) for name in config},
    }


@functools.cache
def code_version(folder: Path) -> str | None:
    """Return the commit of a folder's git repository, with ``-dirty`` if files were changed since; None without one."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        )
    except (OSError, subprocess.SubprocessError):  # git is missing or slow
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None
