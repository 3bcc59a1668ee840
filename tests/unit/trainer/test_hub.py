"""Pushes of a Trainer to a Hub on the loopback."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support import writes
from support.hub_server import HubServer
from support.tiny import Net, Task, at, make_arguments, make_rows, train

from hftrain import ConfigError, MissingDependencyError, SavePolicy, Trainer, TrainerCallback
from hftrain.checkpoint.manifest import verify
from hftrain.extras.hub import uploads
from hftrain.extras.hub.files import drop_abandoned

# huggingface_hub's own upload of large files.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

MODEL = {"README.md", "model.safetensors", "training_args.bin"}
RESUME = {"manifest.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"}
RESUME |= {"training_args.bin"}


class Tagged(Net):
    """A model that brings tags of its own."""

    model_tags = ("theirs",)


class Wait(TrainerCallback):
    """Let each step wait until no push is running, so that none is skipped."""

    trainer: Trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.push_in_progress is not None:
            self.trainer.push_in_progress.exception()


def make_trainer(folder: Path, model: Any = None, *, waits: bool = True, **options: Any) -> Trainer:
    defaults = {"push_to_hub": True, "save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    args = make_arguments(folder, **{**defaults, **options})
    callback = Wait()
    trainer = Trainer(model or Net(), args, train_dataset=make_rows(), callbacks=[callback] if waits else [])
    callback.trainer = trainer
    return trainer


def under(hub: HubServer, name: str) -> set[str]:
    return {path.removeprefix(f"{name}/") for path in hub.repo.files if path.startswith(f"{name}/")}


def top(hub: HubServer) -> set[str]:
    return {path for path in hub.repo.files if "/" not in path}


PROGRESS = [f"Training in progress, step {step}" for step in (2, 4, 6)]


def test_strategy_end_pushes_the_final_model_only(hub: HubServer, tmp_path: Path) -> None:
    make_trainer(tmp_path / "mine", hub_strategy="end").train()
    assert hub.messages == ["End of training"]
    assert hub.repo.files.keys() == MODEL


def test_push_waits_for_what_is_being_written(hub: HubServer, tmp_path: Path, monkeypatch: Any) -> None:
    gate = writes.Gate(monkeypatch)
    steps = writes.At(2, do={3: lambda: (gate.opened.set(), trainer.push_to_hub("mine"))})
    trainer = writes.make_trainer(tmp_path, steps, policy=SavePolicy(save_async=True), push_to_hub=True)
    trainer.train()
    assert hub.messages[:2] == [PROGRESS[0], "mine"]


def test_strategy_every_save_pushes_the_model_and_no_optimizer(hub: HubServer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "mine")
    trainer.train()
    assert hub.messages == [*PROGRESS, "End of training"]
    assert hub.repo.files.keys() == MODEL
    for name in ("model.safetensors", "README.md", "training_args.bin"):
        assert hub.repo.files[name] == (tmp_path / "mine" / name).read_bytes()


def test_push_of_a_save_brings_that_saves_files(hub: HubServer, tmp_path: Path) -> None:
    seen: dict[str, bytes] = {}

    class Keep(Wait):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_step_end(args, state, control)
            seen.update({f"{state.global_step}": hub.repo.files.get("model.safetensors", b"")})

    trainer = make_trainer(tmp_path / "mine", waits=False)
    callback = Keep()
    callback.trainer = trainer
    trainer.add_callback(callback)
    trainer.train()
    # The save of step 2 comes after the callback of step 2.
    assert seen["3"] == (tmp_path / "mine/checkpoint-2/model.safetensors").read_bytes()
    assert seen["5"] == (tmp_path / "mine/checkpoint-4/model.safetensors").read_bytes()


def test_strategy_checkpoint_keeps_the_newest_to_resume_from(hub: HubServer, tmp_path: Path) -> None:
    make_trainer(tmp_path / "mine", hub_strategy="checkpoint").train()
    assert top(hub) == MODEL
    assert under(hub, "last-checkpoint") == RESUME
    for name in RESUME:
        assert hub.repo.files[f"last-checkpoint/{name}"] == (tmp_path / "mine/checkpoint-6" / name).read_bytes()


def test_override_of_the_push_is_called_with_each_checkpoint(hub: HubServer, tmp_path: Path) -> None:
    class Adding(Trainer):
        def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
            assert self.push_in_progress is None or self.push_in_progress.is_done()
            pushed.append(Path(checkpoint_folder).name)
            super()._push_from_checkpoint(checkpoint_folder)

    pushed: list[str] = []
    args = make_arguments(tmp_path / "mine", push_to_hub=True, save_strategy="steps", save_steps=2, max_steps=6)
    callback = Wait()
    callback.trainer = Adding(Net(), args, train_dataset=make_rows(), callbacks=[callback])
    callback.trainer.train()
    assert pushed == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert hub.messages == [*PROGRESS, "End of training"]


def test_strategy_checkpoint_deletes_what_the_newest_no_longer_has(hub: HubServer, tmp_path: Path) -> None:
    make_trainer(tmp_path / "mine", hub_strategy="checkpoint").init_hf_repo()
    hub.repo.files.update({"last-checkpoint/model-00001-of-00002.safetensors": b"old", "notes.txt": b"stays"})
    make_trainer(tmp_path / "mine", hub_strategy="checkpoint").train()
    assert under(hub, "last-checkpoint") == RESUME
    assert hub.repo.files["notes.txt"] == b"stays"


@pytest.mark.parametrize("limit", [None, 1])
def test_strategy_all_checkpoints_pushes_each_whatever_rotation_does(
    hub: HubServer, tmp_path: Path, limit: int | None
) -> None:
    hub.gate.clear()

    open = at("on_train_end", lambda args, state, control, **kwargs: hub.gate.set())
    trainer = make_trainer(tmp_path / "mine", hub_strategy="all_checkpoints", save_total_limit=limit, waits=False)
    trainer.add_callback(open)
    trainer.train()
    for step in (2, 4, 6):
        assert under(hub, f"checkpoint-{step}") == RESUME
    assert top(hub) == MODEL
    here = sorted(path.name for path in (tmp_path / "mine").glob("*checkpoint-*"))
    assert here == (["checkpoint-6"] if limit else ["checkpoint-2", "checkpoint-4", "checkpoint-6"])


@pytest.mark.parametrize("always", [False, True])
def test_push_is_skipped_while_one_runs_unless_always(hub: HubServer, tmp_path: Path, always: bool) -> None:
    hub.gate.clear()

    class Open(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert not trainer.push_in_progress.done()
            hub.gate.set()

    trainer = make_trainer(
        tmp_path / "mine", hub_always_push=always, hub_strategy="checkpoint", save_total_limit=1, waits=False
    )
    trainer.add_callback(Open())
    trainer.train()
    assert hub.messages == [*(PROGRESS if always else PROGRESS[:1]), "End of training"]
    # What a skipped push left out comes with the last one.
    assert (
        hub.repo.files["last-checkpoint/trainer_state.json"]
        == (tmp_path / "mine/checkpoint-6/trainer_state.json").read_bytes()
    )
    assert trainer.push_in_progress.done()
    assert [path.name for path in (tmp_path / "mine").glob(".*")] == []


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint", "all_checkpoints"])
def test_hub_that_fails_in_the_middle_costs_no_training(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, strategy: str
) -> None:
    class Break(Wait):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            hub.failing = {"/commit/": 500} if state.global_step < 4 else {}

    trainer = make_trainer(tmp_path / "mine", hub_strategy=strategy, waits=False)
    callback = Break()
    callback.trainer = trainer
    trainer.add_callback(callback)
    with caplog.at_level(logging.WARNING):
        assert trainer.train().global_step == 6
    assert "Could not push 'Training in progress, step 2'" in caplog.text
    assert "1 of 4 pushes" in caplog.text
    assert hub.messages == [*PROGRESS[1:], "End of training"]
    if strategy == "all_checkpoints":
        assert under(hub, "checkpoint-2") == RESUME


def test_hub_that_fails_to_the_end_costs_no_training(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path / "mine")
    hub.failing = {"/commit/": 500}
    with caplog.at_level(logging.WARNING):
        assert trainer.train().global_step == 6
        trainer.save_model()
    for said in ("Could not push 'End of training'", "4 of 4 pushes", "Nothing is lost", "Could not push 'Model save'"):
        assert said in caplog.text
    assert (tmp_path / "mine/model.safetensors").exists()
    verify(tmp_path / "mine/checkpoint-6")
    hub.failing = {}
    trainer.push_to_hub()
    assert hub.messages == ["End of training"]


def test_push_to_hub_by_the_user_raises_when_it_fails(hub: HubServer, tmp_path: Path) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    trainer = make_trainer(tmp_path / "mine")
    hub.failing = {"/commit/": 500}
    with pytest.raises(HfHubHTTPError):
        trainer.push_to_hub()
    future = trainer.push_to_hub(blocking=False)
    assert isinstance(future.exception(), HfHubHTTPError)


def test_hub_that_is_down_at_the_start_is_tried_again(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.failing = {"/repos/create": 503}
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(tmp_path / "mine")
    assert "cannot be reached" in caplog.text
    assert trainer.hub_model_id is None
    hub.failing = {}
    trainer.train()
    assert trainer.hub_model_id == "alice/mine"
    assert hub.messages[-1] == "End of training"


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"hub_token": "hf_nobody"}, "hub_token"),
        ({"hub_model_id": "theirs/mine"}, "theirs/mine"),
        ({"hub_model_id": "no such name!"}, "no such name!"),
    ],
)
def test_hub_that_refuses_raises_at_construction(
    hub: HubServer, tmp_path: Path, options: dict[str, Any], shown: str
) -> None:
    with pytest.raises(ConfigError, match=shown) as caught:
        make_trainer(tmp_path / "mine", **options)
    assert "hf_nobody" not in str(caught.value)
    assert hub.repos == {}


def test_missing_package_raises_at_construction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Stands in for an environment without it; accelerate brings some version along.
    monkeypatch.setattr(uploads, "REQUIREMENT", "huggingface_hub>=999")
    with pytest.raises(MissingDependencyError, match=r"pip install 'hftrain\[hub\]'"):
        make_trainer(tmp_path)
    trainer = make_trainer(tmp_path, push_to_hub=False)
    for verb in (trainer.push_to_hub, trainer.create_model_card, trainer.init_hf_repo):
        with pytest.raises(MissingDependencyError):
            verb()


@pytest.mark.parametrize(
    ("model_id", "full"),
    [(None, "alice/mine"), ("other", "alice/other"), ("alice/third", "alice/third"), ("lab/fourth", "lab/fourth")],
)
def test_repository_names(hub: HubServer, tmp_path: Path, model_id: str | None, full: str) -> None:
    trainer = make_trainer(tmp_path / "mine", hub_model_id=model_id)
    assert trainer.hub_model_id == full
    assert list(hub.repos) == [full]
    assert (tmp_path / "mine").is_dir()
    # An existing one is used as it is.
    assert make_trainer(tmp_path / "mine", hub_model_id=model_id, hub_private_repo=True).hub_model_id == full
    assert list(hub.repos) == [full]
    assert not is_private(hub)


def is_private(hub: HubServer) -> bool:
    settings = hub.repo.settings
    # From 1.33 on huggingface_hub says visibility.
    return settings.get("visibility") == "private" or settings.get("private") is True


@pytest.mark.parametrize("private", [None, True, False])
def test_repository_is_private_if_asked_for(hub: HubServer, tmp_path: Path, private: bool | None) -> None:
    make_trainer(tmp_path / "mine", hub_private_repo=private)
    assert is_private(hub) is (private is True)
    if private is None:
        assert not {"visibility", "private"} & hub.repo.settings.keys()


def test_token_goes_to_the_hub_and_nowhere_else(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "hftrain"):
        trainer = make_trainer(tmp_path / "mine", hub_token="hf_bob", hub_strategy="all_checkpoints")
        hub.failing = {"/commit/": 500}
        trainer.save_model()
        hub.failing = {}
        trainer.train()
    assert list(hub.repos) == ["bob/mine"]
    assert {commit.token for commit in hub.repo.commits} == {"hf_bob"}
    contents = [*hub.repo.files.values(), *(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())]
    assert contents
    assert not any(b"hf_bob" in content for content in contents)
    assert "hf_bob" not in caplog.text + repr(trainer.args)


def test_push_to_hub_takes_token_and_revision_for_once(hub: HubServer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "mine", hub_revision="exp")
    trainer.push_to_hub("one")
    trainer.push_to_hub("two", token="hf_bob", revision="other")
    assert [(c.message, c.branch, c.token) for c in hub.repo.commits] == [
        ("one", "exp", "hf_alice"),
        ("two", "other", "hf_bob"),
    ]
    assert hub.repo.files == {}


def test_push_to_hub_works_without_the_argument(hub: HubServer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "mine", push_to_hub=False)
    trainer.train()
    assert (hub.requests, trainer.hub_model_id, trainer.push_in_progress) == ([], None, None)
    assert "huggingface.co" not in str(trainer.push_to_hub())
    assert hub.messages == ["End of training"]
    assert trainer.hub_model_id == "alice/mine"
    assert hub.repo.files.keys() == MODEL


def test_push_to_hub_returns_commit_or_future(hub: HubServer, tmp_path: Path) -> None:
    from huggingface_hub import CommitInfo

    trainer = make_trainer(tmp_path / "mine")
    commit = trainer.push_to_hub("one")
    assert isinstance(commit, CommitInfo)
    assert commit.commit_message == "one"
    hub.gate.clear()
    future = trainer.push_to_hub("two", blocking=False)
    assert future is trainer.push_in_progress
    assert not future.done()
    hub.gate.set()
    assert future.result(30).commit_message == "two"


@pytest.mark.skipif(sys.platform == "win32", reason="folders cannot be locked there")
def test_push_that_runs_keeps_its_snapshot_although_the_clock_jumps(hub: HubServer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    hub.gate.clear()
    future = trainer.push_to_hub("one", blocking=False)
    (snapshot,) = tmp_path.glob(".staging-*-hub")
    os.utime(snapshot, (0, 0))
    drop_abandoned(tmp_path)  # as another Trainer's first push does
    assert (snapshot / "model.safetensors").is_file()
    hub.gate.set()
    assert future.result(30).commit_message == "one"
    assert not snapshot.exists()


def test_push_to_hub_merges_tags_of_model_card_and_call(hub: HubServer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "mine", Tagged())
    (tmp_path / "mine/README.md").write_text("---\ntags:\n- old\n---\nWords.\n", encoding="utf-8")
    trainer.push_to_hub(tags="mine", language="en", dataset="Iris")
    card = hub.repo.files["README.md"].decode()
    for tag in ("old", "theirs", "mine", "generated_from_trainer"):
        assert f"- {tag}\n" in card
    assert "language: en" in card
    assert "on Iris" in card
    assert "Words." in card


def test_save_model_by_the_user_pushes_the_model(hub: HubServer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "mine", hub_strategy="end")
    trainer.save_model()
    trainer.save_model(str(tmp_path / "elsewhere"))
    assert hub.messages == ["Model save", "Model save"]
    assert hub.repo.files.keys() == MODEL
    assert {path.name for path in (tmp_path / "elsewhere").iterdir()} == MODEL - {"README.md"}


def test_push_calls_the_overrides_of_a_subclass(hub: HubServer, tmp_path: Path) -> None:
    class Own(Trainer):
        def create_model_card(self, *args: Any, **kwargs: Any) -> None:
            (self.output_dir / "README.md").write_text("Own.", encoding="utf-8")

        def _save(self, output_dir: str, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            (Path(output_dir) / "extra.json").write_text("{}", encoding="utf-8")

    args = make_arguments(tmp_path / "mine", push_to_hub=True, save_strategy="steps", save_steps=2, max_steps=2)
    Own(Task(), args, train_dataset=make_rows()).train()
    assert hub.repo.files["README.md"] == b"Own."
    assert "extra.json" in hub.repo.commits[0].added


def test_card_that_cannot_be_written_costs_no_training(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path / "mine")
    (tmp_path / "mine/README.md").write_text("---\n- a list\n---\n", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        assert trainer.train().global_step == 6
    assert "should be a dict" in caplog.text


def test_hub_run_deletes_nothing(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    for name in (".git/config", "checkpoint-9/model.safetensors", "notes.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine", encoding="utf-8")
    trainer = make_trainer(folder, overwrite_output_dir=True)
    trainer.train()
    for name in (".git/config", "checkpoint-9/model.safetensors", "notes.txt"):
        assert (folder / name).read_text() == "mine"
    assert hub.repo.files.keys() == {*MODEL, "notes.txt"}
    with pytest.raises(AttributeError, match="init_hf_repo"):
        trainer.init_git_repo(at_init=True)


def test_init_hf_repo_takes_a_token(hub: HubServer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "mine", push_to_hub=False)
    trainer.init_hf_repo(token="hf_bob")
    assert (trainer.hub_model_id, list(hub.repos)) == ("bob/mine", ["bob/mine"])


def test_progress_bars_are_hidden_while_a_save_is_pushed(hub: HubServer, tmp_path: Path) -> None:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled

    assert not are_progress_bars_disabled()
    hub.gate.clear()
    trainer = make_trainer(tmp_path / "mine", waits=False, max_steps=2)
    seen: list[bool] = []

    class Look(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert hub.arrived.acquire(timeout=30)
            seen.append(are_progress_bars_disabled())
            hub.gate.set()

    trainer.add_callback(Look())
    trainer.train()
    assert seen == [True]
    assert not are_progress_bars_disabled()


def test_create_model_card_tells_of_the_run(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    trainer = train(tmp_path / "mine", eval_dataset=make_rows(5), eval_strategy="epoch")
    trainer.create_model_card(license="mit", model_name="My model", tasks="text-classification", dataset="Iris")
    card = (tmp_path / "mine/README.md").read_text("utf-8")
    for said in (
        "license: mit",
        "# My model",
        "- learning_rate: 0.01",
        "- seed: 42",
        "| training loss | epoch |",
        "Iris",
    ):
        assert said in card
    assert "total_train_batch_size: 4" in card


def test_create_model_card_asks_the_base_model_for_its_license(hub: HubServer, tmp_path: Path) -> None:
    hub.pages["org/base"] = {"license": "apache-2.0"}
    trainer = make_trainer(tmp_path / "mine", push_to_hub=False)
    trainer.create_model_card(finetuned_from="org/base")
    card = (tmp_path / "mine/README.md").read_text("utf-8")
    assert "license: apache-2.0" in card
    assert "base_model: org/base" in card
    trainer.create_model_card(finetuned_from="org/unknown", license=None)
    assert "base_model: org/unknown" in (tmp_path / "mine/README.md").read_text("utf-8")


def test_create_model_card_lets_an_adapter_add_its_own(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")

    class Adapter(Net):
        # Stands in for PEFT's model, which has this method.
        def create_or_update_model_card(self, output_dir: str) -> None:
            path = Path(output_dir) / "README.md"
            path.write_text(path.read_text("utf-8") + "\nAdapter.\n", encoding="utf-8")

    make_trainer(tmp_path, Adapter(), push_to_hub=False).create_model_card()
    assert "Adapter." in (tmp_path / "README.md").read_text("utf-8")
