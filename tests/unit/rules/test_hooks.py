"""Hooks that nothing calls, and names that are taken, are refused when a subclass is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.source import ROOT
from support.tiny import Net, make_arguments, make_rows

from hftrain import ConfigError, Seq2SeqTrainer, Trainer
from hftrain.core.elsewhere import names_elsewhere
from hftrain.core.signatures import call_with
from hftrain.rules.constructor import HELPERS

DOCUMENTED, NEWER = names_elsewhere("trainer_hooks"), names_elsewhere("newer_trainer_hooks")
UNCALLED = [name for name in DOCUMENTED if not hasattr(Trainer, name)]


RECORDED = json.loads((ROOT / "tests/documented/trainer_methods.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("version", RECORDED)
def test_every_method_of_a_recorded_trainer_is_ours_or_has_a_remedy(version: str) -> None:
    known = {*DOCUMENTED, *NEWER, *dir(Trainer), *dir(Seq2SeqTrainer)}
    assert [name for name in RECORDED[version] if name not in known] == []


def test_names_with_a_remedy_are_those_of_some_version() -> None:
    recorded = {name for names in RECORDED.values() for name in names}
    older = {"_gather_and_numpify", "_save_scaler", "_save_tpu", "_sorted_checkpoints", "_load_scaler"}
    older |= {"init_git_repo", "ipex_optimize_model", "torchdynamo_smart_context_manager"}
    assert [name for name in (*DOCUMENTED, *NEWER) if name not in recorded | older] == []


def test_inner_loop_is_among_them() -> None:
    assert "_inner_training_loop" in UNCALLED


def test_mixin_behind_the_trainer_is_looked_at_too(tmp_path: Path) -> None:
    class Mixin:
        def _inner_training_loop(self) -> None: ...

    class Mine(Trainer, Mixin): ...

    with pytest.raises(ConfigError, match="override training_step"):
        Mine(Net(), make_arguments(tmp_path))


class SetsBefore(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._session = "sft"
        super().__init__(*args, **kwargs)


TAKEN = [type("Takes", (Trainer,), {name: lambda *_: None}) for name in ("_make_callbacks", "_session")]


@pytest.mark.parametrize("kind", [*TAKEN, SetsBefore])
def test_names_that_are_taken_are_refused(tmp_path: Path, kind: type[Trainer]) -> None:
    with pytest.raises(ConfigError, match="Choose another name"):
        kind(Net(), make_arguments(tmp_path))


class Free(Trainer):
    _tag_names = ("mine",)
    _signature_columns = ["x", "labels"]  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._metrics: dict[str, float] = {}
        super().__init__(*args, **kwargs)
        self._tag_names = ("mine", "too")

    def _prepare_dataset(self) -> None: ...


def test_names_of_a_subclass_of_its_own_pass(tmp_path: Path) -> None:
    trainer = Free(Net(), make_arguments(tmp_path))
    assert trainer._signature_columns == ["x", "labels"]


VALUES = {"loss": 1, "norm": 2, "epoch": 3}


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (lambda loss, norm, epoch: (loss, norm, epoch), (1, 2, 3)),
        (lambda loss, epoch: (loss, epoch), (1, 3)),
        (lambda loss, epoch=None: (loss, epoch), (1, 3)),
        (lambda *args: args, (1, 2, 3)),
        (lambda loss, **rest: (loss, rest), (1, {"norm": 2, "epoch": 3})),
        (lambda a, b: (a, b), (1, 2)),
        (lambda: (), ()),
    ],
)
def test_hook_of_any_generation_gets_what_it_names(hook: Any, expected: Any) -> None:
    assert call_with(hook, VALUES) == expected


@pytest.mark.parametrize(
    "hook",
    ["_running_session", "_save_checkpoint", "_rotate_checkpoints", "_load_best_model", "_maybe_log_save_evaluate"],
)
def test_hook_of_a_running_training_is_refused_outside_of_one(tmp_path: Path, hook: str) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path), train_dataset=make_rows())
    arguments = {"_running_session": ["it"], "_save_checkpoint": [trainer.model]}
    with pytest.raises(ConfigError, match="while train"):
        getattr(trainer, hook)(*arguments.get(hook, []))


def test_methods_of_downstream_trainers_do_not_collide(tmp_path: Path) -> None:
    class Downstream(Trainer):
        """Has methods under names that trainers for preferences and rewards use."""

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return model(**inputs)[0]

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            return self._compute_loss(model, inputs)

        def _training_step(self) -> None: ...

        def _get_batch_samples(self) -> None: ...

        def _log(self) -> None: ...

    assert Downstream(Net(), make_arguments(tmp_path, max_steps=2), train_dataset=make_rows()).train().global_step == 2


def test_what_a_trainer_calls_needs_no_remedy() -> None:
    assert {name for name, remedy in DOCUMENTED.items() if remedy and hasattr(Trainer, name)} == HELPERS


@pytest.mark.parametrize("name", ["_inner_training_loop", "_run_epoch", "_save_scaler"])
def test_hook_that_is_assigned_to_the_trainer_itself_is_refused_if_nothing_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(Trainer, name, lambda self, *args, **kwargs: None, raising=False)
    for kind in (Trainer, Seq2SeqTrainer, type("Mine", (Trainer,), {})):
        with pytest.raises(ConfigError, match=f"{kind.__name__} defines {name}"):
            kind(Net(), make_arguments(tmp_path))


def test_hook_that_is_assigned_to_the_trainer_itself_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries replace `Trainer.get_train_dataloader` and others without a subclass."""
    given = Trainer(Net(), make_arguments(tmp_path), train_dataset=make_rows()).get_train_dataloader()
    monkeypatch.setattr(Trainer, "get_train_dataloader", lambda self: given)
    trainer = Trainer(Net(), make_arguments(tmp_path, max_steps=2))
    assert trainer._trainer_hooks.is_overridden("get_train_dataloader")
    trainer.train()
    assert trainer.state.global_step == 2
