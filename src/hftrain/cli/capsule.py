"""`hftrain capsule` and `hftrain open`: a step of a run in one file, and that step done again from the file."""

from __future__ import annotations

import bdb
import dataclasses
import hashlib
import importlib
import importlib.util
import json
import math
import re
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from hftrain.arguments.serialization import changed_settings
from hftrain.arguments.training import TrainingArguments
from hftrain.cli.answer import Answer
from hftrain.cli.capsule_file import packed, read, write
from hftrain.cli.replay import do_step, ledger_with, run_apart, session_of
from hftrain.cli.rounding import FACTOR, FLOOR, unit_of
from hftrain.cli.stepping import StepObserver, weights_of
from hftrain.core.errors import ConfigError, a_kind, listed
from hftrain.core.optional import require
from hftrain.core.parameters import attention_of
from hftrain.core.preserve import temporarily
from hftrain.extras.flight.observing import Observer
from hftrain.extras.flight.reading import first_parting, read_ledger
from hftrain.extras.record import SECRET
from hftrain.loops.fit import FitLoop
from hftrain.storage.files import readable_bytes
from hftrain.trainer.trainer import Trainer

# The arguments that a step depends on.
_SETTINGS = re.compile(
    r"adafactor|adam_\w+|average_tokens_across_devices|bf16|fp16\w*|full_determinism|(gradient|activation)_\w+|seed|tf32"
    r"|half_precision_backend|label_\w+|learning_rate|liger_kernel_config|max_grad_norm|neftune_noise_alpha|optim\w*"
    r"|past_index|per_device_train_batch_size|torch_compile\w*|use_\w+|weight_decay"
)
# What a configuration has that is a path of the user's, or makes transformers load weights or code.
_LOADS = re.compile(r"_name_or_path|_?(attn|experts)_implementation\w*|auto_map|use_pretrained_backbone|use_kernels")
# The kinds of attention that load none.
_ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def show_capsule(
    run: str, *, step: int, output: str | None = None, make: str | None = None, has_source: bool = False,
    has_optimizer: bool = True, script: Sequence[str] = (),
) -> Answer:  # fmt: skip
    """Write a step of a run into one file with which it can be done again without the run's data and checkpoints.

    Args:
        run: Its output folder, which is only read.
        step: The step, from 1.
        output: The file; None: ``step<N>.capsule``.
        make: ``"FILE.py:function"``, which returns the Trainer for its arguments; None: the plain Trainer, with a model
            of transformers.
        has_source: Whether the file holds the source of that Python file, and of what it imports from its folder.
        has_optimizer: Whether it holds the optimizer's state, without which the update is not compared.
        script: The script and its arguments; empty: those that the flight log names.
    """
    path = Path(output or f"step{step}.capsule").absolute()
    if not path.parent.is_dir():
        raise ConfigError(f"Cannot write {path}.", "Its folder does not exist.", "Check the path.")
    file, _, function = (make or "").rpartition(":")
    if make and not (file.endswith(".py") and Path(file).is_file()):
        raise ConfigError(f"Cannot use --make {make}:", "it is not FILE.py:function of a file.", "Check the path.")
    folder, made_by = Path(file).resolve().parent, f"{Path(file).name}:{function}" if make else None
    capsule, rows = _captured(run, step, made_by, script)
    if not has_optimizer:
        capsule["optimizer"], rows = None, [row for row in rows if not row[0].startswith("update of ")]
    again, moved = (_do_again(capsule, folder, unit=unit).rows for unit in (None, unit_of(capsule["precision"])))
    limits = [_limit(one, two) for one, two in zip(again, moved, strict=False)]
    capsule["expected"] = [[*row, limit or 0.0] for row, limit in zip_longest(rows, limits[: len(rows)])]
    texts = _texts(folder) if make else {}
    capsule |= {"sources": texts if has_source else {}, "hashes": {name: _hash(text) for name, text in texts.items()}}
    text, tensors = packed(capsule)
    print("\n".join(_contents(capsule, text, tensors)), flush=True)
    write(path, text, tensors)
    code = "import json, sys; from hftrain.cli.commands import main; main(json.loads(sys.argv[1]))"
    done = run_apart(code, json.dumps(["open", str(path), *(["--code", str(folder)] if make else [])]), 1)
    said = [line for line in done.stdout.splitlines() if line.startswith(("PASS", "FAIL"))] or [done.stdout[-2000:]]
    lines = [f"Wrote {path.name}, {readable_bytes(path.stat().st_size)}.", f"hftrain open says here: {said[-1]}"]
    return Answer(lines, {"path": str(path), "opened": said[-1]}, status=done.returncode)


