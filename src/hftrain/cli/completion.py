"""`hftrain completion`: shell completion of the command."""

from __future__ import annotations

from hftrain.cli.answer import Answer
from hftrain.cli.commands import make_parser
from hftrain.core.optional import require


def show_completion(shell: str) -> Answer:
    """Return a script that completes `hftrain`, its commands, their options and the names of files.

    Raises:
        MissingDependencyError: shtab is not installed.
    """
    require("shtab", feature="hftrain completion", extra="completion")
    import shtab

    script = shtab.complete(make_parser(file=shtab.FILE, folder=shtab.DIRECTORY), shell)
    return Answer([script], {"shell": shell, "script": script})
