"""Run clients' scripts in this process: ``python run.py {transformers,hftrain} FOLDER MODULE.FUNCTION...``.

Each trains once for each number after ``--accumulation``, in FOLDER/MODULE.FUNCTION/NUMBER: result.json holds the log
history, the numbers that the function returns, the names of the checkpoints' files and the trainer's class, and
final.pt holds the trained weights; error.txt holds the traceback instead if it fails, and the others still run. Under
torchrun, each rank works in .../NUMBER/rank-N, and the output folder is shared. ``--whole``, ``--stop-after STEPS``
and ``--resume`` train without the seed that the scripts set at each step, which would hide what a resumed run does not
restore: to the end, up to a step, and on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

# Before torch is imported.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="", WANDB_DISABLED="true")
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
os.environ.update(TRL_EXPERIMENTAL_SILENCE="1")


def main(options: argparse.Namespace) -> None:
    """Train clients with one library's Trainer, and leave what came of it in the folder."""
    place: Path = options.folder.absolute()
    os.environ["HF_HOME"] = str(place / f"cache-{os.environ.get('RANK', 0)}")
    if options.library == "hftrain":
        import hftrain.compat

        hftrain.compat.install()
    from transformers import Trainer

    assert Trainer.__module__.split(".")[0] == options.library
    logging.getLogger("httpx").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    trainers = watch_training(Trainer, options)
    for client, accumulation in itertools.product(options.clients, options.accumulation):
        module, function = client.split(".")
        train = getattr(importlib.import_module(f"scripts.{module}"), function)
        shared = place / client / str(accumulation)
        folder = shared / f"rank-{os.environ['RANK']}" if "RANK" in os.environ else shared
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        try:
            run(train, shared / "out", accumulation, trainers)
        except Exception:
            Path("error.txt").write_text(traceback.format_exc(), encoding="utf-8")


def run(train: Any, out: Path, accumulation: int, trainers: list[Any]) -> None:
    import torch
    from transformers import Trainer, set_seed

    set_seed(7)
    more = train(str(out), gradient_accumulation_steps=accumulation)
    trainer = trainers[-1]
    kinds = [kind for kind in type(trainer).__mro__ if kind.__module__.split(".")[0] not in ("transformers", "hftrain")]
    weights = {name: value.detach().clone() for name, value in trained(trainer).state_dict().items()}
    torch.save(weights, "final.pt")
    result = {
        "history": trainer.state.log_history,
        "more": more,
        "files": {f.name: sorted(files_of(f)) for f in sorted(out.glob("checkpoint-*"))},
        "processes": trainer.args.world_size,
        "accumulation": trainer.args.gradient_accumulation_steps,
        "trainer": type(trainer).__name__,
        "overridden": sorted({name for kind in kinds for name in vars(kind) if is_hook(name, Trainer)}),
    }
    Path("result.json").write_text(json.dumps(result, default=float, indent=1), encoding="utf-8")


def is_hook(name: str, base: Any) -> bool:
    """Tell whether a name is a method of the Trainer that a library may override."""
    return not name.startswith("__") and callable(getattr(base, name, None))


def watch_training(trainer: Any, options: argparse.Namespace) -> list[Any]:
    """Return a list that gets each trainer that trains; let it stop after a number of steps or resume if asked to."""
    from scripts.parts import SeedEachStep, StopAfter

    SeedEachStep.seeds = not (options.whole or options.stop_after or options.resume)
    train, seen = trainer.train, []

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        if options.stop_after:
            self.add_callback(StopAfter(options.stop_after))
        # ms-swift passes the checkpoint by position.
        return train(self, resume_from_checkpoint=True) if options.resume else train(self, *args, **kwargs)

    trainer.train = watched
    return seen


def trained(trainer: Any) -> Any:
    """Return the module that the script says was trained: `trainer.model`, unless it names another."""
    return getattr(trainer, "trained_module", None) or trainer.model


def files_of(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=["transformers", "hftrain"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("clients", nargs="+")
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--stop-after", type=int)
    parser.add_argument("--resume", action="store_true")
    main(parser.parse_args())
