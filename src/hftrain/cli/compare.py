"""`hftrain compare`: whether one of two ways to train is better, from runs in pairs that exist or are made for it."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from glob import glob
from importlib.abc import MetaPathFinder
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from hftrain import compat
from hftrain.arguments.training import TrainingArguments
from hftrain.cli.answer import Answer, table
from hftrain.cli.estimate import at_training, changed_construction
from hftrain.cli.facts import in_digits, status_of
from hftrain.cli.replay import run_apart
from hftrain.cli.runs import RunRecord, read_run
from hftrain.core.errors import ConfigError, check_known
from hftrain.core.extras import extra
from hftrain.core.optional import is_available
from hftrain.core.seed import set_seed
from hftrain.extras.compare import FACTS, FIRST, USUAL, Comparison, Noting, is_same_to_the_bit, read_facts, shared
from hftrain.extras.flight.ledger import FlightLog
from hftrain.storage.files import is_url
from hftrain.trainer.trainer import Trainer

# How the names of metrics end of which smaller, and larger, numbers are better.
_LOWER = ("loss", "perplexity", "ppl", "error", "mse", "mae", "wer", "cer", "nll")
_HIGHER = ("accuracy", "acc", "f1", "precision", "recall", "auc", "bleu", "exact_match", "r2")
# The exit status of a process whose script imports transformers' Trainer.
_NEEDS_TRANSFORMERS = 75


class _Pair(NamedTuple):
    seed: Any  # None if it is not known
    one: RunRecord
    two: RunRecord


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
    pairs, notes = list[_Pair](), list[str]()
    is_auto = seeds in (None, "auto")
    found = (
        _trained(runs, metric, seeds or "auto", Path(output or "compare"), notes)
        if should_run
        else _paired(runs, notes)
    )
    for pair in found:
        pairs.append(pair)
        name = _metric_of(pairs, metric)
        is_higher = _is_higher_better(name, better)
        numbers = [[each.points(name)[-1][1] for each in side] for side in list(zip(*pairs, strict=True))[1:]]
        comparison = Comparison(*numbers, is_higher, min_difference)
        is_same = numbers[0] == numbers[1] and all(is_same_to_the_bit(one.folder, two.folder) for _, one, two in pairs)
        if should_run:
            texts = (f"{letter} {in_digits(each[-1])}" for letter, each in zip("AB", numbers, strict=True))
            print(f"seed {pair.seed}: {name} {', '.join(texts)}", file=sys.stderr, flush=True)
        is_finite = all(map(math.isfinite, comparison.gains))
        if is_auto and should_run and (is_same or not is_finite or comparison.verdict != "not known"):
            break
    return _answer(pairs, name, comparison, is_same=is_same, notes=notes)


def _answer(
    pairs: Sequence[_Pair], name: str, comparison: Comparison, *, is_same: bool, notes: Sequence[str]
) -> Answer:
    rows = [("seed", "A", "B", "B - A")]
    for pair, one, two in zip(pairs, comparison.one, comparison.two, strict=True):
        rows.append(("?" if pair.seed is None else str(pair.seed), *map(in_digits, (one, two, two - one))))
    together = [shared(pair.one.folder, pair.two.folder) for pair in pairs]
    alike = {what: sorted({each[what] for each in together}) for what in together[0]}
    verdict = "the same to the bit" if is_same else comparison.verdict
    is_finite = all(map(math.isfinite, comparison.gains))
    has_margin = is_finite and math.isfinite(comparison.margin())
    data: dict[str, Any] = {
        "verdict": verdict, "metric": name, "better": "higher" if comparison.is_higher_better else "lower",
        "pairs": [
            {"seed": pair.seed, "a": one, "b": two, "runs": [pair.one.folder, pair.two.folder]}
            for pair, one, two in zip(pairs, comparison.one, comparison.two, strict=True)
        ],
        "gain": comparison.gain, "margin": comparison.margin() if has_margin else None,
        "min_difference": comparison.least, "more_pairs": None, "deviation": None, "independent_deviation": None,
        "shared": alike, "notes": list(notes),
    }  # fmt: skip
    if verdict == "not known" and is_finite:
        data["more_pairs"] = comparison.more() if len(pairs) >= FIRST else FIRST - len(pairs)
    lines = [*table(rows), "", _sentence(data, comparison, is_finite=is_finite)]
    if len(pairs) > 1 and is_finite:
        lines += _noise(comparison, data)
    lines += [f"{what.capitalize()} of a pair: {', or '.join(texts)}." for what, texts in alike.items()]
    return Answer([*lines, *notes], data, status=0 if is_same else comparison.status)


def _sentence(data: dict[str, Any], comparison: Comparison, *, is_finite: bool) -> str:
    """Return what is known."""
    number = len(comparison.gains)
    around = f"{data['metric']}, {data['better']} is better, {number} pair{'s' * (number > 1)}"
    if data["verdict"] == "the same to the bit":
        return f"A and B gave the same numbers to the bit ({around}): what was changed has no effect."
    if not is_finite:
        bad = [
            f"{letter} {sum(not math.isfinite(each) for each in numbers)}"
            for letter, numbers in (("A", comparison.one), ("B", comparison.two))
        ]
        return f"Not known, because runs diverged: NaN or infinite are {', '.join(bad)} of {number} ({around})."
    gain, margin = comparison.gain, comparison.margin()
    if not math.isfinite(margin):
        if number < FIRST:
            return f"Not known ({around}): {FIRST - number} more needed at least."
        return f"Not known ({around}): the numbers are equal, though the runs are not. Name another --metric."
    digits = max(0, 1 - math.floor(math.log10(margin))) if margin else 0
    size = f"{abs(gain):.{digits}f} +/- {margin:.{digits}f}"
    most = f"no difference larger than {in_digits(abs(gain) + margin)}"
    if data["verdict"] in ("A is better", "B is better"):
        return f"{data['verdict']} by {size} ({around})."
    if data["verdict"] == "no difference":
        return f"No difference larger than {in_digits(comparison.least)} ({around}): {size}."
    more = "more than 50 pairs" if data["more_pairs"] is None else f"{data['more_pairs']} more pairs"
    side = "B" if gain > 0 else "A"
    return f"Not known: {side} seems better by {size}, {most} ({around}). If they go on like this, {more} are needed."


def _noise(comparison: Comparison, data: dict[str, Any]) -> Iterator[str]:
    """Yield how far seeds of the same code are apart, and whether pairing helped."""
    paired, alone = comparison.deviation, comparison.independent_deviation
    data |= {"deviation": paired, "independent_deviation": alone}
    yield f"Noise: two seeds of the same code differ by {in_digits(alone)} (standard deviation of the difference)."
    if not alone:
        yield "The seed changes nothing: the script sets its own, or has no random numbers."
    elif math.isfinite(paired):
        helped = f"{in_digits((alone / paired) ** 2)} times" if paired < alone else "not"
        yield f"In pairs they differ by {in_digits(paired)}: it takes {helped} fewer runs, roughly."


def _metric_of(pairs: Sequence[_Pair], metric: str | None) -> str:
    """Return the name of what is compared; `ConfigError` if a run of the last pair has not logged it."""
    _, *last = pairs[-1]
    for run in last:
        known = run.metrics()
        losses = [name for name in known if name != run.subject(name) == "loss"]
        name = metric or ("eval_loss" if "eval_loss" in losses else next(iter(losses), None))
        asked = f"Cannot compare {'an evaluation loss' if name is None else name} of {run.folder}."
        check_known(name or "eval_loss", known, asked, "It has not logged one. Evaluate, or name a --metric.")
    return str(name)


def _is_higher_better(name: str, better: str | None) -> bool:
    if better is not None:
        return better == "higher"
    if not name.endswith((*_LOWER, *_HIGHER)):
        reason = "Its name does not say whether higher is better."
        raise ConfigError(f"Cannot compare {name}.", reason, "Add --better higher, or --better lower.")
    return name.endswith(_HIGHER)


# -- runs that exist -------------------------------------------------------------------------------------------------


def _paired(patterns: Sequence[str], notes: list[str]) -> list[_Pair]:
    """Return the runs of both sides, in pairs of the same seed."""
    sides = []
    for pattern in patterns:
        folders = [pattern] if is_url(pattern) or Path(pattern).is_dir() else sorted(glob(pattern))
        if not folders:
            raise ConfigError(
                f"Cannot compare {pattern!r}.", "There is no such run.", "Name an output_dir, or 'runs/a-*'."
            )
        sides.append([read_run(folder, name=folder) for folder in folders])
    for run in chain(*sides):
        if status_of(run)[0] != "complete" and not read_facts(run.folder):
            notes.append(f"{run.folder} has not ended, or its end is not known: {status_of(run)[0]}.")
    seeds = [[_seed_of(run) for run in side] for side in sides]
    if None in (*seeds[0], *seeds[1]) and len(seeds[0]) == len(seeds[1]):
        notes.append("The seeds are not known, so the runs are paired in the order of their names.")
        return [_Pair(None, *both) for both in zip(*sides, strict=True)]
    by_seed = [{_seed_of(run): run for run in side} for side in sides]
    common = [seed for seed in by_seed[0] if seed in by_seed[1] and seed is not None]
    if any(len(set(each)) < len(each) for each in seeds) or not common:
        told = f"The seeds of A are {seeds[0]}, of B {seeds[1]}."
        raise ConfigError("Cannot pair the runs.", told, "Name one run for each seed, and the same seeds.")
    if alone := {*seeds[0]} ^ {*seeds[1]}:
        notes.append(f"Left out, because only one side has them: seeds {', '.join(map(str, sorted(alone)))}.")
    pairs = [_Pair(seed, by_seed[0][seed], by_seed[1][seed]) for seed in common]
    if any(pair.one.folder == pair.two.folder for pair in pairs):
        raise ConfigError("Cannot compare a run with itself.", "A and B name the same folder.", "Name two.")
    return pairs


def _seed_of(run: RunRecord) -> int | None:
    seed: int | None = read_facts(run.folder).get("seed", run.origin.get("seed"))
    return seed


# -- runs that are made ----------------------------------------------------------------------------------------------


def _trained(
    commands: Sequence[str], metric: str | None, seeds: str, folder: Path, notes: list[str]
) -> Iterator[_Pair]:  # fmt: skip
    """Train both commands with each seed, unless that was done before, and yield the runs of a pair."""
    words = [_words_of(command) for command in commands]
    if words[0] == words[1]:
        raise ConfigError("Cannot compare a command with itself.", "A and B are the same.", "Name two.")
    numbers = _numbers_of(seeds)
    made = [_code_of(each) for each in words]
    used, is_checked = 0, False
    for seed in numbers:
        pair = []
        for letter, command, about in zip("ab", words, made, strict=True):
            own = folder / f"{letter}-seed{seed}"
            before = read_facts(own)
            if before and before["made"] != about:
                raise ConfigError(
                    f"Cannot train into {own}.", "It holds another command, or script.", "Name another -o."
                )
            if not before:
                told = {
                    "folder": str(own), "command": command, "seed": seed, "metric": metric, "made": about,
                    "is_check": False, "has_transformers": False,
                }  # fmt: skip
                if not is_checked:  # before A is trained in vain
                    _run(told | {"command": words[1], "is_check": True})
                    is_checked = True
                _run(told)
            used += bool(before)
            pair.append(read_run(str(own), name=str(own)))
        yield _Pair(seed, *pair)
    if used:
        notes.append(f"{used} of the runs were there already.")


def _words_of(command: str) -> list[str]:
    """Return the script of a command and its arguments."""
    words = shlex.split(command)
    words = words[1:] if words and Path(words[0]).name.startswith("python") else words
    if not words or not Path(words[0]).is_file():
        reason = "It does not begin with a Python file that exists."
        raise ConfigError(f"Cannot run {command!r}.", reason, "Write it as in 'train.py --lr 1e-3'.")
    return words


def _numbers_of(seeds: str) -> Sequence[int]:
    try:
        numbers = range(1, USUAL + 1) if seeds == "auto" else [int(each) for each in seeds.split(",")]
    except ValueError:
        numbers = []
    numbers = range(1, numbers[0] + 1) if seeds.isdigit() else numbers
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise ConfigError(f"Cannot use --seeds {seeds}.", "It is auto, a number, or seeds as in 1,2,3.", "Correct it.")
    return numbers


def _code_of(words: Sequence[str]) -> dict[str, Any]:
    """Return a command, and the digest of the code in its script's folder."""
    files = sorted(Path(words[0]).resolve().parent.glob("*.py"))
    return {"command": list(words), "code": hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()}


