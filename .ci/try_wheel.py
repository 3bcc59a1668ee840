"""Try what `pip install hftrain` gave: `python .ci/try_wheel.py`, with the Python of an environment that has only that.

The README as the package index shows it must link to nothing relative, and its Python blocks must run.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from importlib.metadata import metadata
from pathlib import Path

CHECK = Path(__file__).resolve().parents[1] / "docs" / "check.py"
RULES = "The rules are under fancy-pypi-readme in pyproject.toml."


def main() -> None:
    import hftrain

    home = Path(hftrain.__file__)
    if "site-packages" not in home.parts:
        sys.exit(f"hftrain was imported from {home}, not from an installed wheel.")
    about = metadata("hftrain")
    text = about["Description"] or str(about.get_payload())
    relative = re.findall(r"\]\((?!https://|#)[^)]*\)", text)
    if relative:
        sys.exit(
            f"Links of the README that break on a package index: {relative}. See fancy-pypi-readme in pyproject.toml."
        )
    if "pip install hftrain" not in text:
        sys.exit(
            "The README on a package index should say `pip install hftrain`. See fancy-pypi-readme in pyproject.toml."
        )
    with tempfile.TemporaryDirectory() as folder:
        readme = Path(folder, "README.md")
        readme.write_text(text, encoding="utf-8")
        subprocess.run([sys.executable, str(CHECK), "--run", str(readme)], cwd=folder, check=True)
    subprocess.run([str(Path(sys.executable).with_name("hftrain")), "--version"], check=True)


if __name__ == "__main__":
    main()
