"""`hftrain capsule` and `hftrain open`: a step of a run in one file, and that step done again from the file."""

from __future__ import annotations

import bdb
import dataclasses
import importlib.util
import json
import math
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hftrain.arguments.processes import changed_settings
from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks import PrinterCallback
from hftrain.cli.answer import Answer
from hftrain.cli.replay import do_step, ledger_with, run_apart, session_of
from hftrain.cli.scripts import Perturb
from hftrain.core.errors import ConfigError, a_kind, check_known, listed
from hftrain.core.extras import require
from hftrain.core.parameters import attention_of
from hftrain.core.preserve import temporarily
from hftrain.core.seed import capture_rng, restore_rng
from hftrain.core.tree import map_tensors
from hftrain.extras.flight.observing import Observer, facts_of, in_backward, in_words
from hftrain.extras.flight.reading import first_parting, read_ledger
from hftrain.extras.record import SECRET
from hftrain.run.journal import environment
from hftrain.storage.files import readable_bytes
from hftrain.trainer.trainer import Trainer

_KEY = "hftrain.capsule.1"
# Python files in a folder or below it, on every system, and those that are installed there.
_FILE, _INSTALLED = re.compile(r"(\w[^/\\:\0]*/)*\w[^/\\:\0]*\.py"), re.compile("site-packages/|lib/python3")
# The arguments that a step depends on.
_DECISIVE = re.compile(
    r"adafactor|adam_\w+|average_tokens_across_devices|bf16|fp16\w*|full_determinism|(gradient|activation)_\w+|seed|tf32"
    r"|half_precision_backend|label_\w+|learning_rate|liger_kernel_config|max_grad_norm|neftune_noise_alpha|optim\w*"
    r"|past_index|per_device_train_batch_size|use_\w+|weight_decay"
)
_SETTINGS = [each.name for each in dataclasses.fields(TrainingArguments) if _DECISIVE.fullmatch(each.name)]
# A tolerance in units of what moved weights change, and the least one, relative to the norm.
_FACTOR, _FLOOR = 10, 1e-5
# What in a configuration is a path of the user's, or makes transformers load weights or code.
_LOADS = re.compile(r"_name_or_path|_?(attn|experts)_implementation\w*|auto_map|use_pretrained_backbone|use_kernels")


def show_capsule(
    run: str, *, step: int, output: str | None = None, make: str | None = None, has_source: bool = False,
    has_optimizer: bool = True, script: Sequence[str] = (),
) -> Answer:  # fmt: skip
    """Write a step of a run into one file with which it can be done again without the run's data and checkpoints.

    Args:
        run: Its output folder, which is only read.
        step: The step, from 1.
        output: The file; None: ``step<N>.capsule``.
        make: ``"FILE.py:function"``, which returns the Trainer for its arguments; None: the plain one, for a model of
            transformers.
        has_source: Whether the file holds the source of that Python file, and of what it imports from its folder.
        has_optimizer: Whether it holds the optimizer's state, without which the update is not compared.
        script: The script and its arguments; empty: those that the flight log names.
    """
    path, (file, _, function) = Path(output or f"step{step}.capsule").absolute(), (make or "").rpartition(":")
    is_made = bool(_FILE.fullmatch(Path(file).name)) and Path(file).is_file()
    if not path.parent.is_dir() or ((make or has_source) and not is_made):
        what = f"There is no folder {path.parent}, or --make {make} is not FILE.py:function, which --source needs, too."
        raise ConfigError(f"Cannot write {path}.", what, "Check the paths.")
    folder = Path(file).parent.resolve()
    capsule, rows = _captured(run, step, f"{Path(file).name}:{function}" if make else None, script)
    capsule["optimizer"] = capsule["optimizer"] if has_optimizer else None
    pairs = zip(*(_do_again(capsule, folder, is_moved=is_moved).rows for is_moved in (False, True)), strict=False)
    moves = [_distance(one, two) if name == other else 0.0 for (name, one), (other, two) in pairs]
    capsule["expected"] = [[*row, far or 0.0] for row, far in zip_longest(rows, moves[: len(rows)])]
    own = _code(folder) if make else {}
    capsule["code"] = {name: [text if has_source else None, digest] for name, (text, digest) in own.items()}
    tensors, batches = dict[str, torch.Tensor](), capsule["batches"]
    text = json.dumps(_encode(capsule, "", tensors))
    for part in ("weights", "optimizer", "batches"):
        print(f"{part:10}", readable_bytes(sum(each.nbytes for name, each in tensors.items() if f"/{part}/" in name)))
    names = ", ".join(map(str, batches[0])) if isinstance(batches[0], Mapping) else "tensors"
    print(f"Personal data? The file holds its {len(batches)} micro-batches as they are: {names}.")
    print(f"Source: {', '.join(own) if has_source else 'only hashes'}. Command: {capsule['command']}", flush=True)
    save_file(tensors, path, {_KEY: text})
    code = "import json, sys; from hftrain.cli.commands import main; main(json.loads(sys.argv[1]))"
    done = run_apart(code, json.dumps(["open", str(path), *(["--code", str(folder)] if make else [])]), 1)
    said = [line for line in done.stdout.splitlines() if line.startswith(("PASS", "FAIL"))] or [done.stdout[-2000:]]
    lines = [f"Wrote {path.name}, {readable_bytes(path.stat().st_size)}.", f"hftrain open says here: {said[-1]}"]
    return Answer(lines, {"path": str(path), "opened": said[-1]}, status=done.returncode)


