"""Trainings from YAML files: typed keys, overrides, repeats, and errors that name key and line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Task, make_data, make_rows, train

from hftrain import ConfigError, Trainer, TrainingArguments, set_seed
from hftrain.cli import fit
from hftrain.cli.commands import main
from hftrain.cli.configured import YamlFile

pytest.importorskip("jsonargparse")

FILE = """\
# yaml-language-server: $schema=schema.json
task:
  class_path: support.tiny.Task
  init_args:
    dropout: 0.2
data:
  class_path: support.tiny.make_data
  init_args: {num: 24}
args:
  output_dir: out
  learning_rate: 1e-2
  eval_strategy: no
  max_steps: 9
  save_steps: 3
  disable_tqdm: true
  report_to: none
  use_cpu: true
callbacks:
  - class_path: hftrain.SummaryCallback
strategy: single
"""


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write run.yaml into an empty working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(FILE, encoding="utf-8")
    return tmp_path / "run.yaml"


def weights(folder: str, step: int = 9) -> bytes:
    return Path(folder, f"checkpoint-{step}", "model.safetensors").read_bytes()


def test_file_trains_as_the_same_python_does(tmp_path: Path) -> None:
    trainer = fit(argv=["run.yaml", "--args.learning_rate", "3e-3"])
    assert trainer.args.learning_rate == 3e-3
    assert trainer.task.model.layers[3].p == 0.2  # type: ignore[union-attr, index]
    assert any(type(each).__name__ == "SummaryCallback" for each in trainer.callback_handler.callbacks)
    set_seed(42)
    options: dict[str, Any] = {"max_steps": 9, "learning_rate": 3e-3, "per_device_train_batch_size": 8}
    ours = train(tmp_path / "python", Task(dropout=0.2), train_dataset=make_rows(24), **options)
    for name, tensor in ours.model.state_dict().items():
        assert torch.equal(tensor, trainer.model.state_dict()[name])


def test_run_is_repeated_bit_by_bit_from_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "run.yaml", "--task.dropout=0.3"])
    assert "dropout: 0.3" in Path("out/config.yaml").read_text()
    with pytest.raises(SystemExit):
        main(["fit", "--from", "out"])
    assert "own folder" in capsys.readouterr().err
    main(["fit", "--from", "out", "--args.output_dir", "again"])
    assert weights("again") == weights("out")


def test_run_resumed_twice_ends_as_the_whole_one() -> None:
    fit(argv=["run.yaml", "--args.output_dir", "whole"])
    fit(argv=["run.yaml", "--args.output_dir", "part"])
    for step in (3, 6):
        Path("part/checkpoint-9/manifest.json").unlink()
        fit(argv=["--from", "part", "--args.resume_from_checkpoint", f"part/checkpoint-{step}"])
        assert weights("part") == weights("whole")
    assert "resume_from_checkpoint: null" in Path("part/config.yaml").read_text()


def test_python_gives_task_and_data(file: Path) -> None:
    parts = file.read_text().split("args:\n")[-1]
    file.write_text(f"args:\n{parts}")
    trainer = fit(Task, make_data, argv=["run.yaml", "--task.dropout", "0.2", "--data.num", "24"])
    fit(argv=["--from", "out", "--args.output_dir", "again"])
    assert isinstance(trainer, Trainer)
    assert isinstance(trainer.task, Task)
    assert weights("again") == weights("out")


def test_lengths_have_units(file: Path) -> None:
    file.write_text(file.read_text().replace("learning_rate: 1e-2", "learning_rate: 1e-2\n  warmup_steps: 0.5dur"))
    trainer = fit(argv=["run.yaml", "--args.max_steps", "4ba", "--args.logging_steps=0.5ep"])
    assert (trainer.args.max_steps, trainer.args.warmup_steps, trainer.state.global_step) == (4, 0.5, 4)
    assert "max_steps: 4ba" in (Path(trainer.args.output_dir) / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"args\.max_steps|max_steps='soon'"):
        fit(argv=["run.yaml", "--args.max_steps", "soon"])


def test_plain_model_and_explicit_null_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "--task.class_path", "support.tiny.Net", "--args.save_safetensors", "null", "--print-config"])
    text = capsys.readouterr().out
    Path("whole.yaml").write_text(text, encoding="utf-8")
    assert "save_safetensors: null" in text
    trainer = fit(argv=["whole.yaml", "--args.max_steps=1", "--data.class_path", "support.tiny.make_data"])
    assert isinstance(trainer.model, Net)
    assert trainer.args.save_safetensors is None
    assert trainer.args.save_strategy == TrainingArguments().save_strategy


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("learning_rate: 1e-2", "learning_rate: fast", ["run.yaml, line 11: args.learning_rate", "float", "fast"]),
        ("learning_rate: 1e-2", "learning_rate: -1", ["run.yaml, line 11: args.learning_rate", "at least 0"]),
        ("learning_rate", "lerning_rate", ["run.yaml, line 11: args.lerning_rate", "args.learning_rate"]),
        ("dropout: 0.2", "drop: 0.2", ["run.yaml, line 5: task.init_args.drop", "task.init_args.dropout"]),
        ("num: 24", "num: many", ["run.yaml, line 8: data.init_args.num", "int"]),
        ("\nstrategy:", "\nstrategi:", ["run.yaml, line 20: strategi", "strategy"]),
        ("support.tiny.Task", "support.tiny.Tusk", ["run.yaml, line 3: task.class_path", "Tusk"]),
        ("hftrain.SummaryCallback", "hftrain.Summary", ["run.yaml, line 18: callbacks", "SummaryCallback"]),
        ("  max_steps: 9", "  save_steps: 9", ["run.yaml, line 14: args.save_steps", "line 13"]),
        ("  class_path: support.tiny.Task", "  class_path: [", ["run.yaml", "line"]),
        ("support.tiny.make_data", "support.tiny.make_rows", ["data", "list", "train_dataset"]),
    ],
)
def test_error_names_key_and_line(file: Path, old: str, new: str, told: list[str]) -> None:
    file.write_text(file.read_text().replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        fit(argv=["run.yaml"])
    assert [word for word in told if word not in str(error.value)] == []
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--args.learning_rat=1"], "args.learning_rate"),
        (["--task.widht", "3"], "--task.init_args.widht"),
        (["--args.learning_rate=fast"], "--args.learning_rate"),
        (["--task.class_path=nowhere.Task"], "nowhere"),
        (["--from", "out"], "Keep one"),
    ],
)
def test_error_names_the_option(options: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        fit(argv=["run.yaml", *options])


def test_run_without_a_configuration_or_task_is_refused() -> None:
    for argv, told in ((["--from", "nowhere"], "config.yaml"), (["none.yaml"], "none.yaml"), ([], "task.class_path")):
        with pytest.raises(ConfigError, match=told):
            fit(argv=argv)


# A process of its own: the schema names every callback class that is there, those of other tests too.
SCHEMA = """
from hftrain.extras.trackers.callbacks import tracker_callback
from hftrain.cli.commands import main
from hftrain.loggers.base import Logger

