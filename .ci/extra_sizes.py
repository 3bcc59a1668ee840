"""Print what each extra adds to a plain installation: `python .ci/extra_sizes.py [EXTRA ...]`, with uv on the PATH.

The sizes are those of the downloads, for this machine's platform and the interpreter that runs this (3.11 or newer).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import tomllib

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def resolve(*extras: str) -> dict[str, int]:
    """Return the packages of an installation and the bytes of their files; nothing is installed.

    Raises:
        RuntimeError: The requirements cannot be resolved; the message is uv's.
    """
    wanted = [word for extra in extras for word in ("--extra", extra)]
    command = ["uv", "pip", "compile", "--quiet", "--format", "pylock.toml", "--python", sys.executable]
    done = subprocess.run([*command, *wanted, str(PROJECT)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    packages = tomllib.loads(done.stdout)["packages"]
    return {package["name"]: _size(package) for package in packages if package["name"] != "hftrain"}


def _size(package: dict[str, Any]) -> int:
    # The lock lists every wheel that suits the platform: with compiled code first, which pip prefers too.
    files = package.get("wheels", [])[:1] or [package[kind] for kind in ("sdist", "archive") if kind in package]
    return sum(file.get("size", 0) for file in files)


def main() -> None:
    with PROJECT.open("rb") as file:
        extras = sys.argv[1:] or list(tomllib.load(file)["project"]["optional-dependencies"])
    plain = resolve()
    print(f"{'hftrain':<16}{len(plain):>4} packages {sum(plain.values()) / 1e6:>9,.1f} MB")
    for extra in extras:
        try:
            added = {name: size for name, size in resolve(extra).items() if name not in plain}
        except RuntimeError as error:
            print(f"[{extra}]".ljust(16), error)
            continue
        largest = ", ".join(sorted(added, key=added.__getitem__, reverse=True)[:3])
        print(f"{f'[{extra}]':<16}{len(added):>4} more     {sum(added.values()) / 1e6:>9,.1f} MB  {largest}")


if __name__ == "__main__":
    main()