def _captured(run: str, step: int, make: str | None, script: Sequence[str]) -> tuple[dict[str, Any], list[list[Any]]]:
    """Do a step again as the run did, and return what a capsule holds of it, and its numbers."""
    before, session, observers = ledger_with(run, step), session_of(run, step), list[_StepObserver]()
    capsule: dict[str, Any] = {"run": Path(run).name, "step": step, "make": make}
    if session["world_size"] > 1 or session.get("strategy", "single") != "single":
        why = f"It is not of one process: strategy={session.get('strategy')!r}, processes: {session['world_size']}."
        raise ConfigError(f"Cannot put step {step} of {run} into a file.", why, "Use hftrain replay.")

    def look(trainer: Any) -> _StepObserver:
        if trainer.args.torch_compile:
            raise ConfigError(f"Cannot look at step {step} of {run}.", "It is compiled.", "Train with eager modules.")
        changed = changed_settings(trainer.args.to_dict(), type(trainer.args))
        capsule["settings"] = {name: changed[name] for name in _SETTINGS if name in changed}
        capsule.update({} if make else _how_made(trainer), command=SECRET.sub(r"\1***", " ".join(sys.argv)))
        observers.append(_StepObserver(step, trainer))
        return observers[0]

    with tempfile.TemporaryDirectory() as scratch:
        do_step(run, step, scratch, script=script, look=look)
        parted, _, values = first_parting(before, read_ledger(scratch))
    if parted is not None:
        print(f"Step {parted}, done again, is not the same as in the run: {values}.")
    return capsule | observers[0].begin, observers[0].rows


def _how_made(trainer: Any) -> dict[str, Any]:
    """Return how a plain Trainer with a model of transformers is made again; `ConfigError` if it is another one."""
    kind = type(trainer.model)
    is_plain = type(trainer) is Trainer and not (trainer.compute_loss_func or trainer.count_items or trainer.optimizer)
    is_known = getattr(sys.modules.get("transformers"), kind.__name__, None) is kind and hasattr(kind, "config_class")
    if not (is_known and is_plain):
        what = f"Only a function can say how its {type(trainer).__name__} with {a_kind(trainer.model)} is made."
        raise ConfigError("Cannot put the step into a file.", what, "Name one: --make FILE.py:function.")
    config = _harmless(json.loads(trainer.model.config.to_json_string(use_diff=False)))
    model = {"class": kind.__name__, "config": config, "attention": attention_of(trainer.model)}
    return {"model": model, "precision": trainer.precision.policy.name}


