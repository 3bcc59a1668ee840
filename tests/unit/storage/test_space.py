"""Room on a disk, and errors that say there was none."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
import torch

from hftrain.storage.files import free_bytes, is_disk_full, readable_bytes
from hftrain.storage.tensors import save_containers


def test_free_space_is_known_of_a_folder_that_is_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert free_bytes(tmp_path / "a" / "b") == pytest.approx(free, rel=0.05)
    monkeypatch.chdir(tmp_path)
    assert free_bytes(Path("a")) == pytest.approx(free, rel=0.05)


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


def test_error_that_is_its_own_context_is_looked_at_once() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__context__, second.__context__ = second, first
    assert not is_disk_full(first)


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="this system has no device that is always full")
def test_torch_tells_that_the_disk_is_full() -> None:
    with pytest.raises((RuntimeError, OSError)) as caught:
        save_containers({"a": torch.zeros(1 << 16)}, Path("/dev/full"))
    assert is_disk_full(caught.value)


def test_bytes_are_readable() -> None:
    assert [readable_bytes(number) for number in (0, 999, 1500, 2.5e9, 7e15)] == [
        "0 B", "999 B", "1.5 kB", "2.5 GB", "7e+03 TB",
    ]  # fmt: skip
