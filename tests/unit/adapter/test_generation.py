from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hftrain.extras.seq2seq.generating import limited
from hftrain.extras.seq2seq.trainer import generation_options

LIMITED = SimpleNamespace(max_new_tokens=50)


@pytest.mark.parametrize(
    ("settings", "given", "config", "expected"),
    [
        ((None, None), {}, None, {}),
        ((7, 3), {}, None, {"max_length": 7, "num_beams": 3}),
        ((7, 3), {"max_length": 9, "num_beams": 1}, None, {"max_length": 9, "num_beams": 1}),
        ((7, 3), {"max_length": None, "num_beams": None}, None, {"max_length": 7, "num_beams": 3}),
        ((7, None), {"max_new_tokens": 4}, None, {"max_new_tokens": 4}),
        ((7, None), {"do_sample": False}, None, {"max_length": 7, "do_sample": False}),
        # The config's own limit would win over max_length otherwise.
        ((7, None), {}, LIMITED, {"max_length": 7, "max_new_tokens": None}),
        ((None, None), {"max_length": 9}, LIMITED, {"max_length": 9, "max_new_tokens": None}),
        ((None, None), {"max_length": 9, "max_new_tokens": 4}, LIMITED, {"max_length": 9, "max_new_tokens": 4}),
        ((None, 2), {}, LIMITED, {"num_beams": 2}),
    ],
)
def test_what_is_nearer_to_the_call_wins(settings: Any, given: Any, config: Any, expected: Any) -> None:
    args = SimpleNamespace(generation_max_length=settings[0], generation_num_beams=settings[1])
    assert limited(generation_options(args, given), config) == expected


def test_config_of_a_call_replaces_what_the_arguments_say() -> None:
    args = SimpleNamespace(generation_max_length=7, generation_num_beams=3)
    assert generation_options(args, {"generation_config": LIMITED}) == {"generation_config": LIMITED}
    both = {"generation_config": LIMITED, "max_length": 5}
    assert limited(generation_options(args, both), None) == {**both, "max_new_tokens": None}
