"""The state of a run: the documented `trainer_state.json`, its progress, and the control flags of callbacks."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from marshal import dumps
from pathlib import Path
from typing import Any

import torch

from hftrain.core.errors import suggest
from hftrain.core.log import warn_once

# Occurs only once: deeper entries are indented further, and line breaks within strings are escaped.
_NO_HISTORY = '\n  "log_history": []'
_SEPARATOR = ",\n    "
_PLAIN = frozenset({str, int, float, bool, type(None)})
# The separators that json.dumps(..., indent=2) writes within an entry; indent itself would take twice as long.
_encode = json.JSONEncoder(sort_keys=True, separators=(",\n      ", ": ")).encode
_BEFORE, _AFTER = '{\n  "": [\n    ', "\n  ]\n}"


class HistoryText:
    """The entries of a growing log history as `TrainerState.to_json` writes them.

    The text of an entry is made once. A user may change, remove or replace any entry, so the entries are compared by a
    hash of their `marshal` bytes, which takes a tenth of the time of making their text; if they differ, all of it is
    made again.
    """

    def __init__(self) -> None:
        # The entries in the text or waiting for it: their number and hash, the text, and copies of those that wait.
        self._size, self._mark, self._text = 0, _mark([]), ""
        self._waiting: list[Any] = []

    def take(self, history: Sequence[Any]) -> None:
        """Capture the entries as they are now; their text can be made later, in another thread."""
        if self._mark is None or self._mark != _mark(history[: self._size]):
            self._size, self._text, self._waiting = 0, "", []
        entries = history[self._size :]
        if entries:
            self._waiting = [*self._waiting, *(dict(each) if isinstance(each, Mapping) else each for each in entries)]
            self._size, self._mark = len(history), _mark(history)

    def parts(self) -> list[str]:
        """Return the text of the captured entries: what belongs between the brackets of the list.

        Raises:
            TypeError, ValueError: An entry is not plain data.
        """
        self._text = _SEPARATOR.join([*filter(None, [self._text]), *map(_text, self._waiting)])
        self._waiting = []
        return [self._text] * bool(self._text)


@dataclass
class TrainerState:
    """Progress and log history of a run, saved as JSON with each checkpoint.

    Units:
        epoch: passes over the data, fractional. logging_steps, eval_steps, save_steps: optimizer updates.
        train_batch_size: samples per device and micro-step. total_flos: floating-point operations.

    Source: the documented `TrainerState`.
    """

    epoch: float | None = 0.0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, str | float | int | bool] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the state as JSON text, keys sorted."""
        return "".join(self.json_parts())

    def json_parts(self, history: HistoryText | None = None) -> list[str]:
        """Return the state as JSON text in pieces; those of the log history may have been made already.

        Args:
            history: The text of the history, which it has captured; None captures the state's.
        """
        if history is None:
            history = HistoryText()
            history.take(self.log_history or [])
        # Only the documented fields: callbacks may keep objects of their own here. asdict would copy the whole history.
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        text = json.dumps({**fields, "log_history": []}, indent=2, sort_keys=True) + "\n"
        entries = history.parts()
        if not entries:
            return [text]
        head, tail = text.split(_NO_HISTORY)
        return [head, _NO_HISTORY[:-1], "\n    ", *entries, "\n  ]", tail]

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TrainerState:
        """Build the state from its decoded JSON; keys this version does not know are dropped."""
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in content.items() if name in known})

    def save_to_json(self, json_path: str) -> None:
        """Write the state to a file."""
        Path(json_path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load_from_json(cls, json_path: str) -> TrainerState:
        """Read the state from a file."""
        return cls.from_dict(json.loads(Path(json_path).read_text(encoding="utf-8")))

    def compute_steps(self, args: Any, max_steps: int) -> None:
        """Turn the arguments' intervals into optimizer updates.

        Ratios below 1 are shares of `max_steps`; -1 is the end of the run. Intervals that are written in passes, tokens
        or time are 0: another callback counts them.
        """
        for name in ("logging_steps", "eval_steps", "save_steps"):
            value = getattr(args, name)
            if isinstance(value, str):
                setattr(self, name, 0)
            elif value is not None:
                steps = max_steps if value == -1 else math.ceil(max_steps * value) if value < 1 else int(value)
                setattr(self, name, steps)


def find_misfit(content: Any) -> str | None:
    """Return why JSON data is not a valid `TrainerState`, or None if it is.

    Unknown or absent names are not an error: other versions write different ones.
    """
    if not isinstance(content, dict):
        return f"it holds a {type(content).__name__} instead of an object"
    for name, hint in typing.get_type_hints(TrainerState).items():
        if name not in content:
            continue
        value = content[name]
        kinds = hint.__args__ if isinstance(hint, types.UnionType) else (hint,)
        # transformers stores an interval of -1 as a negative number of steps.
        is_interval = name in ("logging_steps", "eval_steps", "save_steps") and type(value) is int
        if not is_interval and not any(_is_of(value, typing.get_origin(kind) or kind) for kind in kinds):
            return f"{name} is {value!r:.80}"
    entries = content.get("log_history", [])
    return None if all(isinstance(entry, dict) for entry in entries) else "log_history holds more than objects"


def _is_of(value: Any, kind: Any) -> bool:
    """Return whether a JSON value is of a field's kind; counts are not negative, and bool is not a number."""
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind and (kind is not int or bool(value >= 0))


def _mark(entries: Sequence[Any]) -> int | None:
    """Return a hash of entries that changes with any of them; None if they hold more than plain data."""
    try:
        return hash(dumps(list(entries), 2))  # later formats write equal data in different ways
    except ValueError:
        return None


def _text(entry: Any) -> str:
    """Return the text of an entry, as ``json.dumps(..., indent=2, sort_keys=True)`` writes it."""
    if type(entry) is dict and entry and _PLAIN.issuperset(map(type, entry.values())):
        return "{\n      " + _encode(entry)[1:-1] + "\n    }"
    return json.dumps({"": [entry]}, indent=2, sort_keys=True)[len(_BEFORE) : -len(_AFTER)]


@dataclass(kw_only=True, slots=True)
class Progress:
    """Progress of a run: counters saved in checkpoints and restored on resume.

    Units:
        step: optimizer updates done. epoch: passes begun before the current one.
        micro_steps_in_epoch: micro-batches of this rank used in the current pass.
        samples: samples trained on, all ranks together. tokens: input tokens trained on, all ranks together.
        offset_in_epoch: samples of the current pass before its first micro-batch, left over by a resume with another
        batch size if they do not fill a micro-batch. cut_epochs: passes that a callback ended early.
    """

    step: int = 0
    epoch: int = 0
    micro_steps_in_epoch: int = 0
    samples: int = 0
    tokens: int = 0
    offset_in_epoch: int = 0
    cut_epochs: int = 0

    @property
    def is_within_epoch(self) -> bool:
        """Whether part of the current pass is done."""
        return bool(self.micro_steps_in_epoch or self.offset_in_epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the counters as plain integers."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Overwrite the counters; mutates the object."""
        for name, value in state.items():
            setattr(self, name, int(value))


def expects_save(progress: Progress, state: TrainerState, *, saves_always: bool = False) -> bool:
    """Return whether a checkpoint is planned for the end of a run's next step."""
    step = progress.step + 1
    return saves_always or not step % (state.save_steps or 1) or step >= state.max_steps


@dataclass
class TrainerControl:
    """Flags that callbacks set to request actions; the loop acts on them right after the event.

    Source: the documented `TrainerControl`.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def update(self, changes: dict[str, Any]) -> None:
        """Set the named flags; mutates the object. An unknown name raises `AttributeError`, and no flag is set."""
        for name in changes:
            if name not in self.__dict__:
                raise AttributeError(f"TrainerControl has no flag {name!r}; its flags are {sorted(self.__dict__)}.")
        for name, value in changes.items():
            setattr(self, name, bool(value))

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores, in the documented form."""
        return {"args": dict(self.__dict__), "attributes": {}}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> TrainerControl:
        """Rebuild a control from its `state`."""
        return cls(**state["args"])


def check_flags(control: TrainerControl) -> None:
    """Warn once about a flag that was set but that nothing reads, such as a misspelt one."""
    if len(control.__dict__) > len(fields(TrainerControl)):
        names = {field.name for field in fields(TrainerControl)}
        for name in sorted(control.__dict__.keys() - names):
            if name.startswith("should_"):
                flag = name.replace("should_stop", "should_training_stop")
                warn_once(f"A callback set control.{name}, which nothing reads. {suggest(flag, names)}")


# Marks what each process has for itself: another number of processes resumes with the mean.
PER_RANK = {"is_per_rank": True}


@dataclass(kw_only=True, eq=False)
class WindowState:
    """What a logging window has summed up: a checkpoint holds these fields, of these types, and no others."""

    sum: torch.Tensor | None = field(default=None, metadata=PER_RANK)  # of the losses that are not pending
    pending: list[torch.Tensor] = field(default_factory=list, metadata=PER_RANK)
    num_finite: torch.Tensor | int = field(default=0, metadata=PER_RANK)  # of the losses in the sum
    num_nonfinite: int = 0  # of the losses of the run that were read
    num_micro_steps: int = 0  # since the last reading, like the next
    num_steps: int = 0
    run_total: float | int = 0.0  # of the losses that were read, in the steps that the next counts
    run_steps: int = 0
    grad_norm: torch.Tensor | float | int | None = None  # of the last step, like the next
    learning_rate: torch.Tensor | float | int | None = None
    rates: list[torch.Tensor | float | int] = field(default_factory=list)  # of all groups


class Counter:
    """A number that its owner counts up, and that others see."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0
