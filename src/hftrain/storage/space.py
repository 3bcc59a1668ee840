"""Free disk space, and errors that say that a disk is full."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from hftrain.storage.files import existing_part

_FULL = (errno.ENOSPC, errno.EDQUOT)


def free_bytes(folder: Path) -> int:
    """Return the free space for a folder, which need not exist yet; a user's quota may allow less."""
    return shutil.disk_usage(existing_part(folder.absolute())).free


def is_disk_full(error: BaseException | None) -> bool:
    """Tell whether an error, or its cause, says that a disk or a quota is full."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # safetensors reports the error number only in its message.
        if getattr(error, "errno", None) in _FULL or any(f"(os error {number})" in str(error) for number in _FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


def readable_bytes(number: float) -> str:
    """Return a number of bytes with a unit, in powers of 1000.

    Example:
        >>> readable_bytes(1_234_567_890)
        '1.23 GB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
