"""Loader workers that really die or hang: torch's error gets a note of what to do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiny import Rows, make_resumable, make_rows

from hftrain import ConfigError


class Ending(Rows):
    """Rows of which one ends the worker that reads it."""

    def __init__(self, end: Callable[[], Any]) -> None:
        super().__init__(make_rows(80))
        self.end = end

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            time.sleep(0.5)  # until the batches before are sent: half of one is an error of another kind
            self.end()
        return super().__getitem__(index)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no such signals")
@pytest.mark.parametrize(
    ("end", "options", "note"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), {}, "memory is the likely cause"),
        (lambda: os._exit(3), {}, "dataloader_num_workers=0 shows an error where it happens"),
        (lambda: time.sleep(60), {"dataloader_timeout": 2}, "Look at what loading a batch waits for"),
    ],
)
def test_the_error_about_a_worker_ends_with_what_to_do(
    tmp_path: Path, end: Callable[[], Any], options: dict[str, Any], note: str
) -> None:
    trainer = make_resumable(
        tmp_path, train_dataset=Ending(end), max_steps=40, save_strategy="no", dataloader_num_workers=2, **options
    )
    with pytest.raises(RuntimeError) as caught:
        trainer.train()
    assert note in caught.value.__notes__[0]


def test_a_time_limit_needs_workers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dataloader_timeout"):
        make_resumable(tmp_path, dataloader_timeout=3)
