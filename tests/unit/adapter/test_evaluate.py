"""What an evaluation keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny import make_arguments

from hftrain.loops.evaluate import EvaluateConfig


def test_evaluation_follows_the_arguments(tmp_path: Path) -> None:
    arguments = make_arguments(
        tmp_path, eval_accumulation_steps=3, eval_do_concat_batches=False, include_for_metrics=["inputs", "loss"]
    )
    assert EvaluateConfig.of(arguments, keeps_predictions=True, input_name="x") == EvaluateConfig(
        keeps_predictions=True, moves_every=3, joins_batches=False, includes=("inputs", "loss"), input_name="x"
    )


def test_defaults_are_those_of_the_loop(tmp_path: Path) -> None:
    config = EvaluateConfig.of(make_arguments(tmp_path), keeps_predictions=False, input_name="input_ids")
    assert config == EvaluateConfig()


@pytest.mark.parametrize("keeps", [False, True])
def test_metrics_batch_by_batch_keep_nothing(tmp_path: Path, keeps: bool) -> None:
    arguments = make_arguments(tmp_path, batch_eval_metrics=True)
    config = EvaluateConfig.of(arguments, keeps_predictions=keeps, input_name="x")
    assert config.computes_per_batch
    assert not config.keeps_predictions
