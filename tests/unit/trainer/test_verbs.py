"""What each verb returns and leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.tiny import Net, Task, make_arguments, make_rows, make_trainer, share, train
from torch import nn

from hftrain import (
    CheckpointError,
    ConfigError,
    EvalPrediction,
    StepOutput,
    TaskModule,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


def test_train_twice_goes_on_with_the_same_model(tmp_path: Path) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path), train_dataset=make_rows(22))
    first = trainer.train().training_loss
    optimizer = trainer.optimizer
    assert trainer.train().training_loss < first
    assert trainer.optimizer is optimizer
    assert trainer.state.global_step == 12


def test_train_again_after_an_interrupt(tmp_path: Path) -> None:
    class Interrupt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                raise KeyboardInterrupt

    trainer = Trainer(Net(), make_arguments(tmp_path), train_dataset=make_rows(22), callbacks=[Interrupt])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not trainer.is_in_train
    trainer.remove_callback(Interrupt)
    assert trainer.train().global_step == 12


def test_model_init_gives_the_same_run_each_time(tmp_path: Path) -> None:
    trainer = Trainer(args=make_arguments(tmp_path), model_init=Net, train_dataset=make_rows(22))
    first = trainer.train().training_loss
    model = trainer.model
    assert trainer.train().training_loss == first
    assert trainer.model is not model


def test_evaluate_before_training(tmp_path: Path) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path), eval_dataset=make_rows(9), compute_metrics=share)
    metrics = trainer.evaluate()
    assert {"eval_loss", "eval_share", "eval_runtime", "eval_samples_per_second"} <= metrics.keys()
    json.dumps(metrics)
    assert trainer.state.log_history[-1]["eval_loss"] == metrics["eval_loss"]
    assert trainer.model.training


def test_evaluate_several_sets_by_name(tmp_path: Path) -> None:
    trainer = train(
        tmp_path, train_dataset=make_rows(8), eval_dataset={"data1": make_rows(5), "data2": make_rows(6)},
        eval_strategy="epoch", metric_for_best_model="eval_data1_loss", num_train_epochs=1,
    )  # fmt: skip
    assert trainer.state.best_metric is not None
    assert {"eval_data1_loss", "eval_data2_loss"} <= trainer.evaluate().keys()
    assert "mine_a_loss" in trainer.evaluate({"a": make_rows(3)}, metric_key_prefix="mine")
    assert len(trainer.get_eval_dataloader("data2").dataset) == 6


def test_predict_with_and_without_labels(tmp_path: Path) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path), compute_metrics=share)
    rows = make_rows(9)
    output = trainer.predict(rows)
    assert output.predictions.shape == (9, 3)
    assert output.label_ids.tolist() == [int(row["labels"]) for row in rows]
    assert "test_share" in output.metrics
    blind = trainer.predict([{"x": row["x"]} for row in rows], metric_key_prefix="blind")
    assert blind.label_ids is None
    numpy.testing.assert_allclose(blind.predictions, output.predictions, rtol=1e-6)
    assert "blind_loss" not in blind.metrics


def test_compute_metrics_gets_what_it_asks_for(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def look(prediction: EvalPrediction) -> dict[str, float]:
        seen["parts"] = len(tuple(prediction))
        seen["inputs"], seen["losses"] = prediction.inputs, prediction.losses
        seen["predictions"] = prediction.predictions
        return {}

    class Named(Net):
        main_input_name = "x"

    arguments = make_arguments(tmp_path, include_for_metrics=["inputs", "loss"])
    Trainer(
        Named(), arguments, compute_metrics=look, preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)
    ).evaluate(make_rows(6))
    assert seen["parts"] == 4
    assert seen["inputs"].shape == (6, 4)
    assert seen["losses"].shape == (6,)
    assert seen["predictions"].shape == (6,)


def test_metrics_batch_by_batch_get_tensors_as_the_model_gave_them(tmp_path: Path) -> None:
    seen: list[EvalPrediction] = []

    class Several(Net):
        main_input_name = "x"

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[Any, ...]:
            loss, logits = super().forward(x, labels)
            return loss, logits, (logits.bfloat16(), x.sum())

    def keep(prediction: EvalPrediction, compute_result: bool) -> dict[str, Any]:
        seen.append(prediction)
        right = (prediction.predictions[0].argmax(-1) == prediction.label_ids).float()
        return {"right": right.mean()} if compute_result else {}

    arguments = make_arguments(tmp_path, batch_eval_metrics=True, include_for_metrics=["inputs", "loss"])
    metrics = Trainer(Several(), arguments, compute_metrics=keep).evaluate(make_rows(6))
    assert type(metrics["eval_right"]) is float
    assert [type(part) for part in (seen[0].label_ids, seen[0].inputs, seen[0].losses)] == [torch.Tensor] * 3
    logits, (low, total) = seen[0].predictions
    assert (logits.dtype, logits.shape, logits.requires_grad) == (torch.float32, (4, 3), False)
    assert (low.dtype, total.shape) == (torch.bfloat16, ())
    assert [len(each.label_ids) for each in seen] == [4, 2]
    json.dumps(metrics)


def test_metric_may_be_a_tensor_of_one_number(tmp_path: Path) -> None:
    for per_batch in (False, True):
        arguments = make_arguments(tmp_path, batch_eval_metrics=per_batch)
        trainer = Trainer(Net(), arguments, compute_metrics=lambda p, compute_result=True: {"a": torch.tensor(0.5)})
        trainer.evaluate(make_rows(6))
        assert type(trainer.state.log_history[-1]["eval_a"]) is float


def test_frozen_modes_come_back_after_an_evaluation(tmp_path: Path) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path), eval_dataset=make_rows(5))
    trainer.model.layers[1].eval()
    trainer.evaluate()
    assert [module.training for module in (trainer.model, trainer.model.layers[1])] == [True, False]


def test_task_logs_are_averaged(tmp_path: Path) -> None:
    class Talking(Task):
        def training_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
            output = super().training_step(batch)
            output.logs = {"size": len(batch["labels"]), "twice": output.loss * 2}
            return output

    trainer = train(tmp_path, Talking(), train_dataset=make_rows(22), logging_steps=6)
    entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert entry["size"] == pytest.approx(22 / 6)
    assert entry["twice"] == pytest.approx(2 * entry["loss"])


def test_task_brings_its_own_optimizer_and_schedule(tmp_path: Path) -> None:
    class Own(Task):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
            return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    trainer = train(tmp_path, Own(), train_dataset=make_rows(22), max_steps=3)
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == [0.5, 0.25, 0.125]


def test_task_on_plain_tuples_and_without_prediction(tmp_path: Path) -> None:
    class Regression(TaskModule):
        def training_step(self, batch: Any) -> torch.Tensor:
            inputs, targets = batch
            return nn.functional.mse_loss(self.model(inputs), targets)

    data = torch.utils.data.TensorDataset(torch.randn(20, 2), torch.randn(20, 1))
    trainer = train(tmp_path, Regression(nn.Linear(2, 1)), train_dataset=data, eval_dataset=data)
    assert "eval_loss" in trainer.evaluate()
    with pytest.raises(TypeError, match="defines no prediction_step"):
        trainer.predict(data)


def test_given_optimizer_and_schedule_are_used(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    trainer = train(tmp_path, model, optimizers=(optimizer, schedule), max_steps=2)
    assert trainer.optimizer is optimizer
    assert trainer.lr_scheduler is schedule
    assert trainer.get_learning_rates() == [0.3]


def test_save_model_and_state(tmp_path: Path) -> None:
    class Tool:
        def save_pretrained(self, folder: str) -> None:
            (Path(folder) / "tool.json").write_text("{}")

    trainer = train(tmp_path, processing_class=Tool())
    trainer.save_model(str(tmp_path / "final"))
    trainer.save_state()
    assert {path.name for path in (tmp_path / "final").iterdir()} == {
        "model.safetensors", "training_args.bin", "tool.json"
    }  # fmt: skip
    saved = torch.load(tmp_path / "final" / "training_args.bin", weights_only=True)
    assert saved["learning_rate"] == 1e-2
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 12


def test_save_only_model_cannot_be_resumed(tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path, save_strategy="epoch", save_only_model=True)
    Trainer(Net(), arguments, train_dataset=make_rows()).train()
    assert not list(tmp_path.glob("checkpoint-*/optimizer.pt"))
    with pytest.raises(CheckpointError, match="save_only_model"):
        Trainer(Net(), arguments, train_dataset=make_rows()).train(resume_from_checkpoint=True)


def test_start_that_looks_for_checkpoints_warns_if_it_saves_none_to_resume(tmp_path: Path, caplog: Any) -> None:
    options = {"save_strategy": "epoch", "resume_from_checkpoint": "auto"}
    train(tmp_path, num_train_epochs=1, **options)
    assert "save_only_model" not in caplog.text
    arguments = make_arguments(tmp_path, save_only_model=True, **options)
    Trainer(Net(), arguments, train_dataset=make_rows()).train()
    assert "save_only_model=True: what this run saves, another start with 'auto' cannot resume." in caplog.text
    caplog.clear()
    with pytest.raises(CheckpointError, match="Name an older checkpoint that is complete"):
        Trainer(Net(), arguments, train_dataset=make_rows()).train()
    assert "no step is left" not in caplog.text
    # It is whole: the older one can be named.
    (older, _) = sorted(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    Trainer(Net(), arguments, train_dataset=make_rows()).train(resume_from_checkpoint=str(older))


def test_save_strategy_best_saves_on_a_new_best_only(tmp_path: Path) -> None:
    values = iter([0.5, 0.9, 0.3, 0.95])
    train(
        tmp_path, train_dataset=make_rows(8), eval_dataset=make_rows(4),
        compute_metrics=lambda prediction: {"score": next(values)}, num_train_epochs=4, eval_strategy="epoch",
        save_strategy="best", metric_for_best_model="score", greater_is_better=True,
    )  # fmt: skip
    assert sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*")) == [2, 4, 8]


def test_arguments_default_to_a_folder_in_the_working_directory(tmp_cwd: Path) -> None:
    assert Trainer(Net()).args.output_dir == "tmp_trainer"
    assert not (tmp_cwd / "tmp_trainer").exists()


def test_older_names_work_with_a_warning(tmp_path: Path) -> None:
    tool = object()
    with pytest.warns(FutureWarning, match="processing_class"):
        trainer = make_trainer(tmp_path, tokenizer=tool)
    assert trainer.processing_class is tool
    with pytest.warns(FutureWarning, match="Trainer.tokenizer is deprecated"):
        assert trainer.tokenizer is tool
    with pytest.warns(FutureWarning, match="resume_from_checkpoint"), pytest.raises(CheckpointError):
        trainer.train(model_path=str(tmp_path / "nowhere"))


def test_settings_without_a_process_group_are_said_to_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Trainer(Net(), make_arguments(tmp_path, ddp_bucket_cap_mb=10))
    assert "bucket_cap_mb=10" in caplog.text


def test_gradient_checkpointing_needs_a_model_that_can(tmp_path: Path) -> None:
    class Can(Net):
        calls: list[Any] = []  # noqa: RUF012

        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
            self.calls.append(gradient_checkpointing_kwargs)

    arguments = make_arguments(
        tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, max_steps=1
    )
    Trainer(Can(), arguments, train_dataset=make_rows()).train()
    assert Can.calls == [{"use_reentrant": False}]
    with pytest.raises(ConfigError, match="gradient_checkpointing_enable"):
        Trainer(Net(), arguments, train_dataset=make_rows()).train()


def test_trainer_leaves_the_arguments_alone(tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path)
    before = arguments.to_dict()
    Trainer(Net(), arguments, train_dataset=make_rows()).train()
    assert arguments.to_dict() == before
    assert isinstance(arguments, TrainingArguments)
