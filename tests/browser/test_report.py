"""The page of `hftrain report` in a real browser; see `test_site`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browser.test_site import Site, browser, serve  # noqa: F401
from unit.cli.test_report import train, write

from hftrain import Trainer

pytestmark = pytest.mark.browser
DRAWN = ".js-plotly-plot .main-svg"


@pytest.fixture(scope="module")
def shown(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Trainer]]:  # noqa: F811
    """Serve the reports of a run, and of two."""
    folder = tmp_path_factory.mktemp("reports")
    trainer = train(folder / "one")
    train(folder / "two", learning_rate=0.1)
    for name, runs in (("one", ["one"]), ("both", ["one", "two"])):
        write(folder, *(folder / run for run in runs))
        (folder / "report.html").rename(folder / f"{name}.html")
    with serve(browser, folder) as site:
        yield site, trainer


@pytest.mark.parametrize("page", ["one", "both"])
def test_report_is_sound_and_asks_for_nothing(shown: tuple[Site, Trainer], page: str) -> None:
    site, _ = shown
    asked: list[str] = []
    site.tab.on("request", lambda request: asked.append(request.url))
    site.open(f"{page}.html")
    site.tab.wait_for_selector(DRAWN)
    assert site.tab.locator(".js-plotly-plot").count() == site.tab.locator(".plot").count() >= 5
    assert site.check() == []
    assert [url for url in asked if not url.startswith(("data:", "blob:"))] == [f"{site.url}/{page}.html"]


def test_controls_change_the_curves(shown: tuple[Site, Trainer]) -> None:
    site, trainer = shown
    site.open("one.html")
    site.tab.wait_for_selector(DRAWN)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    def drawn(what: str) -> Any:
        return site.tab.evaluate(f"document.getElementById('panel0').{what}")

    assert drawn("data.map(each => each.name)") == ["loss", "eval_loss"]
    assert drawn("data[0].y") == losses
    assert drawn("layout.yaxis.type") == "linear"
    site.tab.get_by_label("log scale").check()
    assert drawn("layout.yaxis.type") == "log"
    site.tab.get_by_label("Over").select_option("epoch")
    assert drawn("data[0].x") == [entry["epoch"] for entry in trainer.state.log_history if "loss" in entry]
    site.tab.get_by_label("Smoothing").fill("0.5")
    assert drawn("data[0].y") == losses, "the raw curve stays behind the smooth one"
    second = (0.5 * losses[0] + losses[1]) / 1.5
    assert drawn("data[1].y.slice(0, 2)") == pytest.approx([losses[0], second])
