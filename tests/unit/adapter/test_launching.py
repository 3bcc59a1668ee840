from __future__ import annotations

import pytest

from hftrain.arguments import TrainingArguments
from hftrain.core.errors import ConfigError
from hftrain.rules.strategy import check_local_rank


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.mark.parametrize(("given", "launched"), [(0, None), (1, "0")])
def test_local_rank_without_launcher_raises(monkeypatch, given, launched):
    if launched is not None:
        monkeypatch.setenv("LOCAL_RANK", launched)
    with pytest.raises(ConfigError, match="torchrun"):
        check_local_rank(TrainingArguments("out", local_rank=given))


@pytest.mark.parametrize(("given", "launched"), [(-1, None), (-1, "1"), (1, "1")])
def test_local_rank_that_the_launcher_confirms_passes(monkeypatch, given, launched):
    if launched is not None:
        monkeypatch.setenv("LOCAL_RANK", launched)
    check_local_rank(TrainingArguments("out", local_rank=given))
