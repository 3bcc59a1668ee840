"""Run one client's script in this process: ``python run.py CLIENT {transformers,hftrain} FOLDER``.

Writes FOLDER/result.json (the log history, the numbers that the script returns and the names of the checkpoints' files)
and FOLDER/final.pt, the trained weights.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

# Before torch is imported.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="", WANDB_DISABLED="true")
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
os.environ.update(TRL_EXPERIMENTAL_SILENCE="1")


def main(client: str, library: str, folder: Path) -> None:
    """Train one client with one library's Trainer, and leave what came of it in the folder."""
    if library == "hftrain":
        import hftrain.compat

        hftrain.compat.install()
    import torch
    from transformers import Trainer, set_seed

    assert Trainer.__module__.split(".")[0] == library
    logging.getLogger("httpx").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["HF_HOME"] = str(folder / "cache")
    os.chdir(folder)
    set_seed(7)
    script = importlib.import_module(f"scripts.{client}")
    trainer, more = script.train("out")
    assert any(kind is Trainer for kind in type(trainer).__mro__)
    weights = {name: value.detach().clone() for name, value in trained(trainer).state_dict().items()}
    torch.save(weights, "final.pt")
    result = {
        "history": trainer.state.log_history,
        "more": more,
        "files": {f.name: sorted(files_of(f)) for f in sorted(Path("out").glob("checkpoint-*"))},
    }
    Path("result.json").write_text(json.dumps(result, default=float, indent=1), encoding="utf-8")


def trained(trainer: Any) -> Any:
    """Return the module that the script says was trained: `trainer.model`, unless it names another."""
    return getattr(trainer, "trained_module", None) or trainer.model


def files_of(folder: Path) -> list[str]:
    """Return the files below a folder, by their paths in it."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]).absolute())
