"""`hftrain.compat`: transformers' names mean hftrain's objects. Each test is a process, which imports transformers."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.interop

REACHED = """
import hftrain, transformers, transformers.trainer_utils
from transformers import Seq2SeqTrainingArguments, Trainer
from transformers.integrations import WandbCallback
from transformers.trainer import EvalPrediction, TrainerState
from transformers.trainer_callback import TrainerCallback
assert Trainer is transformers.Trainer is transformers.trainer.Trainer is hftrain.Trainer
assert Seq2SeqTrainingArguments is hftrain.Seq2SeqTrainingArguments
assert EvalPrediction is hftrain.EvalPrediction is transformers.trainer_utils.EvalPrediction
assert (TrainerCallback, TrainerState) == (hftrain.TrainerCallback, hftrain.TrainerState)
assert WandbCallback is hftrain.WandbCallback
"""


def run(code: str) -> str:
    path = f"import sys\nsys.path.append({str(Path(__file__).parents[1])!r})"
    code = f"{path}\nimport hftrain.compat\n{textwrap.dedent(code)}"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_of_compat_leaves_transformers_alone() -> None:
    assert run("hftrain.compat.uninstall()\nprint('transformers' in sys.modules)") == "False"


def test_install_reaches_every_way_to_import_a_name() -> None:
    assert run(f"hftrain.compat.install()\n{REACHED}\nprint('reached')") == "reached"


def test_uninstall_puts_back_what_was_there() -> None:
    code = f"""
import transformers, transformers.trainer
from transformers import AutoConfig, set_seed
def held():
    modules = {{id(m): m for m in [transformers, *sys.modules.values()] if getattr(m, "__name__", "")[:12] == "transformers"}}
    return {{(key, name): value for key, m in modules.items() for name, value in list(vars(m).items())}}
before = held()
hftrain.compat.install()
hftrain.compat.install()
{REACHED}
import transformers.pipelines
hftrain.compat.uninstall()
after = held()
assert [key for key, value in before.items() if after.get(key) is not value] == []
assert [key for key, value in after.items() if str(getattr(value, "__module__", "")).startswith("hftrain")] == []
print(transformers.Trainer.__module__, transformers.TrainerCallback.__module__)
"""  # noqa: E501
    assert run(code) == "transformers.trainer transformers.trainer_callback"


def test_install_refuses_a_client_that_was_imported_before() -> None:
    code = """
    import types, transformers
    clients = (
        "from transformers import Trainer",
        "from transformers import TrainingArguments as Arguments",
        "import transformers\\nclass Mine(transformers.TrainerCallback): ...",
    )
    for number, client in enumerate(clients):
        module = sys.modules["some_client"] = types.ModuleType(f"some_client_{number}")
        exec(client, module.__dict__)
        try:
            hftrain.compat.install()
        except hftrain.core.errors.ConfigError as error:
            print(error)
        assert transformers.Trainer.__module__ == "transformers.trainer"
    """
    said = run(code).splitlines()
    assert len(said) == 3
    for number, (line, name) in enumerate(zip(said, ("Trainer", "Arguments", "Mine"), strict=True)):
        assert f"the module 'some_client_{number}' was imported before and holds transformers' ({name})" in line
        assert "Call hftrain.compat.install() at the start of the program" in line


PROCESSES = """
import hftrain.compat
hftrain.compat.install()
from accelerate import PartialState
from transformers import Trainer, TrainingArguments
from support.tiny import Net, make_rows

args = TrainingArguments("out", max_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to="none",
                         disable_tqdm=True, save_strategy="no")
with PartialState().main_process_first():
    rows = make_rows()
trainer = Trainer(Net(), args, train_dataset=rows)
state = trainer.accelerator.state
result = [PartialState().num_processes, state.num_processes, trainer.strategy.name]
trainer.train()
result.append(sum(float(p.sum()) for p in trainer.model.parameters()))
hftrain.compat.uninstall()
"""


@pytest.mark.distributed
def test_client_may_ask_for_the_processes_before_they_are_launched(
    run_distributed: Callable[..., list[list[object]]],
) -> None:
    results = run_distributed(PROCESSES)
    assert results[0][:3] == [2, 2, "ddp"]
    assert results[0] == results[1]


@pytest.mark.parametrize(("rank", "main_only", "is_shown"), [("1", False, True), ("1", True, False), ("0", True, True)])
def test_accelerates_loggers_work_before_a_launch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: str, main_only: bool, is_shown: bool
) -> None:
    from accelerate.logging import MultiProcessAdapter
    from accelerate.state import PartialState

    from hftrain.compat.accelerate_patches import adapted_log

    monkeypatch.setattr(PartialState, "_shared_state", {})
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(MultiProcessAdapter, "log", adapted_log(MultiProcessAdapter.log))
    logger = MultiProcessAdapter(logging.getLogger("client"), {})
    logger.warning("hello", main_process_only=main_only)
    assert ("hello" in caplog.text) is is_shown


def test_settings_of_accelerate_can_be_read_before_there_is_an_accelerator() -> None:
    code = """
    hftrain.compat.install()
    import tempfile, torch, transformers
    from accelerate.state import AcceleratorState
    from accelerate.utils import set_seed
    args = transformers.TrainingArguments(tempfile.mkdtemp(), use_cpu=True, bf16=True, report_to="none")
    trainer = transformers.Trainer(torch.nn.Linear(2, 2), args)
    set_seed(3, device_specific=True)
    print(AcceleratorState().process_index, trainer.accelerator.mixed_precision)
    """
    assert run(code) == "0 bf16"


# As ms-swift does when it is imported, before its trainers are made.
REPLACED = """
hftrain.compat.install()
import tempfile
import transformers
from support.tiny import Net, make_rows
from transformers import trainer
from transformers.trainer_callback import DefaultFlowCallback, PrinterCallback, ProgressCallback

