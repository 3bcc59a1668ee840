"""`hftrain compare`: which of two ways to train is better, from runs in pairs that exist or are made for it."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from hftrain.callbacks.base import TrainerCallback
from hftrain.cli.answer import Answer, table
from hftrain.cli.facts import in_digits, status_of
from hftrain.cli.replay import run_apart
from hftrain.cli.runs import RunRecord, read_run
from hftrain.cli.scripts import at_training, changed_construction, only_with, redirect
from hftrain.core.errors import ConfigError, check_known
from hftrain.core.seed import capture_rng, set_seed
from hftrain.core.tree import as_array, map_tensors
from hftrain.extras.compare import USUAL, Comparison
from hftrain.extras.flight.ledger import FlightLog
from hftrain.extras.flight.observing import own_part
from hftrain.extras.flight.reading import Lines, first_parting, read_ledger
from hftrain.trainer.trainer import Trainer

Pair = tuple[int | None, RunRecord, RunRecord]

# What a run that was trained here notes, in its folder.
FACTS = "compare.json"
# Words in the names of metrics of which smaller, and larger, numbers are better.
_LOWER = {"loss", "perplexity", "ppl", "error", "mse", "mae", "wer", "cer", "nll"}
_HIGHER = {"accuracy", "acc", "f1", "precision", "recall", "auc", "bleu", "match", "r2"}


def show_compare(
    runs: Sequence[str], *, should_run: bool = False, metric: str | None = None, better: str | None = None,
    min_difference: float = 0.0, seeds: str | None = None, output: str | None = None,
) -> Answer:  # fmt: skip
    """Say which of two ways to train is better, A or B, and how sure that is.

    The status is 0 if B is known not to be worse, 1 if it is worse, and 3 if neither is known.

    Args:
        runs: The output folders of two runs, or patterns of several; with `should_run`, two commands.
        should_run: Train both commands with the same seeds.
        metric: The number that is compared, as it was logged last; None: the loss of the evaluation.
        better: ``"lower"`` or ``"higher"``; None: as the metric's name says.
        min_difference: A difference that matters, in units of the metric.
        seeds: How many, or which, as in ``"1,2,3"``; None or ``"auto"``: until the difference is known, 12 at most.
        output: The folder of the runs that are trained; None: ``compare``. Those that are there are used.
    """
    if not 0 <= min_difference < math.inf:
        raise ConfigError(f"Cannot use --min-difference {min_difference}.", "It is not a distance.", "Name one from 0.")
    if not should_run and (seeds, output) != (None, None):
        raise ConfigError("Cannot use --seeds or -o here.", "Runs that exist are compared.", "Add --run, or omit them.")
    pairs, notes, is_same, folder = list[Pair](), list[str](), True, Path(output or "compare")
    numbers: tuple[list[float], list[float]] = [], []
    for pair in _trained(runs, metric, seeds or "auto", folder, notes) if should_run else _paired(runs, notes):
        pairs.append(pair)
        seed, *both = pair
        name = _metric_of(both, metric)
        for side, run in zip(numbers, both, strict=True):
            side.append(run.points(name)[-1][1])
        found = Comparison(*numbers, _is_higher_better(name, better), min_difference)
        is_same &= found.gains[-1] == 0 and is_same_to_the_bit(both[0].folder, both[1].folder)
        if should_run:
            print(f"seed {seed}: {name} A {numbers[0][-1]:.5g}, B {numbers[1][-1]:.5g}", file=sys.stderr, flush=True)
            if seeds in (None, "auto") and (is_same or found.verdict != "not known"):
                break
    return _answer(pairs, name, found, is_same=is_same, notes=notes)


def _answer(pairs: Sequence[Pair], name: str, found: Comparison, *, is_same: bool, notes: Sequence[str]) -> Answer:
    rows: list[Sequence[str]] = [("seed", "A", "B", "B - A")]
    data = found.facts() | {"metric": name, "pairs": [], "notes": notes}
    data |= {"verdict": "same to the bit", "more_pairs": None} if is_same else {}
    for (seed, *both), one, two in zip(pairs, found.one, found.two, strict=True):
        rows.append(("?" if seed is None else str(seed), *map(in_digits, (one, two, two - one))))
        data["pairs"].append({"seed": seed, "a": one, "b": two, "runs": [run.folder for run in both]})
    every = [shared(one.folder, two.folder) for _, one, two in pairs]
    data["shared"] = {what: sorted({each[what] for each in every}) for what in every[0]}
    lines = [*table(rows), "", f"{_sentence(data)} ({name}, {data['better']} is better, pairs: {len(pairs)})."]
    if (alone := data["independent_deviation"]) is not None:
        paired = data["deviation"]
        saved = max(0.0, 1 - (paired / alone) ** 2) if alone else 0.0
        how = f"the runs of a pair by {paired:.2g}: pairing saves about {saved:.0%} of the runs."
        lines.append(f"Two seeds of the same code differ by {alone:.2g}, {how}")
        starts = {read_facts(one.folder).get("weights") for _, one, _ in pairs} - {None}
        if len(starts) == 1:
            why = "Does the script set its own seed? {seed} in a command is replaced by that of a pair."
            notes = [*notes, f"All seeds start from the same weights. {why}"]
    lines += [f"{what.capitalize()} of a pair: {', or '.join(texts)}." for what, texts in data["shared"].items()]
    return Answer([*lines, *notes], data, status=0 if is_same else found.status)


def _sentence(data: dict[str, Any]) -> str:
    """Return what is known."""
    verdict, gain, margin, more = (data[name] for name in ("verdict", "gain", "margin", "more_pairs"))
    if verdict == "same to the bit":
        return "A and B are the same to the bit: what was changed has no effect"
    if verdict.endswith("diverged"):
        return f"{verdict}: the metric is NaN or infinite"
    if margin is None:
        return "Not known: " + (f"{more} more pairs needed" if more else "the metric is equal, though the runs are not")
    style = f".{max(0, 1 - math.floor(math.log10(margin)))}f" if margin < 1e4 else ".3g"
    size = f"{abs(gain):{style}} +/- {margin:{style}}"
    if verdict == "no difference":
        return f"No difference larger than {data['min_difference']:g}: {size}"
    if verdict != "not known":
        return f"{verdict} by {size}"
    needed = f"{more} more pairs needed if they go on like this" if more else "more than 50 pairs needed"
    return f"Not known: {size} for {'AB'[gain > 0]}, no difference larger than {abs(gain) + margin:.2g}; {needed}"


def _metric_of(runs: Sequence[RunRecord], metric: str | None) -> str:
    """Return the name of what is compared; `ConfigError` if one of the runs has not logged it."""
    for run in runs:
        losses = [name for name in run.metrics if name != run.subject(name) == "loss"]
        metric = metric or ("eval_loss" if "eval_loss" in losses else next(iter(losses), "eval_loss"))
        check_known(metric, run.metrics, f"Cannot compare the {metric} of {run.folder}.", "It has logged none.")
    return str(metric)


def _is_higher_better(name: str, better: str | None) -> bool:
    words = set(re.split(r"\W|_", name))
    is_higher = bool(words & _HIGHER)
    if better is None and (is_higher == bool(words & _LOWER) or "neg" in words):
        reason = "Its name does not say whether higher is better."
        raise ConfigError(f"Cannot compare {name}.", reason, "Add --better higher, or --better lower.")
    return is_higher if better is None else better == "higher"


# -- runs that exist -------------------------------------------------------------------------------------------------


def _paired(patterns: Sequence[str], notes: list[str]) -> list[Pair]:
    """Return the runs of both sides, in pairs of the same seed."""
    sides: list[list[RunRecord]] = []
    for pattern in patterns:
        sides.append([read_run(folder, name=folder) for folder in sorted(glob(pattern)) or [pattern]])
    for run in (run for side in sides for run in side if not read_facts(run.folder)):
        if (how := status_of(run)[0]) != "complete":
            notes.append(f"The end of {run.folder}: {how}.")
    if {run.folder for run in sides[0]} & {run.folder for run in sides[1]}:
        raise ConfigError("Cannot compare a run with itself.", "A and B both name it.", "Name others.")
    seeds = [[read_facts(run.folder).get("seed", run.origin.get("seed")) for run in side] for side in sides]
    if None in (*seeds[0], *seeds[1]) and len(seeds[0]) == len(seeds[1]):
        notes.append("Not all seeds are known, so the runs are paired in the order of their names.")
        return [(None, *both) for both in zip(*sides, strict=True)]
    one, two = (dict(zip(known, side, strict=True)) for known, side in zip(seeds, sides, strict=True))
    common = sorted(seed for seed in one if seed in two and seed is not None)
    if not common or len(one) < len(seeds[0]) or len(two) < len(seeds[1]):
        told = f"The seeds of A are {seeds[0]}, those of B {seeds[1]}."
        raise ConfigError("Cannot pair the runs.", told, "Name one run for each seed, and the same seeds.")
    if alone := [seed for seed in (*one, *two) if seed not in common]:
        notes.append(f"Left out, because only one side has them: seeds {', '.join(map(str, alone))}.")
    return [(seed, one[seed], two[seed]) for seed in common]


# -- runs that are made ----------------------------------------------------------------------------------------------


def _trained(commands: Sequence[str], metric: str | None, seeds: str, folder: Path, notes: list[str]) -> Iterator[Pair]:
    """Train both commands with each seed, unless that was done before, and yield the runs of a pair."""
    told = [{**_command_of(command), "metric": metric} for command in commands]
    if told[0] == told[1]:
        raise ConfigError("Cannot compare a command with itself.", "A and B are the same.", "Change one.")
    is_checked = False
    for seed in _numbers_of(seeds):
        folders = [folder / f"{letter}-seed{seed}" for letter in "ab"]
        for own, each in zip(folders, told, strict=True):
            facts = read_facts(own)
            if facts and any(facts[name] != each[name] for name in ("command", "code")):
                what = "It has another command, or the code next to its script has changed."
                raise ConfigError(f"Cannot use {own}.", what, "Name another folder with -o.")
            if facts:
                notes.append(f"{own} was there, and is used as it is.")
            else:
                if not is_checked:  # before A is trained in vain
                    _run({**told[1], "seed": seed, "folder": str(folders[1]), "is_check": True})
                _run({**each, "seed": seed, "folder": str(own), "is_check": False})
                is_checked = True
        one, two = (read_run(str(own), name=str(own)) for own in folders)
        yield seed, one, two


def _command_of(text: str) -> dict[str, Any]:
    """Return a command's script and arguments, and a digest of the code in the script's folder."""
    words = shlex.split(text)
    words = words[1:] if words and Path(words[0]).name.startswith("python") else words
    if not words or not Path(words[0]).is_file():
        reason = "It does not begin with a Python file that exists."
        raise ConfigError(f"Cannot run {text!r}.", reason, "Write it as in 'train.py --lr 1e-3'.")
    folder = Path(words[0]).resolve().parent
    code = b"".join(each.read_bytes() for each in sorted([*folder.glob("*.py"), *folder.glob("*/*.py")]))
    return {"command": words, "code": hashlib.sha256(code).hexdigest()}


def _numbers_of(seeds: str) -> Sequence[int]:
    if not re.fullmatch(r"auto|[1-9]\d*|\d+(,\d+)+", seeds):
        raise ConfigError(f"Cannot use --seeds {seeds}.", "It is auto, how many, or which as in 1,2,3.", "Correct it.")
    if "," in seeds:
        return list(dict.fromkeys(map(int, seeds.split(","))))
    return range(1, (USUAL if seeds == "auto" else int(seeds)) + 1)


def _run(told: dict[str, Any]) -> None:
    """Train in a new process; sets of text have the order of the seed there."""
    code = "import sys; from hftrain.cli.compare import run_once; run_once(sys.argv[1])"
    done = run_apart(code, json.dumps(told), 1, PYTHONHASHSEED=str(told["seed"]))
    if done.returncode or not (told["is_check"] or read_facts(told["folder"])):
        print(done.stdout, file=sys.stderr)
        reason = done.stdout.strip().rpartition("\n")[2] if done.returncode else ""
        reason = reason or f"It ended before train() did, with status {done.returncode}."
        raise ConfigError(f"Cannot train {shlex.join(told['command'])!r} with seed {told['seed']}.", reason)


def run_once(text: str) -> None:
    """Train a command as `show_compare` wants it, in this process; or only look whether it could be compared."""
    told, noting = json.loads(text), Noting()

    def change(given: dict[str, Any]) -> None:
        args = redirect(given, told["folder"])
        args.seed, args.save_strategy = told["seed"], type(args.save_strategy)("no")

    def act(trainer: Any, *given: Any, **named: Any) -> None:
        if trainer.eval_dataset is None and told["metric"] in (None, "eval_loss"):
            raise ConfigError("Cannot compare by an evaluation.", "There is no eval_dataset.", "Name a --metric.")
        if not told["is_check"]:
            _train(trainer, noting, *given, **named)
            Path(told["folder"], FACTS).write_text(json.dumps(told | noting.facts), encoding="utf-8")

    set_seed(told["seed"])
    with changed_construction(change):
        script, *arguments = (word.replace("{seed}", str(told["seed"])) for word in told["command"])
        at_training(script, arguments, act)


def _train(trainer: Any, noting: Noting, *given: Any, **named: Any) -> None:
    """Train, evaluate at the end, and save what was logged."""
    only_with(trainer, FlightLog(), noting)
    Trainer.train(trainer, *given, **named)
    last = [entry for entry in trainer.state.log_history if entry.get("step") == trainer.state.global_step]
    timed = {name for entry in last for name in entry if name.endswith("_runtime")} - {"train_runtime"}
    if trainer.eval_dataset is not None and not timed:
        trainer.evaluate()
    trainer.save_state()


# -- what runs share -------------------------------------------------------------------------------------------------


class Noting(TrainerCallback):
    """Note digests of the weights at the start, and of the random number generators at the start and the end."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note where the run starts."""
        arrays = (as_array(own_part(each).detach().cpu().contiguous()) for each in kwargs["model"].parameters())
        weights = [hashlib.sha256(each.tobytes()).hexdigest() for each in arrays]
        self.facts = {"weights": _digest(weights), "random": [_digest(_generators())]}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note where the generators have come to."""
        self.facts["random"].append(_digest(_generators()))


def _generators() -> Any:
    return map_tensors(capture_rng(), torch.Tensor.tolist)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def read_facts(folder: str | Path) -> dict[str, Any]:
    """Return what a run that `hftrain compare` has trained noted; empty for other runs."""
    path = Path(folder, FACTS)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def shared(one: str | Path, two: str | Path) -> dict[str, str]:
    """Return what two runs have recorded of samples, weights and random numbers: whether they were the same."""
    facts, ledgers = [read_facts(each) for each in (one, two)], [read_ledger(each) for each in (one, two)]
    names = {"weights at the start": "weights", "global random numbers": "random"}
    told = {what: [each.get(name) for each in facts] for what, name in names.items()}
    found = {
        what: "not known" if None in values else "the same" if values[0] == values[1] else "not the same"
        for what, values in told.items()
    }
    return {"samples": _samples(*ledgers)} | found


def _samples(*ledgers: Lines) -> str:
    one, two = (
        [sample for line in chain(*each.values()) for part in line.get("samples", []) for sample in part or [None]]
        for each in ledgers
    )
    if not one or not two or None in one or None in two:
        return "not known, without a flight log of data in an order"
    parted = next((place for place, both in enumerate(zip(one, two, strict=False), 1) if both[0] != both[1]), None)
    if parted is not None:
        return f"not the same from number {parted} on"
    more = "" if len(one) == len(two) else f", {len(one):,} of them in A and {len(two):,} in B"
    return f"the same indices, in the same order{more}"


def is_same_to_the_bit(one: str | Path, two: str | Path) -> bool:
    """Return whether two runs have recorded the same steps with the same numbers; False without flight logs."""
    ledgers: Sequence[Mapping[int, Any]] = [read_ledger(each) for each in (one, two)]
    is_as_long = ledgers[0].keys() == ledgers[1].keys() != set()
    return is_as_long and first_parting(*ledgers)[0] is None