def show_open(path: str, *, code: str | None = None, runs_source: bool = False, at: str = "") -> Answer:
    """Do the step of a capsule again, and compare its numbers with those in the file; status 1 if they differ.

    Args:
        path: The file.
        code: The folder of the Python file that makes the Trainer, if the capsule names one.
        runs_source: Use the source in the file instead.
        at: The name of a module in whose first call a debugger opens.
    """
    capsule = _read(Path(path))
    file, known = (capsule["make"] or "").partition(":")[0], capsule["code"]
    sources = {name: text for name, (text, _) in known.items() if text is not None}
    if not file and (code or runs_source):
        raise ConfigError(f"Cannot use --code or --run-source for {path}:", "it needs no code.", "Leave them out.")
    if file and not (runs_source and sources) and not (code and Path(code, file).is_file()):
        shown = [line for name, text in sources.items() for line in (f"# {name}", *text.splitlines(), "")]
        remedy = "Read the source above; --run-source runs it." if sources else "Its source is not in the capsule."
        shown.append(f"Its Trainer is made by {capsule['make']}: name the folder of {file} with --code. {remedy}")
        return Answer(map(_printable, shown), {"make": capsule["make"], "sources": sources}, status=1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch if runs_source else code or scratch).resolve()
        for name, text in sources.items() if runs_source else ():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, "utf-8")
        try:
            observer = _do_again(capsule, folder, at=at)
        except bdb.BdbQuit:
            raise SystemExit("Nothing was compared.") from None
        changed = [name for name, (_, now) in _code(folder).items() if now not in known.get(name, ())]
    was, now = capsule["around"], observer.begin["around"]
    notes = [f"{name} was {was.get(name)}, and is {now[name]}." for name in now if was.get(name) != now[name]]
    notes += [f"{name} is not as it was." for name in changed]
    notes += [] if capsule["optimizer"] else ["The update was not compared: the file has no state of the optimizer."]
    said = _compared(capsule, observer.rows)
    lines = [f"Step {capsule['step']} of {capsule['run']}, {len(capsule['batches'])} micro-batches.", said, *notes]
    return Answer(map(_printable, lines), {"said": said, "notes": notes}, status=int(said.startswith("FAIL")))


def _do_again(capsule: Mapping[str, Any], folder: Path, **options: Any) -> _StepObserver:
    """Do the step of a capsule with the Trainer that a function in a folder makes, or with the plain one."""
    given = map_tensors(capsule, torch.clone)  # which the step changes
    with tempfile.TemporaryDirectory() as scratch, temporarily(sys, path=[str(folder), *sys.path]):
        args = TrainingArguments(
            scratch, max_steps=given["step"], save_strategy="no", logging_strategy="no", report_to="none",
            disable_tqdm=True, remove_unused_columns=False,
            **{name: given["settings"][name] for name in _SETTINGS if name in given["settings"]}
            | {"use_cpu": given["around"]["device"].startswith("cpu")},
        )  # fmt: skip
        if given["make"] is None:
            trainer: Any = Trainer(_model(given["model"]), args, strategy="single", precision=given["precision"])
        else:
            trainer = _made_by(given["make"], folder, args)
        own, kept = _weights_of(trainer), given["weights"]
        shapes = [{(name, each.shape) for name, each in tensors.items()} for tensors in (own, kept)]
        if wrong := sorted({name for name, _ in shapes[0] ^ shapes[1]}):
            why = f"Names or shapes of its tensors are not those of the model: {listed([*map(_printable, wrong)])}."
            raise ConfigError("Cannot do the step of the capsule.", why, "Use the code that the run had.")
        for name, each in own.items():
            each.data = kept[name]  # which has its type
            each.requires_grad_(name in given["trained"])
        trainer.get_train_dataloader = lambda: given["batches"]
        trainer.remove_callback(PrinterCallback)
        observer = _StepObserver(given["step"], trainer, given, **options)
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
    if not isinstance(trainer, Trainer) or trainer.args.output_dir != args.output_dir:
        raise ConfigError(f"Cannot use {name}.", "It returns no Trainer of its args.", "Return Trainer(model, args).")
    return trainer


