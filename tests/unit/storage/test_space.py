"""Room on a disk, and errors that say there was none."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from hftrain.storage.files import is_disk_full
from hftrain.storage.tensors import save_containers


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (OSError(errno.EDQUOT, "full"), True),
        (OSError(errno.EIO, "broken"), False),
        (RuntimeError(f"I/O error: No space left on device (os error {errno.ENOSPC})"), True),
        (ValueError("no"), False),
        (None, False),
    ],
)
def test_full_disk_is_told_from_other_errors(error: BaseException | None, is_full: bool) -> None:
    assert is_disk_full(error) is is_full
    if error is not None:
        outer = RuntimeError("outer")
        outer.__cause__ = error
        assert is_disk_full(outer) is is_full


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="this system has no device that is always full")
def test_torch_tells_that_the_disk_is_full() -> None:
    with pytest.raises((RuntimeError, OSError)) as caught:
        save_containers({"a": torch.zeros(1 << 16)}, Path("/dev/full"))
    assert is_disk_full(caught.value)
