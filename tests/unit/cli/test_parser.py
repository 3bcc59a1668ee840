"""The parser, with annotations as text: this module postpones their evaluation."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest

from hftrain import ConfigError, HfArgumentParser, MissingDependencyError, TrainingArguments
from hftrain.cli import HfArg


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Required:
    name: str
    sizes: list[int]
    color: Color


@dataclass
class Settings:
    rate: float = 0.1
    is_on: bool = True
    is_off: bool = False
    maybe: bool | None = None
    count: int | None = None
    older: Optional[int] = 3  # noqa: UP045
    names: list[str] = field(default_factory=list)
    shares: list[float] | None = None
    color: Color = Color.RED
    mode: Literal["fast", "slow", 3] = "fast"
    table: dict[str, int] = field(default_factory=dict)
    pair: tuple[int, ...] = (1, 2)
    path: Path | None = None
    mixed: Union[int, float, str] = 0  # noqa: UP007
    file_or_table: dict[str, Any] | str | None = None
    one_or_more: str | list[str] | None = None
    derived: int = field(default=7, init=False)


@dataclass
class ScriptArguments:
    model: str = HfArg(default="tiny", aliases=["-m", "--net"], help="Which model, 100%% of it.")
    tags: list[str] = HfArg(default_factory=lambda: ["a"], aliases="-t", metadata={"metavar": "TAG"})  # noqa: RUF009


def parse(line: str | list[str], kind: Any = Settings) -> Any:
    words = line.split() if isinstance(line, str) else line
    (parsed,) = HfArgumentParser(kind).parse_args_into_dataclasses(words, look_for_args_file=False)
    return parsed


def test_defaults_are_the_dataclass_own() -> None:
    assert parse("") == Settings()


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--rate", "3"], "rate", 3.0),
        (["--count", "4"], "count", 4),
        (["--count=-4"], "count", -4),
        (["--older", "5"], "older", 5),
        (["--names", "a", "b"], "names", ["a", "b"]),
        (["--names", "a"], "names", ["a"]),
        (["--shares", "1", "2.5"], "shares", [1.0, 2.5]),
        (["--color", "blue"], "color", "blue"),
        (["--mode", "3"], "mode", 3),
        (["--mode", "slow"], "mode", "slow"),
        (["--table", '{"a": 1}'], "table", {"a": 1}),
        (["--pair", "[3, 4]"], "pair", (3, 4)),
        (["--path", "a/b"], "path", Path("a/b")),
        (["--mixed", "3"], "mixed", 3),
        (["--mixed", "3.5"], "mixed", 3.5),
        (["--mixed", "three"], "mixed", "three"),
        (["--file-or-table", '{"a": {"b": 1}}'], "file_or_table", {"a": {"b": 1}}),
        (["--file_or_table", "config.json"], "file_or_table", "config.json"),
        (["--one_or_more", "a b"], "one_or_more", "a b"),
        (["--one_or_more", "a", "b"], "one_or_more", ["a", "b"]),
        (["--maybe", "no"], "maybe", False),
        (["--maybe"], "maybe", True),
    ],
)
def test_text_becomes_the_field_type(words: list[str], name: str, value: Any) -> None:
    found = getattr(parse(words), name)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("line", "is_on", "is_off"),
    [
        ("--is_off", True, True),
        ("--is-off --is_on", True, True),
        ("--is_off 0 --is_on 0", False, False),
        ("--is_off True --is_on False", False, True),
        ("--is_off yes --is_on n", False, True),
        ("--no_is_on", False, False),
        ("--no-is-on", False, False),
    ],
)
def test_booleans_in_every_form(line: str, is_on: bool, is_off: bool) -> None:
    found = parse(line)
    assert (found.is_on, found.is_off) == (is_on, is_off)


def test_fields_without_default_are_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--name a --sizes 1 2 --color red", Required) == Required("a", [1, 2], "red")
    with pytest.raises(SystemExit):
        parse("--name a", Required)
    assert "required: --sizes" in capsys.readouterr().err


def test_boolean_without_default_is_off() -> None:
    @dataclass
    class Flag:
        is_on: bool

    assert (parse("", Flag).is_on, parse("--is_on", Flag).is_on) == (False, True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--color bleu", "'bleu' is not a Color. Did you mean 'blue'?"),
        ("--mode fasst", "Did you mean 'fast'?"),
        ("--count many", "invalid int value: 'many'"),
        ("--is_on perhaps", "'perhaps' is not a bool. Write true or false."),
        ("--table [1]", "'[1]' is not a dict"),
        ("--pair 3", "'3' is not a tuple"),
    ],
)
def test_unreadable_value_stops_with_close_matches(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(line)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--learning-ratt", "--learning_ratt=3"])
def test_unknown_option_raises_with_close_matches(word: str) -> None:
    with pytest.raises(ConfigError, match="'--learning_rate'"):
        parse([word], TrainingArguments)


def test_stray_word_raises() -> None:
    with pytest.raises(ConfigError, match="Cannot parse 'stray'"):
        parse(["--rate", "3", "stray"])


def test_unknown_words_are_returned_when_asked_for() -> None:
    parser = HfArgumentParser([Settings, ScriptArguments])
    settings, script, rest = parser.parse_args_into_dataclasses(
        ["--rate", "2", "--unknown", "x", "-m", "big"], return_remaining_strings=True
    )
    assert (settings.rate, script.model, rest) == (2.0, "big", ["--unknown", "x"])


def test_options_added_by_hand_come_back_in_a_namespace() -> None:
    parser = HfArgumentParser(ScriptArguments, description="A script.")
    parser.add_argument("--extra", type=int, default=1)
    script, namespace = parser.parse_args_into_dataclasses(["--extra", "5"])
    assert (script, vars(namespace)) == (ScriptArguments(), {"extra": 5})


def test_defaults_are_not_shared_between_calls() -> None:
    parser = HfArgumentParser(ScriptArguments)
    (first,) = parser.parse_args_into_dataclasses([])
    first.tags.append("b")
    assert parser.parse_args_into_dataclasses([]) == (ScriptArguments(),)


def test_hfarg_makes_aliases_help_and_metadata() -> None:
    assert parse("-m big -t x y", ScriptArguments) == ScriptArguments("big", ["x", "y"])
    assert parse("--net big", ScriptArguments).model == "big"
    text = HfArgumentParser(ScriptArguments).format_help()
    assert "Which model, 100% of it. (default: tiny)" in text
    assert "TAG" in text


def test_help_shows_every_field_of_the_arguments() -> None:
    text = HfArgumentParser(TrainingArguments).format_help()
    # From Python 3.13 on the value is named once.
    assert re.search("--learning_rate( LEARNING_RATE)?, --learning-rate LEARNING_RATE", text)
    assert "Old name of eval_strategy." in " ".join(text.split())


def test_subparsers_can_be_added() -> None:
    parser = HfArgumentParser()
    parser.add_subparsers(dest="verb").add_parser("train").add_argument("--x", type=int)
    assert parser.parse_args(["train", "--x", "1"]) == argparse.Namespace(verb="train", x=1)


def test_what_is_no_dataclass_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a dataclass"):
        HfArgumentParser(int)


def test_annotation_that_cannot_be_resolved_is_refused() -> None:
    @dataclass
    class Lost:
        x: NotImported = None  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ConfigError, match="NotImported"):
        HfArgumentParser(Lost)


def test_dict_builds_all_dataclasses() -> None:
    parser = HfArgumentParser([Settings, ScriptArguments])
    settings, script = parser.parse_dict({"rate": 2.0, "model": "big", "names": ["a"]})
    assert (settings, script) == (Settings(rate=2.0, names=["a"]), ScriptArguments("big"))


def test_dict_with_unknown_key_raises_unless_allowed() -> None:
    parser = HfArgumentParser(Settings)
    with pytest.raises(ConfigError, match="Did you mean 'rate'"):
        parser.parse_dict({"raate": 2.0})
    assert parser.parse_dict({"raate": 2.0}, allow_extra_keys=True) == (Settings(),)


def test_json_and_yaml_files(tmp_path: Path) -> None:
    values = {"output_dir": "out", "learning_rate": 0.1, "eval_strategy": "epoch"}
    parser, file = HfArgumentParser(TrainingArguments), tmp_path / "args.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    assert parser.parse_json_file(file) == (TrainingArguments(**values),)
    # JSON is YAML too; a bare `no` is YAML's False.
    (tmp_path / "args.yaml").write_text("output_dir: out\nlearning_rate: 0.1\nsave_strategy: no\n", encoding="utf-8")
    (from_yaml,) = parser.parse_yaml_file(str(tmp_path / "args.yaml"))
    assert (from_yaml.learning_rate, from_yaml.save_strategy) == (0.1, "no")
    file.write_text('{"output_dir": "out", "lr": 1}', encoding="utf-8")
    with pytest.raises(ConfigError, match="lr"):
        parser.parse_json_file(file)
    assert parser.parse_json_file(file, allow_extra_keys=True)[0].output_dir == "out"


@pytest.mark.parametrize("content", ["[1]", "{", "a: b: c"])
def test_file_without_a_mapping_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "args"
    file.write_text(content, encoding="utf-8")
    parser = HfArgumentParser(Settings)
    for read in (parser.parse_json_file, parser.parse_yaml_file):
        with pytest.raises(ConfigError, match="holds no"):
            read(file)


def test_yaml_without_its_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # PyYAML comes with accelerate, so its absence is pretended.
    def refuse(requirement: str, *, feature: str) -> None:
        raise MissingDependencyError(f"{feature} needs {requirement}")

    monkeypatch.setattr("hftrain.cli.parser.require", refuse)
    with pytest.raises(MissingDependencyError, match="PyYAML"):
        HfArgumentParser(Settings).parse_yaml_file("args.yaml")


def test_named_files_of_arguments_come_before_the_command_line(tmp_path: Path) -> None:
    first, second = tmp_path / "first.args", tmp_path / "second.args"
    first.write_text("--rate 1\n--one_or_more 'full_shard auto_wrap'\n--table {\"a\":1}\n", encoding="utf-8")
    second.write_text("--rate 2 --count 2", encoding="utf-8")
    parser = HfArgumentParser(Settings)
    (found,) = parser.parse_args_into_dataclasses(["--mixed", "x"], args_filename=first)
    assert (found.rate, found.one_or_more, found.table, found.mixed) == (1.0, "full_shard auto_wrap", {"a": 1}, "x")
    (found,) = parser.parse_args_into_dataclasses(
        ["--cfg", str(second), "--count", "3", "--cfg", str(first)], args_file_flag="--cfg"
    )
    assert (found.rate, found.count) == (1.0, 3)
    with pytest.raises(ConfigError, match="no such file"):
        parser.parse_args_into_dataclasses([], args_filename=tmp_path / "absent.args")


SCRIPT = """
from __future__ import annotations
from hftrain import HfArgumentParser, TrainingArguments

