"""A sweep needs wandb's server, so a stand-in plays it: it hands out values and keeps what is logged."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hftrain import ConfigError
from hftrain.extras.search.config import SearchConfig
from hftrain.extras.search.wandb_sweep import search_with_wandb


class StandIn:
    """What of the wandb module a search calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *rates: float) -> None:
        monkeypatch.setitem(sys.modules, "wandb", self)  # type: ignore[arg-type]
        self.rates = iter(rates)
        self.told: dict[str, Any] = {}
        self.logged: list[Any] = []
        self.finished = 0

    def sweep(self, asked: dict[str, Any], **where: Any) -> str:
        self.told["sweep"] = (asked, where)
        return "made"

    def init(self) -> Any:
        rate = next(self.rates)

        def finish() -> None:
            self.finished += 1

        return SimpleNamespace(id=f"id{rate}", config={"learning_rate": rate}, log=self.logged.append, finish=finish)

    def agent(self, sweep_id: str, *, function: Any, count: int, **where: Any) -> None:
        self.told["agent"] = (sweep_id, where)
        for _ in range(count):
            try:
                function()
            except Exception as error:
                self.told["swallowed"] = error


def attempt(values: Any, *, run_id: str, report: Any, **_: Any) -> float:
    if values["learning_rate"] > 5:
        raise RuntimeError("diverged")
    report(10 * values["learning_rate"], step=1, folder="")
    return float(values["learning_rate"])


def config(num_trials: int = 3, direction: str = "minimize", **options: Any) -> SearchConfig:
    return SearchConfig(
        space=lambda _: {"method": "grid", "parameters": {}},
        num_trials=num_trials,
        directions=(direction,),
        options=options,
    )


@pytest.mark.parametrize(("direction", "best"), [("minimize", 1.0), ("maximize", 3.0)])
def test_sweep_is_made_and_its_agent_run(monkeypatch: pytest.MonkeyPatch, direction: str, best: float) -> None:
    api = StandIn(monkeypatch, 2.0, 1.0, 3.0)
    found = search_with_wandb(config(direction=direction, project="p", name="n", metric="eval/f1"), attempt)
    assert found == (f"id{best}", best, {"learning_rate": best}, None)
    asked, where = api.told["sweep"]
    assert asked == {
        "method": "grid",
        "parameters": {},
        "metric": {"name": "eval/f1", "goal": direction},
        "name": "n",
    }
    assert where == {"project": "p", "entity": None}
    assert api.logged[:2] == [{"eval/f1": 20.0}, {"eval/f1": 2.0}]
    assert api.finished == 3


def test_sweep_that_exists_is_joined_and_failed_trials_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    api = StandIn(monkeypatch, 9.0, 2.0)
    assert search_with_wandb(config(2, sweep_id="theirs"), attempt).objective == 2.0
    assert "sweep" not in api.told
    assert api.told["agent"][0] == "theirs"
    assert str(api.told["swallowed"]) == "diverged"


def test_sweep_without_an_end_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    StandIn(monkeypatch, 9.0)
    with pytest.raises(ConfigError, match="No trial completed") as caught:
        search_with_wandb(config(1), attempt)
    assert str(caught.value.__cause__) == "diverged"


def test_unknown_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    StandIn(monkeypatch)
    with pytest.raises(ConfigError, match="Did you mean 'project'"):
        search_with_wandb(config(projct="p"), attempt)
