"""`hftrain prove`: whether a script trains the same on several processes as on one, and after a resume."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hftrain.checkpoint.manifest import PACKAGES, checkpoint_name
from hftrain.cli.answer import Answer
from hftrain.cli.replay import run_apart
from hftrain.cli.scripts import Perturb, at_training, changed_construction, only_with, redirect, until_training
from hftrain.core.errors import ConfigError
from hftrain.core.extras import extra, installed_versions, is_available
from hftrain.core.launcher import read_launch
from hftrain.core.seed import set_seed
from hftrain.extras.prove.claims import REFERENCE, THEIRS, Proof, Recording, legs_alone, legs_on_mesh
from hftrain.extras.prove.recording import SAVED_STEP, Leg, Recorder, calm, prepare
from hftrain.trainer.trainer import Trainer


def show_prove(
    script: str, arguments: Sequence[str] = (), *, strategy: str = "ddp", against: str = "single", processes: int = 2,
    is_full: bool = False, output: str | None = None,
) -> Answer:  # fmt: skip
    """Prove that a script trains the same on several processes of this machine as in one; status 1 if it does not.

    Args:
        script: A Python file that trains, with hftrain's Trainer or transformers'.
        arguments: Its own.
        strategy: The strategy of the processes; ``"own"``: the script's.
        against: Another strategy, with which they are compared on as many processes; ``"single"``: one process.
        processes: How many.
        is_full: Keep the size of the model.
        output: A Markdown file for the certificate; the same is written as JSON next to it.
    """
    for path, exists in ((script, Path(script).is_file()), (output, output is None or Path(output).parent.is_dir())):
        if not exists:
            reason = f"There is no {path!r}, or not its folder."
            raise ConfigError(f"Cannot prove {script!r}.", reason, "Check the path.")
    code = Path(script).read_bytes()
    if (loop := re.search(rb"\b(Engine|Accelerator)\(", code)) and b"Trainer" not in code:
        raise ConfigError(
            f"Cannot prove {script!r}.",
            f"It trains in a loop of its own, with {loop[1].decode()}: only Trainer.train() can be divided or resumed.",
            "For the proof, give its model, data, collator and loss to a Trainer in another script.",
        )
    with tempfile.TemporaryDirectory() as name:
        told = {"script": script, "arguments": list(arguments)}
        proof = _train(Path(name), told, strategy, against, processes, is_full=is_full)
        claims, limits, one = list(proof.claims()), proof.limits(), proof.recording("one")
    samples = [sorted(one.samples(step).elements()) for step in one.steps]
    data = {
        **told, "strategy": strategy, "against": against, "processes": processes,
        "claims": [asdict(each) for each in claims], "limits": limits, "versions": installed_versions(*PACKAGES),
        "code": "sha256:" + hashlib.sha256(code).hexdigest(),
        "data": "sha256:" + hashlib.sha256(json.dumps(samples).encode()).hexdigest(),
    }  # fmt: skip
    width = max(len(each.name) for each in claims)
    lines = [*(f"{each.status:8}  {each.name:{width}}  {each.found}".rstrip() for each in claims), "", *limits]
    if output is not None:
        hashes = (f"- {name}: {data[name]}" for name in ("versions", "code", "data"))
        page = [f"# Proof of {script}", "", *(f"    {line}" for line in lines), "", *hashes, ""]
        Path(output).write_text("\n".join(page), encoding="utf-8")
        Path(output).with_suffix(".json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return Answer(lines, data, status=int(any(each.status == "FAIL" for each in claims)))


def _train(folder: Path, told: dict[str, Any], strategy: str, against: str, processes: int, *, is_full: bool) -> Proof:
    """Run all trainings of a proof."""
    for precision in ("fp64", "fp32"):  # a script may keep something in float32, such as a second model
        proof = Proof(folder / precision, f"{strategy} on {processes} processes", against, precision)
        run = partial(_run_apart, proof, told)
        step: dict[str, Any] = {"precision": precision, "is_full": is_full}
        try:
            facts = run(legs_on_mesh(strategy, **step), processes).facts
            step["micro_batches"] = facts["accumulation"] * facts["data_ranks"]
            if against != "single":
                run([Leg(name=REFERENCE, strategy=against, evaluates=True, **step)], processes)
            run(legs_alone(facts["batch"], **step), 1)
        except LookupError as error:
            reason = str(error)
            continue
        if is_available("transformers"):
            with suppress(LookupError):
                run([Leg(name=THEIRS, precision="fp32", is_full=is_full)], 1)
        return proof
    raise ConfigError(
        f"Cannot train {told['script']!r} with strategy={strategy!r} on {processes} processes and alone.",
        reason,
        "Run the script itself: if it trains, name another strategy.",
    )


def _run_apart(proof: Proof, told: dict[str, Any], legs: Sequence[Leg], processes: int) -> Recording:
    """Run trainings in new processes, and return what the first of them has written; see `Proof.recording`."""
    first = proof.folder / legs[0].name
    first.mkdir(parents=True)
    plan = {**told, "folder": str(proof.folder), "legs": [asdict(leg) for leg in legs]}
    code = "import json, sys; from hftrain.cli.prove import run_legs; run_legs(**json.loads(sys.argv[1]))"
    done = run_apart(code, json.dumps(plan), processes)
    if done.returncode and not any(first.iterdir()):
        (first / "error-rank0.txt").write_text(done.stdout[-2000:], encoding="utf-8")
    return proof.recording(legs[0].name)


def run_legs(folder: str, script: str, arguments: Sequence[str], legs: Sequence[dict[str, Any]]) -> None:
    """Run trainings of a script, each in a folder of its own, in this process and those launched with it."""
    for fields in legs:
        own = Path(folder, fields["name"])
        own.mkdir(exist_ok=True)
        try:
            _run_leg(own, script, arguments, Leg(**fields))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            (own / f"error-rank{read_launch().rank}.txt").write_text(text, encoding="utf-8")


def _run_leg(own: Path, script: str, arguments: Sequence[str], leg: Leg) -> None:
    """Run a training, with transformers' Trainer if it is theirs: raises `ConfigError` if the script has hftrain's."""
    is_theirs, notes = leg.name == THEIRS, list[str]()
    kind: type[Any] = importlib.import_module("transformers").Trainer if is_theirs else Trainer
    resume = None if leg.resume is None else str(own.parent / leg.resume / checkpoint_name(SAVED_STEP))

    def act(trainer: Any, *_: Any, **__: Any) -> None:
        if not leg.drops and (names := calm(trainer.model if is_theirs else trainer.task)):
            how = "except when resuming to the bit; its masks were not compared."
            notes.append(f"Dropout was off in {len(names)} places, {how}")
        recorder = Recorder(leg, own, notes)
        more = [Perturb(leg.unit)] if leg.unit else []
        only_with(trainer, recorder, *more, without=extra("early_stopping").EarlyStoppingCallback)
        if is_theirs:
            trainer.training_step = recorder.noting(trainer.training_step)
        kind.train(trainer, resume)
        recorder.write(trainer)
        if not is_theirs:
            trainer.strategy.close()

    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError("Cannot compare with transformers' Trainer.", "The script uses hftrain's.", "")

    def change(given: dict[str, Any]) -> None:
        redirect(given, own, prepare(leg, given, notes))

    set_seed(0)
    with until_training(refuse) if is_theirs else nullcontext(), changed_construction(change, kind):
        at_training(script, arguments, act, kind)