def _model(how: Mapping[str, Any]) -> Any:
    """Return a new model of transformers, from its class and configuration."""
    require("transformers", feature="this capsule")
    kind: Any = getattr(importlib.import_module("transformers"), how["class"], None)
    if not hasattr(kind, "set_attn_implementation"):
        raise ConfigError(f"Cannot make a {how['class']}.", "transformers has no such model.", "Use another version.")
    model: Any = kind(kind.config_class.from_dict(_harmless(how["config"])))
    if how["attention"].isidentifier():  # others are loaded from the Hub
        model.set_attn_implementation(how["attention"])
    return model


def _harmless(config: Any) -> Any:
    """Return a configuration without what `_LOADS` names."""
    if isinstance(config, Mapping):
        return {key: _harmless(each) for key, each in config.items() if not _LOADS.fullmatch(str(key))}
    return [_harmless(each) for each in config] if isinstance(config, list) else config


def _weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {**dict(trainer.task.named_parameters()), **dict(trainer.task.named_buffers())}


def _code(folder: Path) -> dict[str, tuple[str, str]]:
    """Return source and hash of all that was imported from a folder, by path in it, without what is installed there."""
    paths = {Path(str(getattr(each, "__file__", None) or "")).resolve() for each in [*sys.modules.values()]}
    own = {each.relative_to(folder).as_posix(): each for each in sorted(paths) if each.is_relative_to(folder)}
    own = {name: each for name, each in own.items() if each.is_file() and not _INSTALLED.search(name)}
    texts = {name: each.read_text("utf-8") for name, each in own.items() if _FILE.fullmatch(name)}
    return {name: (text, sha256(text.encode()).hexdigest()) for name, text in texts.items()}


def _printable(line: str) -> str:
    """Return text of a file without characters that a terminal obeys."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in line.expandtabs(4))


def _compared(capsule: Mapping[str, Any], rows: Sequence[Any]) -> str:
    """Return in words whether a step's numbers are those of its capsule, or the first that is not."""
    pairs: list[Any] = [*zip_longest(capsule["expected"], rows, fillvalue=["nothing more", {"bits": ""}, 0.0])]
    pairs = [each for each in pairs if capsule["optimizer"] or not each[0][0].startswith("update of ")]
    for (name, facts, moved), (other, found, *_) in pairs:
        if name != other:
            return f"FAIL  {name} was expected, and there is {other}"
        far, limit = _distance(facts, found), max(_FACTOR * moved, _FLOOR * facts.get("norm", 0.0))
        if far and not far <= limit < math.inf:
            was, now = (each.get("sum", each["bits"]) for each in (facts, found))
            return f"FAIL  {name}: {was} was expected, and is {now}, with a tolerance of {limit:.2g}"
    how = "to the bit" if all(one[1]["bits"] == two[1]["bits"] for one, two in pairs) else "up to rounding"
    return f"PASS  {len(pairs)} numbers are the same {how}"


def _distance(one: Mapping[str, Any], two: Mapping[str, Any]) -> float:
    """Return how far the sums of two tensors are apart, or infinity if only one is finite or they have no sums."""
    far = abs(one.get("sum", math.inf) - two.get("sum", -math.inf))
    return 0.0 if one["bits"] == two["bits"] else far if one.get("is_finite") == two.get("is_finite") else math.inf