class _NeedsTransformers(BaseException):
    """Its Trainer has to be replaced before a script imports it; not an `Exception`, which the script may catch."""


class _Watch(MetaPathFinder):
    """Ends a script that imports transformers' Trainer; the others need not wait for the import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "transformers.trainer":
            raise _NeedsTransformers


def _run(told: dict[str, Any]) -> None:
    """Train in a new process."""
    code = "import sys; from hftrain.cli.compare import run_once; run_once(sys.argv[1])"
    done = run_apart(code, json.dumps(told), 1, PYTHONHASHSEED=str(told["seed"]))  # the order of sets
    if done.returncode == _NEEDS_TRANSFORMERS:
        return _run(told | {"has_transformers": True})
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        reason = (done.stdout.strip() or f"Its exit status is {done.returncode}").splitlines()[-1]
        raise ConfigError(f"Cannot train {shlex.join(told['command'])!r} with seed {told['seed']}.", reason)


def run_once(text: str) -> None:
    """Train a command as `show_compare` wants it, in this process; or only look whether it could be compared."""
    told, noting, watch = json.loads(text), Noting(), _Watch()
    folder = Path(told["folder"])

    def change(given: dict[str, Any]) -> None:
        args = given["args"] = copy.copy(given.get("args") or TrainingArguments(str(folder)))
        args.output_dir, args.seed, args.report_to, args.push_to_hub = str(folder), told["seed"], [], False
        args.save_strategy, args.load_best_model_at_end = type(args.save_strategy)("no"), False

    def act(trainer: Any) -> None:
        sys.meta_path[:] = [each for each in sys.meta_path if each is not watch]
        if trainer.eval_dataset is None and told["metric"] in (None, "eval_loss"):
            raise ConfigError(
                "Cannot compare by an evaluation.", "The Trainer has no eval_dataset.", "Name a --metric."
            )
        if not told["is_check"]:
            _train(trainer, folder, noting)
            facts = {"made": told["made"], "seed": told["seed"], **noting.facts}
            (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")

    if told["has_transformers"]:
        compat.install()
    elif is_available("transformers"):
        sys.meta_path.insert(0, watch)
    set_seed(told["seed"])
    try:
        with changed_construction(change):
            at_training(told["command"][0], told["command"][1:], act)
    except _NeedsTransformers:
        sys.exit(_NEEDS_TRANSFORMERS)


def _train(trainer: Any, folder: Path, noting: Noting) -> None:
    """Train, evaluate at the end, and write down what was logged."""
    callbacks = trainer.callback_handler.callbacks
    callbacks[:] = extra("trackers").without_trackers(callbacks)
    if not any(isinstance(each, FlightLog) for each in callbacks):
        trainer.add_callback(FlightLog())
    trainer.add_callback(noting)
    Trainer.train(trainer)
    last = [entry for entry in trainer.state.log_history if entry.get("step") == trainer.state.global_step]
    timed = {name for entry in last for name in entry if name.endswith("_runtime")} - {"train_runtime"}
    if trainer.eval_dataset is not None and not timed:
        trainer.evaluate()
    trainer.save_state()
