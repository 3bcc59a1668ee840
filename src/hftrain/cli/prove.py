"""`hftrain prove`: whether a script trains the same on several processes as on one, and after a resume."""

from __future__ import annotations

import hashlib
import importlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hftrain import compat
from hftrain.checkpoint.manifest import PACKAGES, checkpoint_name
from hftrain.cli.answer import Answer
from hftrain.cli.replay import run_apart
from hftrain.cli.rounding import Perturb
from hftrain.cli.scripts import at_training, changed_construction, until_training
from hftrain.core.errors import ConfigError
from hftrain.core.extras import extra, installed_versions, is_available
from hftrain.core.launcher import read_launch
from hftrain.core.seed import set_seed
from hftrain.extras.prove.claims import THEIRS, Proof, legs_alone, legs_on_mesh
from hftrain.extras.prove.recording import SAVED_STEP, Leg, Recorder, calm, prepare
from hftrain.strategies.registry import create_strategy
from hftrain.trainer.trainer import Trainer


def show_prove(
    script: str, arguments: Sequence[str] = (), *, strategy: str = "ddp", processes: int = 2, is_full: bool = False,
    output: str | None = None,
) -> Answer:  # fmt: skip
    """Prove that a script trains the same on several processes of this machine as in one; status 1 if it does not.

    Args:
        script: A Python file that trains, with hftrain's Trainer or transformers'.
        arguments: Its own.
        strategy: The strategy of the processes; ``"own"``: the script's.
        processes: How many.
        is_full: Keep the size of the model.
        output: A Markdown file for the certificate; the same is written as JSON next to it.
    """
    for path, exists in ((script, Path(script).is_file()), (output, output is None or Path(output).parent.is_dir())):
        if not exists:
            raise ConfigError(
                f"Cannot prove {script!r}.", f"There is no {path!r}, or not its folder.", "Check the path."
            )
    with tempfile.TemporaryDirectory() as name:
        for precision in ("fp64", "fp32"):  # a script may keep something in float32, such as a second model
            folder = Path(name, precision)
            proof = Proof(folder, f"{strategy} on {processes} processes", precision)
            how: dict[str, Any] = {"precision": precision, "is_full": is_full}
            _run_apart(folder, script, arguments, legs_on_mesh(strategy, **how), processes)
            error = proof.error("mesh")
            if not error:
                facts = proof.recording("mesh").ranks[0]
                how |= {name: facts[name] for name in ("batch", "accumulation", "data_ranks")}
                _run_apart(folder, script, arguments, legs_alone(**how), 1)
                error = proof.error("one")
            if not error:
                if is_available("transformers"):
                    _run_apart(folder, script, arguments, [Leg(name=THEIRS, precision="fp32", is_full=is_full)], 1)
                break
        else:
            raise ConfigError(
                f"Cannot train {script!r} with strategy={strategy!r} on {processes} processes and alone.",
                error,
                "Run the script itself: if it trains, name another strategy.",
            )
        claims, limits = list(proof.claims()), proof.limits()
        limits += ["In float32, to a thousandth, because it cannot be in float64."] if precision == "fp32" else []
        samples = [proof.recording("one").samples(step) for step in proof.recording("one").steps]
    data = {
        "script": script, "arguments": list(arguments), "strategy": strategy, "processes": processes,
        "claims": [asdict(each) for each in claims], "limits": limits, "versions": installed_versions(*PACKAGES),
        "code": "sha256:" + hashlib.sha256(Path(script).read_bytes()).hexdigest(),
        "data": "sha256:" + hashlib.sha256(json.dumps(samples).encode()).hexdigest(),
    }  # fmt: skip
    width = max(len(each.name) for each in claims)
    lines = [f"{each.status:8}  {each.name:{width}}  {each.found}".rstrip() for each in claims]
    lines = [*lines, "", *limits]
    if output is not None:
        hashes = (f"- {name}: {data[name]}" for name in ("versions", "code", "data"))
        page = [f"# Proof of {script}", "", *(f"    {line}" for line in lines), "", *hashes, ""]
        Path(output).write_text("\n".join(page), encoding="utf-8")
        Path(output).with_suffix(".json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return Answer(lines, data, status=int(any(each.status == "FAIL" for each in claims)))


def _run_apart(folder: Path, script: str, arguments: Sequence[str], legs: Sequence[Leg], processes: int) -> None:
    """Run trainings of a script in new processes, which write into the folder."""
    folder.mkdir(exist_ok=True)
    plan = {"script": script, "arguments": list(arguments), "legs": [asdict(leg) for leg in legs]}
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    code = "import sys; from hftrain.cli.prove import run_legs; run_legs(sys.argv[1])"
    done = run_apart(code, str(folder), processes)
    if done.returncode:
        (folder / legs[0].name).mkdir(exist_ok=True)
        if not any((folder / legs[0].name).iterdir()):
            (folder / legs[0].name / "error-rank0.txt").write_text(done.stdout[-2000:], encoding="utf-8")


def run_legs(name: str) -> None:
    """Run the trainings that a folder's plan lists, in this process and those launched with it."""
    folder = Path(name)
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    legs = [Leg(**fields) for fields in plan["legs"]]
    if is_available("transformers") and legs[0].name != THEIRS:
        compat.install()  # the script may import transformers' Trainer
    for leg in legs:
        try:
            run = _run_theirs if leg.name == THEIRS else _run_leg
            run(folder, plan["script"], plan["arguments"], leg)
        except Exception as error:
            own = folder / leg.name / f"error-rank{read_launch().rank}.txt"
            own.parent.mkdir(exist_ok=True)
            own.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")


def _run_leg(folder: Path, script: str, arguments: Sequence[str], leg: Leg) -> None:
    own, notes = folder / leg.name, list[str]()
    resume = None if leg.resume is None else str(folder / leg.resume / checkpoint_name(SAVED_STEP))

    def act(trainer: Any, *_: Any, **__: Any) -> None:
        callbacks, stops = trainer.callback_handler.callbacks, extra("early_stopping").EarlyStoppingCallback
        callbacks[:] = [each for each in extra("trackers").without_trackers(callbacks) if not isinstance(each, stops)]
        if not leg.drops and (names := calm(trainer.task)):
            notes.append(
                f"Dropout was off in {len(names)} places, except when resuming to the bit; its masks were not compared."
            )
        recorder = Recorder(leg, own, notes)
        trainer.add_callback(recorder)
        if leg.unit:
            trainer.add_callback(Perturb(leg.unit))
        own.mkdir(parents=True, exist_ok=True)
        Trainer.train(trainer, resume)
        recorder.write(trainer)
        trainer.strategy.close()

    set_seed(0)
    with changed_construction(lambda given: prepare(leg, own, given, notes)):
        at_training(script, arguments, act)


def _run_theirs(folder: Path, script: str, arguments: Sequence[str], leg: Leg) -> None:
    """Run a leg with transformers' Trainer; raise `ConfigError` if the script trains with hftrain's instead."""
    kind: type[Any] = importlib.import_module("transformers").Trainer
    own, notes = folder / leg.name, list[str]()

    def act(trainer: Any, *_: Any, **__: Any) -> None:
        calm(trainer.model)
        recorder = Recorder(leg, own, notes)
        trainer.add_callback(recorder)
        trainer.training_step = recorder.noting(trainer.training_step)
        own.mkdir(parents=True, exist_ok=True)
        trainer.train()
        recorder.write(SimpleNamespace(args=trainer.args, strategy=create_strategy("single"), eval_dataset=None))

    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError("Cannot compare with transformers' Trainer.", "The script uses hftrain's.", "")

    set_seed(0)
    with until_training(refuse), changed_construction(lambda given: prepare(leg, own, given, notes), kind):
        at_training(script, arguments, act, kind)