def _encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a value as JSON has it: tensors by where they were, and tuples and mappings with their kind."""
    if isinstance(value, torch.Tensor):
        tensors[where] = value.detach().cpu().contiguous().clone()
        return {"tensor": where}
    if isinstance(value, Mapping):
        return {"dict": [[key, _encode(each, f"{where}/{key}", tensors)] for key, each in value.items()]}
    if type(value) in (list, tuple):
        items = [_encode(each, f"{where}/{number}", tensors) for number, each in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ConfigError(f"Cannot put {where} into a capsule.", f"It is {a_kind(value)}.", "Use tensors, numbers, text.")


def _read(path: Path) -> dict[str, Any]:
    """Return what a capsule holds; `ConfigError` if it is damaged, or names files that are not in its folder."""
    try:
        with safe_open(path, framework="pt") as file:  # which checks sizes and offsets
            text, tensors = file.metadata()[_KEY], {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        kinds: dict[str, Any] = {"tensor": tensors.__getitem__, "dict": dict, "tuple": tuple}
        capsule: dict[str, Any] = json.loads(text, object_hook=lambda node: next(kinds[k](v) for k, v in node.items()))
        if not all(map(_FILE.fullmatch, [*capsule["code"], (capsule["make"] or "a.py").partition(":")[0]])):
            raise ValueError("it names files that are not Python files in a folder")
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"Cannot open {path}.", f"It is damaged, or not a capsule: {error}.", "Check it.") from error
    return capsule


class _StepObserver(Observer):
    """Note what a step begins with (`begin`) and its numbers in their order (`rows`: name, `facts_of`); end the run.

    It begins with what is `given`, if anything. `is_moved` moves the weights by a unit in the last place.
    """

    def __init__(self, step: int, trainer: Any, given: Any = None, *, is_moved: bool = False, at: str = "") -> None:
        super().__init__(step, Path())
        self.begin, self.rows = dict[str, Any](), list[list[Any]]()
        self._trainer, self._given, self._is_moved, self._at = trainer, given, is_moved, at

    def wrap_parts(self, parts: Any) -> Any:
        if self._given is not None:
            parts.progress.step = parts.state.global_step = self.step - 1
            parts.state.epoch = self._given["epoch"]
        return super().wrap_parts(parts)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_begin(args, state, control, **kwargs)
        if not self._is_on:
            return
        trainer, model, optimizer = self._trainer, self.parts.model, self.parts.optimizer
        if self._given is not None:
            if self._given["optimizer"] is not None:
                trainer.strategy.load_optimizer_state(model, optimizer, self._given["optimizer"])
            trainer.precision.load_state_dict(self._given["scaler"])
            if self._is_moved:
                policy = trainer.precision.policy
                unit = 2.0**-10 if policy.matmul == "high" else torch.finfo(policy.compute_dtype).eps
                Perturb(unit).on_train_begin(None, None, None, model=trainer.task)
            restore_rng(self._given["random"])
        around = environment(trainer.strategy)
        begin = {
            "weights": _weights_of(trainer), "optimizer": trainer.strategy.optimizer_state(model, optimizer),
            "trained": [name for name, each in trainer.task.named_parameters() if each.requires_grad],
            "scaler": trainer.precision.state_dict(), "random": capture_rng(), "epoch": state.epoch,
            "around": {**around.pop("versions"), **around, "threads": torch.get_num_threads()},
        }  # fmt: skip
        self.begin = map_tensors(begin, lambda each: each.detach().to("cpu", copy=True))
        if self._at:
            self._stop_in(dict(kwargs["model"].named_modules()))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_on:
            self.begin["batches"], self.rows = self.batches, self._rows()
            self.close_run()
            control.should_training_stop = True
            control.should_log = control.should_evaluate = control.should_save = False

    def _rows(self) -> list[list[Any]]:
        rows = [[f"{name} before the step", facts_of(each)] for name, each in self.begin["weights"].items()]
        for number, loss in enumerate(self.losses, 1):
            where, calls = f"micro-batch {number}", [call for call in self._calls if call["micro_batch"] == number]
            rows += [[f"{where}, {in_words(call, call)}", facts] for call in calls for facts in call["outputs"]]
            rows.append([f"loss of {where}", facts_of(loss)])
        for call in in_backward(self._calls):
            where = f"micro-batch {call['micro_batch']}, {in_words(call, call, is_backward=True)}"
            rows += [[where, facts] for facts in call["gradients"]]
        rows.append(["gradient norm", facts_of(torch.as_tensor(self.parts.losses.grad_norm or 0.0))])
        for name, each in _weights_of(self._trainer).items():
            before, after = self.begin["weights"][name], each.detach().cpu()
            rows.append([f"update of {name}", facts_of(after - before if after.is_floating_point() else after)])
        return rows

    def _stop_in(self, modules: dict[str, Any]) -> None:
        check_known(self._at, modules, f"Cannot stop at {self._at!r}.", "The model has no such module.")
        module, forward = modules[self._at], modules[self._at].forward

        def stop(*args: Any, **kwargs: Any) -> Any:
            module.forward = forward
            breakpoint()
            return forward(*args, **kwargs)  # step into it

        module.forward = stop
