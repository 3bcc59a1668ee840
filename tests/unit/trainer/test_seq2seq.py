"""Seq2SeqTrainer with models of one's own that have `generate`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from support.tiny import Net, Task, make_arguments, make_rows
from torch import nn

from hftrain import (
    ConfigError,
    EvalPrediction,
    MissingDependencyError,
    PredictionWriter,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TaskError,
    Trainer,
    TrainingArguments,
)
from hftrain.core.extras import is_available
from hftrain.strategies.single import SingleDeviceStrategy

PAD, SIZE = 0, 9


class Config(SimpleNamespace):
    """What a generation config looks like to a model of one's own."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Echo(nn.Module):
    """Learn anything; generate a start token, each sample's tokens up to its first PAD, and its beams at the end."""

    generation_config: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SIZE, SIZE)
        self.calls: list[dict[str, Any]] = []

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        logits = self.table(input_ids)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def generate(
        self,
        input_ids: torch.Tensor,
        decoder_input_ids: torch.Tensor | None = None,
        max_length: int | None = None,
        num_beams: int = 1,
        **options: Any,
    ) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        assert not self.training
        self.calls.append({"decoder_input_ids": decoder_input_ids, "max_length": max_length, **options})
        start = torch.full_like(input_ids[:, :1], num_beams)
        tokens = torch.cat([start, input_ids], dim=1)
        tokens = tokens[:, : int((tokens != PAD).sum(1).max())]
        return tokens if max_length is None else tokens[:, :max_length]