class Stops(DefaultFlowCallback):
    def on_epoch_end(self, args, state, control, **kwargs):
        control.should_training_stop = True
        return control

class Prints(PrinterCallback):
    def on_log(self, args, state, control, logs=None, **kwargs): ...

class Shows(ProgressCallback): ...

class Reports(transformers.TrainerCallback): ...

def make(disable_tqdm=True, report_to="none"):
    args = transformers.TrainingArguments(
        tempfile.mkdtemp(), num_train_epochs=4, per_device_train_batch_size=4, use_cpu=True, save_strategy="no",
        report_to=report_to, disable_tqdm=disable_tqdm, logging_steps=1,
    )
    return transformers.Trainer(Net(), args, train_dataset=make_rows(16))

def names(made):
    return [type(callback).__name__ for callback in made.callback_handler.callbacks]
"""


def test_default_callbacks_that_a_library_replaced_are_used_until_uninstall() -> None:
    code = f"""{REPLACED}
import hftrain
from hftrain import DefaultFlowCallback as Ours
assert trainer.DEFAULT_CALLBACKS == [Ours]
before = trainer.DEFAULT_CALLBACKS, trainer.DEFAULT_PROGRESS_CALLBACK, trainer.PrinterCallback
trainer.DEFAULT_CALLBACKS = [*trainer.DEFAULT_CALLBACKS, Stops]
trainer.DEFAULT_PROGRESS_CALLBACK, trainer.PrinterCallback = Shows, Prints
made = make()
made.train()
print(made.state.global_step, *names(made), names(make(disable_tqdm=False))[-1])
trainer.DEFAULT_CALLBACKS, trainer.DEFAULT_PROGRESS_CALLBACK, trainer.PrinterCallback = before
hftrain.compat.uninstall()
assert [each.__module__ for each in trainer.DEFAULT_CALLBACKS] == ["transformers.trainer_callback"]
args = hftrain.TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to="none", disable_tqdm=True)
print(*names(hftrain.Trainer(Net(), args)))
"""
    assert run(code).splitlines() == [
        "4 DefaultFlowCallback Stops Prints Shows",
        "DefaultFlowCallback PrinterCallback",
    ]


def test_trackers_that_a_library_replaced_are_used() -> None:
    """`INTEGRATION_TO_CALLBACK` holds hftrain's classes, and what libraries add to it: classes or instances."""
    code = f"""{REPLACED}
from transformers.integrations import INTEGRATION_TO_CALLBACK
import hftrain
assert INTEGRATION_TO_CALLBACK["tensorboard"] is hftrain.TensorBoardCallback
INTEGRATION_TO_CALLBACK.update(wandb=Reports, mine=Reports())
print(*names(make(report_to=["wandb", "mine"])))
try:
    make(report_to=["other"])
except hftrain.core.errors.ConfigError as error:
    print("other" in str(error))
"""
    assert run(code).splitlines() == ["DefaultFlowCallback Reports Reports PrinterCallback", "True"]


def test_replaced_functions_that_are_not_called_warn_when_a_training_starts() -> None:
    code = f"""{REPLACED}
import warnings
made = make()
trainer.Trainer = type("Mine", (transformers.Trainer,), {{}})
trainer.get_scheduler = lambda *args, **kwargs: None
trainer.skip_first_batches = lambda loader, num_batches=0: loader
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    made.train()
    from hftrain.core.elsewhere import warn_of_unread
    warn_of_unread(is_resume=True)
print(*[each.message for each in found], sep="\\n")
"""
    says = "was replaced (by __main__), but hftrain's Trainer does not call it."
    assert [line for line in run(code).splitlines() if "was replaced" in line] == [
        f"transformers.trainer.get_scheduler {says} Override a method of the Trainer, or pass a callback.",
        f"transformers.trainer.skip_first_batches {says} hftrain continues at its place in the data.",
    ]