tracker_callback(type("Mine", (Logger,), {"name": "mine"})())  # a class that no file can name
main(["fit", "run.yaml", "--print-schema"])
"""


def test_schema_accepts_the_file_and_refuses_a_mistake() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    printed = subprocess.run([sys.executable, "-c", SCHEMA], env=environment, check=True, capture_output=True).stdout
    assert b"MineCallback" not in printed
    check = jsonschema.Draft202012Validator(json.loads(printed))
    content = YamlFile("run.yaml").values
    assert list(check.iter_errors(content)) == []
    for section, key in (("args", "lerning_rate"), ("task", "init_arg")):
        wrong = {**content, section: {**content[section], key: 1}}
        assert key in next(check.iter_errors(wrong)).message


def test_help_has_the_arguments_of_the_task_and_their_texts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "run.yaml", "--help"])
    text = capsys.readouterr().out
    for word in ("--task.init_args.dropout", "How many samples.", "--args.learning_rate", "--from RUN"):
        assert word in text


def test_every_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*words: str) -> Any:
        main(words)
        return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)

    trained = answer("fit", "run.yaml", "--json", "--args.logging_steps", "1")
    assert trained["step"] == 9
    assert trained["last"]["loss"] > 0
    assert answer("fit", "run.yaml", "--print-config", "--json")["args"]["learning_rate"] == 0.01
    assert [each["step"] for each in answer("checkpoints", "--json", "out")["checkpoints"]] == [3, 6, 9]
    assert answer("checkpoints", "out", "--json")["resume"] == "checkpoint-9"
    assert answer("strategies", "--json")["strategies"]["single"]["is_available"]
    assert answer("precisions", "--json")["precisions"]["fp32"]["is_available"]
    pytest.importorskip("plotext")
    assert len(answer("curves", "out", "--json")["curves"]["loss"]["loss"]) == 9
    pytest.importorskip("plotly")
    assert answer("report", "out", "--json") == {"output": "report.html", "runs": ["out"]}
    script = "from support.tiny import train; from pathlib import Path; print('text'); train(Path('planned'))"
    Path("script.py").write_text(script, encoding="utf-8")
    assert answer("plan", "--gpus", "1", "--json", "script.py")["proposal"]["parameters"] > 0
    pytest.importorskip("shtab")
    assert "hftrain" in answer("completion", "bash", "--json")["script"]


def test_class_of_a_script_is_repeated_by_the_script(file: Path) -> None:
    file.write_text(file.read_text().replace("support.tiny.Task", "__main__.Nowhere"), encoding="utf-8")
    with pytest.raises(ConfigError, match="give these options to the script"):
        fit(argv=["run.yaml"])
