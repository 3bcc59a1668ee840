"""What the arguments say of the launch, held against what the launcher says."""

from __future__ import annotations

import os
from typing import Any

from hftrain.core.errors import ConfigError


def check_local_rank(args: Any) -> None:
    """Refuse a `local_rank` that the launcher does not confirm.

    Raises:
        ConfigError: `local_rank` is set, and the environment variable LOCAL_RANK is absent or says otherwise.
    """
    launched = os.environ.get("LOCAL_RANK")
    if args.local_rank not in (-1, int(launched or -1)):
        raise ConfigError(
            f"local_rank={args.local_rank} was asked for.",
            "The launcher's environment variable LOCAL_RANK decides the rank, and it does not say so.",
            "Launch with torchrun, and leave local_rank out.",
            local_rank=args.local_rank,
            LOCAL_RANK=launched,
        )