def _captured(run: str, step: int, make: str | None, script: Sequence[str]) -> tuple[dict[str, Any], list[list[Any]]]:
    """Do a step again as the run did, and return what a capsule holds of it, and its numbers."""
    before, number, observers = ledger_with(run, step), session_of(run, step)["world_size"], list[StepObserver]()
    if number > 1:
        why = f"Its {number} processes depend on each other's numbers."
        raise ConfigError(f"Cannot put step {step} of {run} into a file.", why, "Use hftrain replay.")
    capsule: dict[str, Any] = {"run": Path(run).name, "step": step, "make": make}

    def look(trainer: Any) -> Observer:
        capsule.update(_how_made(trainer, make), command=SECRET.sub(r"\1***", " ".join(sys.argv)))
        observers.append(StepObserver(step, trainer))
        return observers[0]

    with tempfile.TemporaryDirectory() as scratch:
        do_step(run, step, scratch, script=script, look=look)
        parted, _, values = first_parting(before, read_ledger(scratch))
    if parted is not None:
        print(f"Step {parted}, done again, is not the same as in the run: {values}.")
    return capsule | observers[0].begin, observers[0].rows


def _how_made(trainer: Any, make: str | None) -> dict[str, Any]:
    """Return how a Trainer is made without its data; `ConfigError` if nobody says so, or its step is not one of a kind.

    Without `make`, that is a plain Trainer with a model of transformers.
    """
    loop, args, model = trainer.loops.get("fit"), trainer.args, trainer.model
    if trainer.strategy.name != "single" or not trainer.task.automatic_optimization or type(loop) not in _LOOPS:
        what = f"It is made with strategy={trainer.strategy.name!r}, {type(trainer.task).__name__}, {a_kind(loop)}."
        remedy = "A capsule holds the step of one optimizer, with strategy='single' and hftrain's own loop."
        raise ConfigError("Cannot put the step into a file.", what, remedy)
    kind = type(model)
    is_known = getattr(sys.modules.get("transformers"), kind.__name__, None) is kind and hasattr(model, "config")
    is_plain = type(trainer) is Trainer and all(getattr(trainer, name) is None for name in _GIVEN)
    if make is None and not (is_known and is_plain):
        what = f"Nothing says how its {type(trainer).__name__} with {a_kind(model)} is made."
        remedy = "Name a function that returns the Trainer for TrainingArguments: --make FILE.py:function."
        raise ConfigError("Cannot put the step into a file.", what, remedy)
    config = None if make else _harmless(json.loads(model.config.to_json_string(use_diff=False)))
    settings = _allowed(changed_settings(args.to_dict(), TrainingArguments))
    how = None if make else {"class": kind.__name__, "config": config, "attention": attention_of(model)}
    return {"model": how, "settings": settings, "precision": trainer.precision.policy.name}


