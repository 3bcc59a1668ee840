"""How much memory a process takes."""

from __future__ import annotations

import threading
from pathlib import Path


def own_bytes() -> int:
    """Return this process's memory without that of files."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Peak(threading.Thread):
    """Note the most that there is while the context lasts."""

    def __enter__(self) -> Peak:
        self.is_over, self.first = threading.Event(), own_bytes()
        self.most = self.first
        self.start()
        return self

    def run(self) -> None:
        while not self.is_over.wait(0.02):
            self.most = max(self.most, own_bytes())

    def __exit__(self, *error: object) -> None:
        self.is_over.set()
        self.join()
