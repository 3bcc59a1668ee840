"""Which backend searches, and in which directions."""

from __future__ import annotations

import pytest

from hftrain import BestRun, ConfigError, HPSearchBackend, MissingDependencyError
from hftrain.extras.search import config
from hftrain.extras.search.config import check_directions, choose_backend


def with_installed(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    monkeypatch.setattr(config, "is_available", lambda requirement: requirement.startswith(packages))


@pytest.mark.parametrize(
    ("installed", "chosen"), [(("optuna", "ray", "wandb"), "optuna"), (("ray", "wandb"), "ray"), (("wandb",), "wandb")]
)
def test_first_installed_backend_is_chosen(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], chosen: str
) -> None:
    with_installed(monkeypatch, *installed)
    assert choose_backend(None) is HPSearchBackend(chosen)


def test_no_backend_at_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "is_available", lambda requirement: False)
    with pytest.raises(MissingDependencyError, match=r"optuna.*ray\[tune\].*wandb.*hftrain\[search\]"):
        choose_backend(None)


def test_backend_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(config._REQUIREMENTS, HPSearchBackend.OPTUNA, ("optuna>=999", "search"))
    with pytest.raises(MissingDependencyError, match=r"optuna>=999.*hftrain\[search\]"):
        choose_backend("optuna")


def test_sigopt_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"api\.sigopt\.com.*ended.*optuna"):
        choose_backend(HPSearchBackend.SIGOPT)


def test_directions() -> None:
    assert check_directions("maximize", HPSearchBackend.RAY) == ("maximize",)
    assert check_directions(["minimize", "maximize"], HPSearchBackend.OPTUNA) == ("minimize", "maximize")


def test_several_directions_need_optuna() -> None:
    with pytest.raises(ConfigError, match="searches for one objective"):
        check_directions(["minimize", "maximize"], HPSearchBackend.RAY)


def test_best_run_is_a_tuple_with_an_empty_summary() -> None:
    assert BestRun("3", 0.5, {"seed": 1}) == ("3", 0.5, {"seed": 1}, None)
