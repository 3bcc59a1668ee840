from __future__ import annotations

from pathlib import Path

import pytest

from hftrain.adapter.configs import hub_config, told_hyperparameters
from hftrain.arguments import TrainingArguments


def test_hub_config_takes_every_setting(tmp_path: Path) -> None:
    args = TrainingArguments("out").set_push_to_hub(
        "me/model", strategy="checkpoint", token="secret", private_repo=True, always_push=True, revision="exp"
    )
    config = hub_config(args, output_dir=tmp_path)
    assert args.push_to_hub
    assert (config.model_id, config.strategy, config.private) == ("me/model", "checkpoint", True)
    assert (config.token, config.always_push, config.revision) == ("secret", True, "exp")
    assert config.output_dir == tmp_path
    assert "secret" not in repr(config)


def test_hub_config_names_the_repository_like_the_folder(tmp_path: Path) -> None:
    config = hub_config(TrainingArguments("out"), output_dir=tmp_path / "x" / ".." / "my-model")
    assert (config.model_id, config.private, config.revision, config.always_push) == ("my-model", None, None, False)
    assert config.strategy == "every_save"


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("given", "model_id"),
    [
        ({"push_to_hub_model_id": "name"}, "name"),
        ({"push_to_hub_model_id": "name", "push_to_hub_organization": "lab"}, "lab/name"),
        ({"push_to_hub_organization": "lab"}, "lab/out"),
    ],
)
def test_hub_config_knows_the_older_names(tmp_path: Path, given: dict[str, str], model_id: str) -> None:
    args = TrainingArguments("out", push_to_hub_token="secret", **given)  # type: ignore[arg-type]
    config = hub_config(args, output_dir=tmp_path / "out")
    assert (config.model_id, config.token) == (model_id, "secret")


def test_told_hyperparameters_hold_no_secret_and_the_length() -> None:
    told = told_hyperparameters(TrainingArguments("out", hub_token="secret", max_steps=5, warmup_steps=2))
    assert (told["learning_rate"], told["max_grad_norm"]) == (5e-5, 1.0)
    assert (told["max_steps"], told["warmup_steps"]) == (5, 2)
    assert "num_train_epochs" not in told
    assert "secret" not in str(told)
    assert told_hyperparameters(TrainingArguments("out"))["num_train_epochs"] == 3
