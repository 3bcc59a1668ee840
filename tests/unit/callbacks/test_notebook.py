from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from hftrain.callbacks import CallbackHandler, NotebookProgressCallback, in_notebook
from hftrain.callbacks.meters import Meter
from hftrain.callbacks.notebook import render_html, show_in_ipython
from hftrain.core.errors import MissingDependencyError
from hftrain.core.optional import is_available
from hftrain.core.progress import TrainerControl
from hftrain.core.state import TrainerState


def test_render_html_draws_bars_and_escapes_the_table() -> None:
    file = io.StringIO()
    meters = [
        Meter("train", 10, initial=5, unit="step", file=file),
        Meter("evaluate", None, initial=3, unit="batch", file=file),
    ]
    block = render_html(meters, [{"Step": 5, "Loss": 0.123456}, {"Step": 7, "<b>": "a & b"}])
    assert '<progress value="5" max="10"' in block
    assert "5/10  [00:00&lt;?]" in block
    assert "<progress style" in block
    assert "<tr><th>Step</th><th>Loss</th><th>&lt;b&gt;</th></tr>" in block
    assert "<tr><td>5</td><td>0.1235</td><td></td></tr>" in block
    assert "<tr><td>7</td><td></td><td>a &amp; b</td></tr>" in block


class Page:
    def __init__(self):
        self.blocks: dict[str, str] = {}

    def __call__(self, block, *, display_id, is_update):
        assert is_update == (display_id in self.blocks)
        self.blocks[display_id] = block


def make_runner(page, eval_strategy, **state) -> CallbackHandler:
    return CallbackHandler(
        [NotebookProgressCallback(show=page)],
        args=SimpleNamespace(eval_strategy=eval_strategy),
        state=TrainerState(max_steps=20, **state),
        control=TrainerControl(),
    )


def test_notebook_adds_a_row_per_evaluation() -> None:
    page = Page()
    runner = make_runner(page, "steps")
    runner.fire("on_train_begin")
    for step in (10, 20):
        runner.state.global_step = step
        runner.fire("on_step_end")
        if step == 20:
            runner.fire("on_log", logs={"loss": 0.5})
        runner.fire("on_prediction_step", eval_dataloader=range(3))
        runner.fire("on_evaluate", metrics={"eval_loss": 1.0 / step, "eval_acc": 0.9, "eval_runtime": 1.0, "epoch": 1})
    runner.fire("on_log", logs={"train_runtime": 1.0})
    runner.fire("on_train_end")
    (block,) = page.blocks.values()
    assert "<tr><th>Step</th><th>Training Loss</th><th>Validation Loss</th><th>Acc</th></tr>" in block
    assert "<tr><td>10</td><td>No log</td><td>0.1</td><td>0.9</td></tr>" in block
    assert "<tr><td>20</td><td>0.5</td><td>0.05</td><td>0.9</td></tr>" in block
    assert 'value="20" max="20"' in block
    assert "evaluate" not in block


def test_notebook_puts_several_sets_of_one_evaluation_in_one_row() -> None:
    page = Page()
    runner = make_runner(page, "epoch", global_step=5, epoch=1.0)
    runner.fire("on_train_begin")
    runner.fire("on_evaluate", metrics={"eval_a_loss": 1.5})
    runner.fire("on_evaluate", metrics={"eval_b_loss": 2.5})
    (block,) = page.blocks.values()
    assert "<tr><th>Epoch</th><th>Training Loss</th><th>A Loss</th><th>B Loss</th></tr>" in block
    assert "<tr><td>1.0</td><td>No log</td><td>1.5</td><td>2.5</td></tr>" in block


def test_notebook_adds_a_row_per_log_without_evaluations() -> None:
    page = Page()
    runner = make_runner(page, "no")
    runner.fire("on_train_begin")
    for step in (1, 2):
        runner.state.global_step = step
        runner.fire("on_log", logs={"loss": 1.0 / step})
    (block,) = page.blocks.values()
    assert "<tr><td>1</td><td>1.0</td></tr><tr><td>2</td><td>0.5</td></tr>" in block


def test_notebook_starts_a_new_block_for_each_training_run() -> None:
    page = Page()
    runner = make_runner(page, "no")
    runner.fire("on_train_begin")
    runner.fire("on_train_begin")
    assert len(page.blocks) == 2


def test_notebook_shows_a_prediction_outside_training() -> None:
    page = Page()
    runner = make_runner(page, "no")
    for _ in range(3):
        runner.fire("on_prediction_step", eval_dataloader=range(3))
    (block,) = page.blocks.values()
    assert "1/3" in block
    runner.fire("on_predict", metrics={})
    assert page.blocks == {next(iter(page.blocks)): "<div></div>"}


def test_notebook_counts_from_the_start_after_an_interrupted_evaluation(monkeypatch) -> None:
    monkeypatch.setattr("hftrain.callbacks.notebook.REFRESH_S", 0.0)
    page = Page()
    runner = make_runner(page, "no")
    interrupted, good = range(3), range(3)
    runner.fire("on_prediction_step", eval_dataloader=interrupted)
    runner.fire("on_prediction_step", eval_dataloader=good)
    runner.fire("on_prediction_step", eval_dataloader=good)
    assert "2/3" in next(iter(page.blocks.values()))


def test_notebook_other_processes_show_nothing() -> None:
    page = Page()
    runner = make_runner(page, "no", is_world_process_zero=False)
    runner.fire("on_train_begin")
    runner.fire("on_log", logs={"loss": 1.0})
    runner.fire("on_train_end")
    assert page.blocks == {}


def test_in_notebook_is_false_here() -> None:
    assert not in_notebook()


@pytest.mark.skipif(is_available("ipython"), reason="IPython is installed")
def test_notebook_callback_needs_ipython() -> None:
    with pytest.raises(MissingDependencyError, match="NotebookProgressCallback"):
        NotebookProgressCallback()


def test_show_in_ipython_replaces_a_block_in_place() -> None:
    shell_module = pytest.importorskip("IPython.core.interactiveshell")
    from IPython.core.displaypub import CapturingDisplayPublisher

    shell = shell_module.InteractiveShell.instance()
    try:
        shell.display_pub = publisher = CapturingDisplayPublisher(parent=shell)
        assert not in_notebook()
        show_in_ipython("<p>1</p>", display_id="block", is_update=False)
        show_in_ipython("<p>2</p>", display_id="block", is_update=True)
        shown = [(out["data"]["text/html"], out["transient"], out.get("update")) for out in publisher.outputs]
        assert [html for html, _, _ in shown] == ["<p>1</p>", "<p>2</p>"]
        assert {transient["display_id"] for _, transient, _ in shown} == {"block"}
        assert shown[1][2] is True
    finally:
        shell_module.InteractiveShell.clear_instance()