class Plain(Echo):
    """Take nothing but tokens."""

    def generate(self, input_ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return input_ids


class Tool:
    pad_token_id = PAD


def samples(num: int = 7, length: int = 5) -> list[dict[str, torch.Tensor]]:
    """Return sorted samples of 1, 2, ... tokens, so that batches differ in length."""
    rows = []
    for index in range(num):
        tokens = torch.zeros(length, dtype=torch.int64)
        tokens[: 1 + index % length] = 3 + index % 5
        rows.append({"input_ids": tokens, "labels": tokens.clone()})
    return rows


def expected(num: int = 7, width: int = 6, *, beams: int = 1, pad: int = PAD) -> numpy.ndarray[Any, Any]:
    found = numpy.full((num, width), pad)
    for row, sample in zip(found, samples(num), strict=True):
        tokens = [beams, *[token for token in sample["input_ids"].tolist() if token != PAD]][:width]
        row[: len(tokens)] = tokens
    return found


def arguments(folder: Path, **options: Any) -> Seq2SeqTrainingArguments:
    defaults = {"per_device_eval_batch_size": 2, "predict_with_generate": True}
    made: Seq2SeqTrainingArguments = make_arguments(
        folder, arguments=Seq2SeqTrainingArguments, **{**defaults, **options}
    )
    return made


def make(folder: Path, model: nn.Module | None = None, tool: Any = Tool, **options: Any) -> Seq2SeqTrainer:
    parts = {name: options.pop(name) for name in ("compute_metrics", "strategy", "callbacks") if name in options}
    parts |= {name: options.pop(name) for name in ("eval_dataset", "train_dataset", "data_collator") if name in options}
    parts |= {n: options.pop(n) for n in ("preprocess_logits_for_metrics", "compute_loss_func") if n in options}
    return Seq2SeqTrainer(model or Echo(), arguments(folder, **options), processing_class=tool and tool(), **parts)


# -- what is generated -----------------------------------------------------------------------------------------------


def test_predictions_are_generated_and_padded_over_batches(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    predictions, labels, metrics = trainer.predict(samples())
    assert predictions.tolist() == expected().tolist()
    assert labels.tolist() == [row["input_ids"].tolist() for row in samples()]
    plain = Trainer(trainer.model, make_arguments(tmp_path)).predict(samples())
    assert metrics["test_loss"] == pytest.approx(plain.metrics["test_loss"], rel=1e-6)


def test_written_predictions_of_a_sorted_evaluation_are_warned_of(tmp_path: Path) -> None:
    rows = [{name: value[: 1 + index] for name, value in row.items()} for index, row in enumerate(samples(5))]
    trainer = make(
        tmp_path, sortish_sampler=True, per_device_eval_batch_size=1,
        callbacks=[PredictionWriter(tmp_path / "written")],
    )  # fmt: skip
    with pytest.warns(UserWarning, match="writes batches as they are read"):
        trainer.predict(rows)
    assert [batch["labels"].numel() for batch in PredictionWriter.read(tmp_path / "written")] == [5, 4, 3, 2, 1]


def test_without_predict_with_generate_it_is_a_trainer(tmp_path: Path) -> None:
    model = Echo()
    plain = Trainer(model, make_arguments(tmp_path)).predict(samples())
    for args in (arguments(tmp_path, predict_with_generate=False), TrainingArguments(str(tmp_path), use_cpu=True)):
        ours = Seq2SeqTrainer(model, args).predict(samples())
        assert numpy.array_equal(ours.predictions, plain.predictions)
    assert isinstance(Seq2SeqTrainer(model), Trainer)
    assert issubclass(Seq2SeqTrainingArguments, TrainingArguments)
    assert model.calls == []


def test_metrics_get_token_ids_and_train_evaluates_with_them(tmp_path: Path) -> None:
    seen: list[EvalPrediction] = []

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        return {"same": float((prediction.predictions == expected()).mean())}

    trainer = make(
        tmp_path, compute_metrics=compute_metrics, train_dataset=samples(), eval_dataset=samples(), max_steps=2,
        eval_strategy="steps", eval_steps=1, metric_for_best_model="same", label_smoothing_factor=0.1,
    )  # fmt: skip
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_same" in entry]
    assert [entry["eval_same"] for entry in logged] == [1.0, 1.0]
    assert trainer.state.best_metric == 1.0
    assert seen[-1].predictions.dtype == numpy.int64
    assert trainer.model.training


def test_loss_alone_generates_nothing(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    assert "eval_loss" in trainer.evaluate(samples())
    assert trainer.model.calls == []


def test_data_without_labels_gives_tokens_alone(tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"]} for row in samples()]
    predictions, labels, metrics = make(tmp_path).predict(rows)
    assert predictions.tolist() == expected().tolist()
    assert labels is None
    assert "test_loss" not in metrics


@pytest.mark.parametrize("name", ["label_smoothing_factor", "compute_loss_func", "override"])
def test_loss_is_computed_as_without_generation(tmp_path: Path, name: str) -> None:
    def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return outputs["logits"].square().mean()

    class Own(Seq2SeqTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            inputs.pop("labels")
            outputs = model(**inputs)
            loss = outputs["logits"].square().mean()
            return (loss, outputs) if return_outputs else loss

    parts = {"compute_loss_func": own_loss} if name == "compute_loss_func" else {}
    options = {"label_smoothing_factor": 0.3} if name == "label_smoothing_factor" else {}
    model, kind = Echo(), Own if name == "override" else Seq2SeqTrainer
    losses = [
        kind(model, arguments(tmp_path, predict_with_generate=is_on, **options), **parts).predict(samples())
        for is_on in (True, False)
    ]
    assert losses[0].metrics["test_loss"] == pytest.approx(losses[1].metrics["test_loss"], rel=1e-6)
    assert losses[0].label_ids is not None


# -- what generate is called with ------------------------------------------------------------------------------------


def test_arguments_of_the_call_win_over_settings(tmp_path: Path) -> None:
    trainer = make(tmp_path, generation_max_length=4, generation_num_beams=2, compute_metrics=lambda p: {})
    assert trainer.predict(samples()).predictions.tolist() == expected(width=4, beams=2).tolist()
    found = trainer.predict(samples(), max_length=3, num_beams=1, top_k=7).predictions
    assert found.tolist() == expected(width=3).tolist()
    assert trainer.model.calls[-1]["top_k"] == 7
    trainer.evaluate(samples(), max_new_tokens=2)
    assert (trainer.model.calls[-1]["max_length"], trainer.model.calls[-1]["max_new_tokens"]) == (None, 2)
    trainer.evaluate(samples())
    assert (trainer.model.calls[-1]["max_length"], "top_k" in trainer.model.calls[-1]) == (4, False)


def test_arguments_of_the_call_reach_every_set(tmp_path: Path) -> None:
    trainer = make(tmp_path, compute_metrics=lambda p: {"width": p.predictions.shape[1]})
    metrics = trainer.evaluate({"a": samples(2), "b": samples()}, max_length=4)
    assert (metrics["eval_a_width"], metrics["eval_b_width"]) == (4, 4)


def test_prefix_of_predictions_is_test(tmp_path: Path) -> None:
    metrics = make(tmp_path).predict(samples()).metrics
    assert all(name.startswith("test_") for name in metrics)
    assert "own_loss" in make(tmp_path).predict(samples(), metric_key_prefix="own").metrics


def test_decoder_inputs_made_of_labels_are_not_handed_on(tmp_path: Path) -> None:
    rows = [{**row, "decoder_input_ids": row["labels"], "weight": torch.ones(())} for row in samples(2)]
    trainer = make(tmp_path)
    trainer.predict(rows)
    assert trainer.model.calls[-1] == {"decoder_input_ids": None, "max_length": None, "weight": trainer_weight(2)}
    trainer.predict([{**row, "decoder_input_ids": torch.tensor([1])} for row in samples(2)])
    assert trainer.model.calls[-1]["decoder_input_ids"].tolist() == [[1], [1]]
    assert "labels" not in trainer.model.calls[-1]


def trainer_weight(num: int) -> Any:
    class Equal:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, torch.Tensor) and other.tolist() == [1.0] * num

    return Equal()


def test_columns_that_generate_does_not_take_stay_behind(tmp_path: Path) -> None:
    rows = [{**row, "weight": torch.ones(())} for row in samples()]
    predictions = make(tmp_path, Plain()).predict(rows).predictions
    assert predictions.tolist() == [row["input_ids"].tolist() for row in samples()]


def test_tokens_may_come_with_more(tmp_path: Path) -> None:
    class Rich(Echo):
        def generate(self, *args: Any, **options: Any) -> Any:
            return SimpleNamespace(sequences=super().generate(*args, **options), scores=None)

    assert make(tmp_path, Rich()).predict(samples()).predictions.tolist() == expected().tolist()


def test_a_split_model_is_told_to_stay_in_step(tmp_path: Path) -> None:
    class Split(SingleDeviceStrategy):
        """One process; it only says that models are split."""

        shards_model = True

    trainer = make(tmp_path, strategy=Split(use_cpu=True))
    trainer.predict(samples(2))
    assert trainer.model.calls[-1]["synced_gpus"] is True
    trainer.predict(samples(2), synced_gpus=False)
    assert trainer.model.calls[-1]["synced_gpus"] is False
    with pytest.raises(ConfigError, match="synced_gpus"):
        make(tmp_path, Plain(), strategy=Split(use_cpu=True))


# -- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "given", "width"),
    [
        ({"generation_max_length": 8}, {}, 8),
        ({}, {"max_length": 9}, 9),
        ({}, {"max_new_tokens": 9}, 10),
        ({"generation_config": Config(max_length=7)}, {}, 7),
        ({"generation_config": Config(max_new_tokens=7)}, {}, 8),
        ({"generation_config": Config(max_new_tokens=17)}, {"generation_config": Config(max_length=9)}, 9),
        ({"generation_config": Config(max_new_tokens=17), "generation_max_length": 8}, {}, 8),
    ],
)
def test_tokens_and_labels_are_padded_to_the_longest_that_may_come(
    tmp_path: Path, options: dict[str, Any], given: dict[str, Any], width: int
) -> None:
    predictions, labels, _ = make(tmp_path, **options).predict(samples(), **given)
    assert predictions.tolist() == expected(width=width).tolist()
    assert labels.tolist() == [[*row["labels"].tolist(), *[PAD] * (width - 5)] for row in samples()]


@pytest.mark.parametrize(
    ("tool", "config", "pad"),
    [
        ({"pad_token_id": 8, "eos_token_id": 7}, None, 8),
        ({"pad_token_id": None, "eos_token_id": 7}, None, 7),
        ({"tokenizer": SimpleNamespace(pad_token_id=8)}, None, 8),
        ({"eos_token_id": 7}, Config(pad_token_id=6), 6),
        ({}, Config(eos_token_id=[7, 8]), 7),
        ({}, None, -100),
    ],
)
def test_padding_is_the_token_for_it_or_for_the_end(tmp_path: Path, tool: Any, config: Any, pad: int) -> None:
    options = {"generation_config": config, "per_device_eval_batch_size": 1}
    trainer = make(tmp_path, tool=lambda: SimpleNamespace(**tool), **options)
    assert trainer.predict(samples()).predictions.tolist() == expected(pad=pad).tolist()
    padded = trainer.predict(samples(), max_length=8).predictions
    assert padded.tolist() == expected(width=6 if pad == -100 else 8, pad=pad).tolist()


@pytest.mark.parametrize("options", [{"batch_eval_metrics": True}, {"eval_do_concat_batches": False}])
def test_every_way_of_evaluating_hands_out_tokens(tmp_path: Path, options: dict[str, bool]) -> None:
    seen: list[Any] = []

    def compute_metrics(prediction: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        seen.append(prediction.predictions)
        return {"rows": len(prediction.label_ids)}

    make(tmp_path, compute_metrics=compute_metrics, **options).evaluate(samples())
    whole = seen[0] if "eval_do_concat_batches" in options else seen
    assert [row[row != PAD].tolist() for part in whole for row in part] == [
        [token for token in row if token != PAD] for row in expected().tolist()
    ]
    assert min(int(part.min()) for part in whole) == PAD


def test_padding_can_be_overridden(tmp_path: Path) -> None:
    class Own(Seq2SeqTrainer):
        def _pad_tensors_to_max_len(self, tensor: torch.Tensor, max_length: int) -> torch.Tensor:
            return super()._pad_tensors_to_max_len(tensor, max_length + 1)

    trainer = Own(Echo(), arguments(tmp_path, generation_max_length=8), processing_class=Tool())
    assert trainer.predict(samples()).predictions.shape == (7, 9)


def test_prediction_step_of_older_scripts_works(tmp_path: Path) -> None:
    class Own(Seq2SeqTrainer):
        def prediction_step(
            self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None, **gen_kwargs: Any
        ) -> Any:
            labels = inputs.pop("labels")
            loss, tokens, _ = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
            tokens[:, :1] = 2
            return loss, tokens, labels

    trainer = Own(Echo(), arguments(tmp_path), processing_class=Tool())
    predictions, labels, _ = trainer.predict(samples())
    assert predictions.tolist() == expected(beams=2).tolist()
    assert labels.tolist() == [row["labels"].tolist() for row in samples()]


# -- generation_config -----------------------------------------------------------------------------------------------


def test_config_becomes_the_models_at_construction_and_of_each_new_model(tmp_path: Path) -> None:
    config = Config(max_length=7)
    trainer = make(tmp_path, generation_config=config, predict_with_generate=False)
    assert trainer.model.generation_config is config
    assert trainer.args.to_dict()["generation_config"] == {"max_length": 7}
    args = arguments(tmp_path, generation_config=config, max_steps=1)
    again = Seq2SeqTrainer(args=args, model_init=Echo, train_dataset=samples())
    first = again.model
    again.train()
    assert again.model is not first
    assert again.model.generation_config is config


@pytest.mark.parametrize(("given", "message"), [(5, "int is no"), ({"max_length": 5}, "dict is no")])
def test_what_is_no_config_is_refused(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, generation_config=given)


def test_config_that_no_model_reads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no attribute generation_config"):
        Seq2SeqTrainer(Net(), arguments(tmp_path, generation_config=Config(), predict_with_generate=False))


@pytest.mark.skipif(is_available("transformers"), reason="transformers is installed; tests/interop loads with it")
@pytest.mark.parametrize("kind", [str, Path])
def test_loading_a_config_needs_transformers(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(MissingDependencyError, match=r"generation_config=.*transformers"):
        make(tmp_path, generation_config=kind(tmp_path))


# -- what is refused or warned of ------------------------------------------------------------------------------------


def test_task_that_evaluates_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"with Task\. .*evaluation_step"):
        make(tmp_path, Task())
    assert "eval_loss" in make(tmp_path, Task(), predict_with_generate=False).evaluate(make_rows(3))


def test_model_without_generate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="Net has no method generate"):
        make(tmp_path, Net())


def test_settings_that_generate_does_not_take_are_refused(tmp_path: Path) -> None:
    for options in ({"generation_max_length": 3}, {"generation_num_beams": 2}):
        with pytest.raises(ConfigError, match=r"Plain\.generate takes no such argument"):
            make(tmp_path, Plain(), **options)
    trainer = make(tmp_path, Plain())
    with pytest.raises(ConfigError, match=r"Cannot generate with .*top_k, top_p"):
        trainer.predict(samples(), top_k=1, top_p=0.1)
    with pytest.raises(Exception, match="launch"):
        _ = trainer.strategy.device


def test_memory_of_recurrent_models_is_refused(tmp_path: Path) -> None:
    class Recurrent(Echo):
        def forward(self, input_ids: torch.Tensor, labels: Any = None, mems: Any = None) -> Any:  # type: ignore[override]
            return super().forward(input_ids, labels)

    with pytest.raises(ConfigError, match="past_index=1"):
        make(tmp_path, Recurrent(), past_index=1)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("options", [{"fsdp": "full_shard"}, {"sharded_ddp": "simple"}, {"sharded_ddp": "zero_dp_3"}])
def test_fsdp_and_sharded_ddp_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="calls the model once a token"):
        make(tmp_path, **options)


def test_settings_without_effect_are_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="generation_num_beams has no effect without"):
        trainer = make(tmp_path, generation_num_beams=2, predict_with_generate=False)
    with pytest.warns(UserWarning, match=r"without predict_with_generate=True: max_length\."):
        trainer.evaluate(samples(), max_length=5)
    with pytest.warns(UserWarning, match=r"without compute_metrics: top_k\."):
        make(tmp_path).evaluate(samples(), top_k=5)
    with pytest.warns(UserWarning, match="no effect in Trainer; use Seq2SeqTrainer"):
        Trainer(Echo(), arguments(tmp_path))


def test_it_takes_what_the_trainer_takes(tmp_path: Path) -> None:
    chosen = (torch.optim.SGD, {"lr": 0.5})
    rows = samples()
    trainer = Seq2SeqTrainer(
        Echo(), arguments(tmp_path, max_steps=1), None, rows, rows, Tool(), None, None, None, None, (None, None), None,
        optimizer_cls_and_kwargs=chosen, precision="bf16", strategy="single",
    )  # fmt: skip
    trainer.train()
    assert type(trainer.optimizer).__name__ == "SGD"
    assert (trainer.precision.policy.name, trainer.strategy.name) == ("bf16", "single")
    with pytest.raises(TypeError, match="unknown"):
        Seq2SeqTrainer(Echo(), arguments(tmp_path), unknown=1)
