"""Run one client's script in this process: ``python run.py CLIENT {transformers,hftrain} FOLDER``.

Writes FOLDER/result.json (the log history, the numbers that the script returns and the names of the checkpoints' files)
and FOLDER/final.pt, the trained weights. Under torchrun, each rank works in FOLDER/rank-N, and the output folder is
shared. ``--whole``, ``--stop-after STEPS`` and ``--resume`` train without the seed that the scripts set at each step,
which would hide what a resumed run does not restore: to the end, up to a step, and on from the last checkpoint.
"""

from __future__ import annotations

import argparse
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


def main(options: argparse.Namespace) -> None:
    """Train one client with one library's Trainer, and leave what came of it in the folder."""
    if options.library == "hftrain":
        import hftrain.compat

        hftrain.compat.install()
    import torch
    from transformers import Trainer, set_seed

    assert Trainer.__module__.split(".")[0] == options.library
    logging.getLogger("httpx").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    shared: Path = options.folder.absolute()
    folder = shared / f"rank-{os.environ['RANK']}" if "RANK" in os.environ else shared
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["HF_HOME"] = str(folder / "cache")
    os.chdir(folder)
    set_seed(7)
    if options.whole or options.stop_after or options.resume:
        change_training(Trainer, options)
    script = importlib.import_module(f"scripts.{options.client}")
    out = shared / "out"
    trainer, more = script.train(str(out))
    assert any(kind is Trainer for kind in type(trainer).__mro__)
    weights = {name: value.detach().clone() for name, value in trained(trainer).state_dict().items()}
    torch.save(weights, "final.pt")
    result = {
        "history": trainer.state.log_history,
        "more": more,
        "files": {f.name: sorted(files_of(f)) for f in sorted(out.glob("checkpoint-*"))},
        "processes": trainer.args.world_size,
    }
    Path("result.json").write_text(json.dumps(result, default=float, indent=1), encoding="utf-8")


def change_training(trainer: Any, options: argparse.Namespace) -> None:
    """Let the scripts' `train()` stop after a number of steps or resume, and their steps keep the run's seed."""
    from scripts.parts import SeedEachStep, StopAfter

    SeedEachStep.seeds = False
    train = trainer.train

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if options.stop_after:
            self.add_callback(StopAfter(options.stop_after))
        return train(self, *args, **{**kwargs, **({"resume_from_checkpoint": True} if options.resume else {})})

    trainer.train = changed


def trained(trainer: Any) -> Any:
    """Return the module that the script says was trained: `trainer.model`, unless it names another."""
    return getattr(trainer, "trained_module", None) or trainer.model


def files_of(folder: Path) -> list[str]:
    """Return the files below a folder, by their paths in it."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    parser = argparse.ArgumentParser()
    parser.add_argument("client")
    parser.add_argument("library", choices=["transformers", "hftrain"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--stop-after", type=int)
    parser.add_argument("--resume", action="store_true")
    main(parser.parse_args())
