"""One rank of `support.distributed.launch`: ``worker.py FILE [FUNCTION]``, run by a launcher."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from typing import Any


def find(path: str, name: str) -> Any:
    """Import a test file by its path and return one of its functions."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that what the file defines can be pickled
    spec.loader.exec_module(module)
    return getattr(module, name)


def main(path: str, name: str) -> None:
    """Run the function or the script, and write its answer beside it."""
    sys.path[:0] = [str(Path(__file__).parents[1])]  # tests/, as pytest does
    import hftrain.extras.trackers.choice
    from hftrain.core.launcher import read_launch

    hftrain.extras.trackers.choice.available_loggers = list  # no tracker that happens to be installed
    kwargs = json.loads(Path("kwargs.json").read_text(encoding="utf-8"))
    if name:
        result = find(path, name)(**kwargs)
    else:
        result = runpy.run_path(path, init_globals={"kwargs": kwargs}, run_name="__main__").get("result")
    Path(f"result_{read_launch().rank}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
