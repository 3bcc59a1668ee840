from __future__ import annotations

import pytest

from hftrain import TrainingArguments
from hftrain.extras.hub.trainer_hub import listed_hyperparameters


def test_set_push_to_hub_takes_every_setting() -> None:
    args = TrainingArguments("out").set_push_to_hub(
        "me/model", strategy="checkpoint", token="secret", private_repo=True, always_push=True, revision="exp"
    )
    assert args.push_to_hub
    assert (args.hub_model_id, str(args.hub_strategy), args.hub_private_repo) == ("me/model", "checkpoint", True)
    assert (args.hub_token, args.hub_always_push, args.hub_revision) == ("secret", True, "exp")
    assert "secret" not in repr(args)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("given", "model_id"),
    [
        ({"push_to_hub_model_id": "name"}, "name"),
        ({"push_to_hub_model_id": "name", "push_to_hub_organization": "lab"}, "lab/name"),
        ({"push_to_hub_organization": "lab"}, "lab/out"),
    ],
)
def test_older_names_are_known(given: dict[str, str], model_id: str) -> None:
    args = TrainingArguments("out", push_to_hub_token="secret", **given)  # type: ignore[arg-type]
    assert (args.hub_model_id, args.hub_token) == (model_id, "secret")


def test_told_hyperparameters_hold_no_secret_and_the_length() -> None:
    told = listed_hyperparameters(TrainingArguments("out", hub_token="secret", max_steps=5, warmup_steps=2))
    assert (told["learning_rate"], told["max_grad_norm"]) == (5e-5, 1.0)
    assert (told["max_steps"], told["warmup_steps"]) == (5, 2)
    assert "num_train_epochs" not in told
    assert "secret" not in str(told)
    assert listed_hyperparameters(TrainingArguments("out"))["num_train_epochs"] == 3
