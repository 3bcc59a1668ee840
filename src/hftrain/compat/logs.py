"""accelerate's loggers, which clients use before anything is launched."""

from __future__ import annotations

import os
from typing import Any

from hftrain.core.accelerate_state import accelerate_state


def adapted_log(log: Any) -> Any:
    """Return accelerate's method that logs, for processes that are not launched yet too.

    It asks accelerate's state for the rank, and raises without one. transformers' arguments launch when they are built;
    hftrain launches when a run starts, so until then the launcher's environment tells the rank.
    """

    def adapted(self: Any, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        if accelerate_state("PartialState"):
            log(self, level, msg, *args, **kwargs)
            return
        main_only = kwargs.pop("main_process_only", True)
        kwargs.pop("in_order", None)
        kwargs.setdefault("stacklevel", 2)
        if self.isEnabledFor(level) and (not main_only or os.environ.get("RANK", "0") == "0"):
            msg, kwargs = self.process(msg, kwargs)
            self.logger.log(level, msg, *args, **kwargs)

    return adapted