def _contents(capsule: Mapping[str, Any], text: str, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return how large the parts of a capsule are, and what may be personal in it."""
    sizes = Counter({"text": len(text)})
    for name, each in tensors.items():
        sizes[name.partition("/")[0]] += each.nbytes
    batches, sources = capsule["batches"], ", ".join(capsule["sources"]) or "none, only hashes"
    names = ", ".join(map(str, batches[0])) if isinstance(batches[0], Mapping) else "tensors"
    return [
        *(f"{name:12}{readable_bytes(size)}" for name, size in sizes.items()),
        f"Personal data? The file holds its {len(batches)} micro-batches as they are: {names}.",
        f"Source: {sources}. Command: {capsule['command']}",
    ]


def show_open(path: str, *, code: str | None = None, runs_source: bool = False, at: str | None = None) -> Answer:
    """Do the step of a capsule again, and compare its numbers with those in the file; status 1 if they differ.

    Args:
        path: The file.
        code: The folder of the Python file that makes the Trainer, if the capsule names one.
        runs_source: Use the source in the file instead.
        at: The name of a module in whose first call a debugger opens.
    """
    capsule = read(Path(path))
    file, sources = (capsule["make"] or "").partition(":")[0], capsule["sources"]
    if file and not runs_source and not (code and Path(code, file).is_file()):
        shown = [line for name, text in sources.items() for line in (f"# {name}", *text.splitlines(), "")]
        remedy = "Read the source above; --run-source runs it." if sources else "Its source is not in the capsule."
        shown.append(f"Its Trainer is made by {capsule['make']}: name the folder of {file} with --code. {remedy}")
        return Answer(map(_printable, shown), {"make": capsule["make"], "sources": sources}, status=1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if runs_source else Path(code or ".").resolve()
        for name, text in sources.items() if runs_source else ():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, "utf-8")
        texts = {name: (folder / name).read_text("utf-8") for name in capsule["hashes"] if (folder / name).is_file()}
        try:
            observer = _do_again(capsule, folder, at=at)
        except bdb.BdbQuit:
            return Answer(["Nothing was compared."], {"differs": None, "is_same": None}, status=1)
    was, now = capsule["around"], observer.begin["around"]
    notes = [f"{name} was {was.get(name)}, and is {now[name]}." for name in now if was.get(name) != now[name]]
    notes += [f"{name} is not as it was." for name, text in texts.items() if _hash(text) != capsule["hashes"][name]]
    if capsule["optimizer"] is None:
        notes.append("The update was not compared: the file has no state of the optimizer.")
    said, facts = _compared(capsule["expected"], observer.rows)
    lines = [f"Step {capsule['step']} of {capsule['run']}, {len(capsule['batches'])} micro-batches.", said, *notes]
    return Answer(map(_printable, lines), {**facts, "notes": notes}, status=int(facts["differs"] is not None))


def _do_again(capsule: Mapping[str, Any], folder: Path, *, unit: float | None = None, at: str | None = None) -> Any:
    """Do the step of a capsule with the Trainer that a function in a folder makes, or the plain one; return its observer."""
    with tempfile.TemporaryDirectory() as scratch, temporarily(sys, path=[str(folder), *sys.path]):
        args = TrainingArguments(
            scratch, max_steps=capsule["step"], save_strategy="no", logging_strategy="no", report_to="none",
            disable_tqdm=True, remove_unused_columns=False,
            **{**_allowed(capsule["settings"]), "use_cpu": capsule["around"]["device"].startswith("cpu")},
        )  # fmt: skip
        if capsule["make"] is None:
            trainer = Trainer(_model(capsule["model"]), args, strategy="single", precision=capsule["precision"])
        else:
            trainer = _made_by(capsule["make"], folder, args)
        own, kept = weights_of(trainer.task), capsule["weights"]
        if wrong := [name for name in {**own, **kept} if _shape(own, name) != _shape(kept, name)]:
            why = f"Names or shapes of its tensors are not those of the model: {listed(wrong)}."
            raise ConfigError("Cannot do the step of the capsule.", why, "Use the code that the run had.")
        for name, each in own.items():
            each.data = kept[name].clone()  # which has its type
            each.requires_grad_(name in capsule["trained"])
        # The observer hands out the micro-batches.
        trainer.train_dataset, trainer.data_collator = range(len(capsule["batches"])), list
        trainer.get_train_dataloader = partial(Trainer.get_train_dataloader, trainer)
        observer = StepObserver(capsule["step"], trainer, capsule, unit=unit, at=at)
        trainer.add_callback(observer)
        Trainer.train(trainer)
    return observer


def _made_by(name: str, folder: Path, args: TrainingArguments) -> Any:
    """Return the Trainer that a function of the user's, named as ``"FILE.py:function"``, makes for arguments."""
    file, _, function = name.partition(":")
    spec: Any = importlib.util.spec_from_file_location(Path(file).stem, folder / file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    trainer = getattr(module, function, lambda args: None)(args)
    if not isinstance(trainer, Trainer) or (trainer.args.output_dir, trainer.args.max_steps) != (
        args.output_dir,
        args.max_steps,
    ):
        why = "It is no function that returns a Trainer with the arguments that it gets."
        raise ConfigError(f"Cannot use {name}.", why, f"Write: def {function}(args): return Trainer(model, args)")
    return trainer


def _model(how: Mapping[str, Any]) -> Any:
    """Return a new model of transformers, from its class and configuration."""
    require("transformers", feature="this capsule")
    transformers: Any = importlib.import_module("transformers")
    kind: Any = getattr(transformers, how["class"], None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        why = "This version of transformers has no such model."
        raise ConfigError(f"Cannot make a {how['class']!r}.", why, "Use the version that the run had.")
    model: Any = kind(kind.config_class.from_dict(_harmless(how["config"])))  # type: ignore[attr-defined]
    if how["attention"] in _ATTENTIONS:
        model.set_attn_implementation(how["attention"])
    return model


def _harmless(config: Any) -> Any:
    """Return a configuration without what `_LOADS` names."""
    if isinstance(config, Mapping):
        return {key: _harmless(each) for key, each in config.items() if not _LOADS.fullmatch(str(key))}
    return [_harmless(each) for each in config] if isinstance(config, list) else config


def _allowed(settings: Mapping[str, Any]) -> dict[str, Any]:
    known = {each.name for each in dataclasses.fields(TrainingArguments)}
    return {name: value for name, value in settings.items() if name in known and _SETTINGS.fullmatch(name)}


def _shape(tensors: Mapping[str, torch.Tensor], name: str) -> Any:
    return tensors[name].shape if name in tensors else None


def _texts(folder: Path) -> dict[str, str]:
    """Return the source of all that was imported from a folder, by path in it, without Python's own and packages'."""
    paths = {Path(str(getattr(each, "__file__", None) or "")).resolve() for each in [*sys.modules.values()]}
    own = [
        each
        for each in paths
        if each.is_relative_to(folder) and each.suffix == ".py" and "site-packages" not in each.parts
    ]
    own = [each for each in own if not each.is_relative_to(sysconfig.get_path("stdlib"))]
    return {each.relative_to(folder).as_posix(): each.read_text("utf-8") for each in sorted(own)}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _printable(line: str) -> str:
    """Return text of a file without characters that a terminal obeys."""
    return "".join(each if each.isprintable() else "    " if each == "\t" else repr(each)[1:-1] for each in line)


def _compared(expected: Sequence[Any], rows: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """Return in words whether a step's numbers are those of its capsule, and the same as data."""
    worst, nothing = (0.0, "nothing"), ["nothing more", "", None, None, 0.0]
    pairs: list[Any] = [*zip_longest(expected, rows, fillvalue=nothing)]
    for one, two in pairs:
        far, limit = _distance(one, two), one[4]
        if one[0] != two[0] or not far <= limit:
            first = _told(one, two) if one[0] == two[0] else f"{one[0]} was expected, and there is {two[0]}"
            return f"FAIL  {first}", {"differs": first, "is_same": False}
        worst = max(worst, (far / limit if limit else 0.0, one[0]))
    is_same = all(one[1] == two[1] for one, two in pairs)
    how = "to the bit" if is_same else f"up to rounding, the farthest at {worst[0]:.1%} of its tolerance: {worst[1]}"
    return f"PASS  {len(pairs)} numbers are the same {how}", {"differs": None, "is_same": is_same}


def _told(one: Sequence[Any], two: Sequence[Any]) -> str:
    """Return in words how a number differs, or a tensor by its norm, its sum, or else its fingerprint."""
    known = [
        pair
        for pair in zip(one[2:4], two[2:4], strict=True)
        if None not in pair and not abs(pair[0] - pair[1]) <= one[4]
    ]
    was, now = [f"{each:.9g}" for each in known[0]] if known else [one[1], two[1]]
    return f"{one[0]}: {was} was expected, and is {now}, with a tolerance of {one[4]:.2g}"


def _distance(one: Sequence[Any], two: Sequence[Any]) -> float:
    """Return how far two numbers, or the norms and sums of two tensors, are apart; infinity if that is unknown."""
    if one[1] == two[1] or one[2] is None or two[2] is None:
        return 0.0 if one[1] == two[1] else math.inf
    far = [0.0 if str(a) == str(b) else abs(a - b) for a, b in zip(one[2:4], two[2:4], strict=True)]
    return math.inf if any(map(math.isnan, far)) else max(far)


def _limit(one: Sequence[Any], moved: Sequence[Any]) -> float:
    """Return how far a number may be off: ten times as far as in a step with moved weights, or 1e-5 of the norm."""
    far, size = _distance(one, moved) if one[0] == moved[0] and one[2] is not None else 0.0, abs(one[2] or 0.0)
    return max(FACTOR * far, FLOOR * size if math.isfinite(size) else 0.0)
