"""What scripts do with arguments and Trainers around the documented calls."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support.tiny import Net, make_arguments, make_rows

from hftrain import Trainer, TrainerCallback, TrainingArguments


@dataclass
class OwnArguments(TrainingArguments):
    """Arguments with fields of a script's own."""

    margin: float = 0.5
    tags: list[str] = field(default_factory=list)


def own(folder: Path, **options: Any) -> OwnArguments:
    return make_arguments(folder, arguments=OwnArguments, max_steps=2, **options)  # type: ignore[no-any-return]


def make(folder: Path, **options: Any) -> Trainer:
    torch.manual_seed(5)
    options = {"max_steps": 4, **options}
    return Trainer(Net(), make_arguments(folder, **options), train_dataset=make_rows(), eval_dataset=make_rows(5))


def test_arguments_are_pickled_copied_and_replaced(tmp_path: Path) -> None:
    trainer = Trainer(Net(), own(tmp_path, margin=0.25, tags=["a"]), train_dataset=make_rows())
    trainer.train()
    for again in (
        pickle.loads(pickle.dumps(trainer.args)),
        copy.deepcopy(trainer.args),
        dataclasses.replace(trainer.args),
    ):
        assert again.to_dict() == trainer.args.to_dict()
        assert (again.margin, again.tags) == (0.25, ["a"])
        Trainer(Net(), again, train_dataset=make_rows()).train()
    changed = dataclasses.replace(trainer.args, learning_rate=1e-4, margin=0.75)
    assert (changed.learning_rate, changed.margin, trainer.args.margin) == (1e-4, 0.75, 0.25)


def test_another_trainer_trains_inside_a_callback(tmp_path: Path) -> None:
    class TrainsAnother(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert make(tmp_path, max_steps=1).train().global_step == 1

    trainer = make(tmp_path, max_steps=-1, num_train_epochs=1)
    trainer.add_callback(TrainsAnother)
    assert trainer.train().global_step == 6


def test_optimizer_is_made_of_the_model_that_the_strategy_has_prepared(tmp_path: Path) -> None:
    from hftrain.strategies.single import SingleDeviceStrategy

    order: list[str] = []

    class Watched(SingleDeviceStrategy):
        def place(self, model: Any) -> Any:
            order.append("place")
            return super().place(model)

    class Watches(Trainer):
        def create_optimizer(self) -> Any:
            order.append("create_optimizer")
            return super().create_optimizer()

    arguments = make_arguments(tmp_path, max_steps=1)
    Watches(Net(), arguments, train_dataset=make_rows(), strategy=Watched(use_cpu=True)).train()
    assert order == ["place", "create_optimizer"]


def test_facts_of_optimizer_and_model(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.model.layers[0].requires_grad_(False)  # type: ignore[index]
    made = trainer.create_optimizer()
    assert trainer.create_optimizer() is made
    assert trainer.get_learning_rates() == [1e-2, 1e-2]
    assert trainer.get_num_trainable_parameters() == sum(p.numel() for p in trainer.model.parameters()) - 40
    bias = trainer.model.layers[4].bias  # type: ignore[index]
    group = trainer.get_optimizer_group("layers.4.bias")
    assert any(member is bias for member in group["params"])
    assert trainer.get_optimizer_group(bias) is group
    assert len(trainer.get_optimizer_group()) == 2
    assert trainer.get_decay_parameter_names(trainer.model) == ["layers.0.weight", "layers.4.weight"]
    kind, options = Trainer.get_optimizer_cls_and_kwargs(trainer.args)
    assert kind is torch.optim.AdamW
    assert options["lr"] == 1e-2
    schedule = trainer.create_scheduler(10, optimizer=made)
    assert schedule is trainer.lr_scheduler


def test_results_unpack_as_documented(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    step, loss, metrics = trainer.train()
    assert (step, loss) == (4, metrics["train_loss"])
    predictions, label_ids, metrics = trainer.predict(make_rows(3))
    assert (predictions.shape, label_ids.shape) == ((3, 3), (3,))
    assert all(name.startswith("test_") for name in metrics)
    output = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation")
    assert output.num_samples == 5
    assert "eval_loss" in output.metrics