args, rest = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(return_remaining_strings=True)
print(args.output_dir, args.seed, args.max_steps, rest)
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([], look_for_args_file=False)
print(args.seed)
"""


def test_file_beside_the_script_is_found_and_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "train.args").write_text("--output_dir beside --seed 7 --max-steps 5", encoding="utf-8")
    command = [sys.executable, str(tmp_path / "train.py"), "--seed", "9", "--own", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["beside 9 5 ['--own', '1']", "42"]


class Tone(Enum):
    LOW = "low"
    HIGH = "high"


@dataclass
class Shown:
    _argument_group_name = "What is shown"

    number: int = 1
    share: float = 0.5
    text: str = "a"
    tone: Tone = Tone.LOW
    kind: Literal["x", 2] = "x"
    is_on: bool = field(default=True, metadata={"help": "Whether it is on."})


def test_options_are_those_that_argparse_shows() -> None:
    parser = HfArgumentParser(Shown, prog="script")
    actions = {action.dest: action for action in reversed(parser._actions)}
    assert [actions[name].type for name in ("number", "share", "text")] == [int, float, str]
    assert (actions["tone"].choices, actions["kind"].choices) == (["low", "high"], ["x", 2])
    shown = " ".join(parser.format_help().split())
    for part in ("What is shown:", "--tone {low,high}", "--kind {x,2}", "[--no_is_on]", "--no_is_on, --no-is-on"):
        assert part in shown
    (read,) = parser.parse_args_into_dataclasses(["--tone", "high", "--kind", "2", "--no_is_on"])
    assert (read.tone, read.kind, read.is_on) == ("high", 2, False)


def test_lengths_of_training_arguments_may_have_a_unit(capsys: pytest.CaptureFixture[str]) -> None:
    parser = HfArgumentParser(TrainingArguments)
    words = "--num_train_epochs 10ep --warmup_steps 0.1dur --eval_steps 500ba --save-steps 2h --logging_steps 5"
    (args,) = parser.parse_args_into_dataclasses(words.split())
    assert (args.num_train_epochs, args.warmup_steps, args.eval_steps) == (10.0, 0.1, 500)
    assert (args.save_steps, args.logging_steps, args.max_steps) == ("2h", 5.0, -1)
    (args,) = parser.parse_args_into_dataclasses(["--max_steps", "7", "--num_train_epochs", "2"])
    assert [(value, type(value)) for value in (args.max_steps, args.num_train_epochs)] == [(7, int), (2.0, float)]
    for wrong, kind in (("--max_steps=2.5", "int"), ("--eval_steps=often", "float"), ("--seed=3ep", "int")):
        with pytest.raises(SystemExit):
            parser.parse_args_into_dataclasses([wrong])
        assert f"invalid {kind} value" in capsys.readouterr().err
