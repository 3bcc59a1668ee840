"""The built documentation in a real browser: `nox -s docs-browser` builds it and runs these tests."""

from __future__ import annotations

import os
import re
import shutil
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.source import ROOT

pytestmark = pytest.mark.browser

BUILT = ROOT / "docs/_build"
# What people look for, and the pages of which one must be found.
QUERIES = Path(__file__).with_name("queries.txt")
WIDTHS_PX = {"desktop": 1280, "phone": 390}
SCHEMES = ("light", "dark")

# Text of less contrast than WCAG 2 asks for (AA), once per pair of colours.
LOW_CONTRAST = """() => {
    document.getAnimations().forEach((each) => each.finish());
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const linear = (value) => value <= 10.31475 ? value / 3294.6 : ((value / 255 + 0.055) / 1.055) ** 2.4;
    const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const blend = (above, below) => {
        const alpha = above.length > 3 ? above[3] : 1;
        return [0, 1, 2].map((i) => above[i] * alpha + below[i] * (1 - alpha));
    };
    const background = (element) => {
        if (!element) return [255, 255, 255];
        const colour = parse(getComputedStyle(element).backgroundColor);
        return colour[3] === undefined ? colour : blend(colour, background(element.parentElement));
    };
    const found = {};
    const walker = document.createTreeWalker(document.querySelector("article") ?? document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !element.checkVisibility({opacityProperty: true})) continue;
        const style = getComputedStyle(element);
        const below = background(element);
        const [low, high] = [luminance(blend(parse(style.color), below)), luminance(below)].sort((a, b) => a - b);
        const ratio = (high + 0.05) / (low + 0.05);
        const size = parseFloat(style.fontSize);
        const isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
        if (ratio < (isLarge ? 3 : 4.5)) {
            found[style.color + below] = `${ratio.toFixed(2)}: ${walker.currentNode.data.trim().slice(0, 40)}`;
        }
    }
    return Object.values(found);
}"""


def page_names() -> list[str]:
    """List the pages of the built site, without those that earlier builds have left."""
    names = BUILT / "objects.inv"
    if not names.exists():
        return []
    text = zlib.decompress(names.read_bytes().split(b"\n", 4)[4]).decode()
    return [*re.findall(r"^(\S+) std:doc ", text, re.MULTILINE), "genindex", "search"]


class Handler(SimpleHTTPRequestHandler):
    """Serve files without a line on the terminal for each."""

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class Site:
    """A folder served on the loopback, a tab of Chromium, and what went wrong in it."""

    def __init__(self, tab: Any, url: str) -> None:
        self.tab, self.url = tab, url
        self.problems: list[str] = []
        tab.on(
            "console", lambda line: line.type in ("error", "warning") and self.problems.append(f"console: {line.text}")
        )
        tab.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        tab.on("response", lambda answer: answer.status < 400 or self.problems.append(f"{answer.status}: {answer.url}"))
        tab.on("request", lambda request: self.check_request(request.url))

    def check_request(self, url: str) -> None:
        """Note a request to anywhere else."""
        if not url.startswith((self.url, "data:", "blob:")):
            self.problems.append(f"network: {url}")

    def open(self, page: str) -> None:
        """Open a page, with a clean list of problems."""
        self.tab.goto("about:blank")  # what the page before still asks for is not this one's
        self.problems.clear()
        self.tab.goto(f"{self.url}/{page}")

    def check(self) -> list[str]:
        """Return what is wrong with the page: noted while it was opened, or seen at some width and colour scheme."""
        found = list(self.problems)
        for kind, width in WIDTHS_PX.items():
            self.tab.set_viewport_size({"width": width, "height": 900})
            excess = self.tab.evaluate("document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth")
            found += [f"{kind}: scrolls sideways by {excess} pixels"] if excess > 0 else []
        for scheme in SCHEMES:
            self.tab.emulate_media(color_scheme=scheme)
            found += [f"{scheme}: contrast {text}" for text in self.tab.evaluate(LOW_CONTRAST)]
        return found


@contextmanager
def serve(browser: Any, folder: Path) -> Iterator[Site]:
    """Serve a folder, and open a tab for it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tab = browser.new_page(reduced_motion="reduce")
    yield Site(tab, f"http://127.0.0.1:{server.server_port}")
    tab.close()
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium, without a way to the network."""
    from playwright.sync_api import sync_playwright

    options = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    options += ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=options)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site(browser: Any) -> Iterator[Site]:
    """Serve the built documentation."""
    with serve(browser, BUILT) as site:
        yield site


@pytest.mark.parametrize("page", page_names())
def test_page_is_sound_at_each_width_and_colour_scheme(site: Site, page: str) -> None:
    site.open(f"{page}.html")
    assert site.check() == []


@pytest.mark.parametrize(("words", "pages"), [line.split(": ") for line in QUERIES.read_text("utf-8").splitlines()])
def test_search_finds_a_page_among_the_first_two(site: Site, words: str, pages: str) -> None:
    site.open(f"search.html?q={words}")
    # Results appear one after the other.
    first_two = "[...document.querySelectorAll('.pf-result-link')].slice(0, 2).map(each => each.getAttribute('href'))"
    wanted = [f"/{page}.html" for page in pages.split()]
    site.tab.wait_for_function(f"pages => {first_two}.some(each => pages.includes(each))", arg=wanted)
    assert site.problems == []


def test_search_of_any_page_leads_to_a_method(site: Site) -> None:
    site.open("clusters/slurm.html")
    site.tab.wait_for_function("!!customElements.get('pagefind-modal')")
    site.tab.keyboard.press("Control+k")
    site.tab.locator("dialog input").fill("Trainer.train")
    site.tab.locator("dialog .pf-heading-link", has_text="Trainer.train").first.click()
    site.tab.wait_for_url("**/api/hftrain.Trainer.html#hftrain.Trainer.train")


def test_arguments_are_filtered(site: Site) -> None:
    site.open("arguments.html")
    subjects = site.tab.locator("#arguments-by-subject > section:visible h3")
    assert subjects.count() > 10
    site.tab.get_by_label("Filter the arguments").fill("warmup RATIO")
    assert [text.removesuffix("#") for text in subjects.all_inner_texts()] == ["Learning-rate schedule"]
    shown = site.tab.locator("#arguments-by-subject dt:visible").all_inner_texts()
    assert sorted(shown) == ["warmup_ratio", "warmup_steps"]
    site.tab.get_by_label("Filter the arguments").fill("")
    assert subjects.count() > 10


def test_tables_and_code_show_all_columns_on_a_laptop(site: Site) -> None:
    site.tab.set_viewport_size({"width": 1440, "height": 900})
    wide = "[...document.querySelectorAll('.table-wrapper, .highlight-python pre')]"
    cut = {}
    for page in page_names():
        site.open(f"{page}.html")
        if count := site.tab.evaluate(f"{wide}.filter(e => e.scrollWidth > e.clientWidth + 2).length"):
            cut[page] = count
    assert cut == {}


def test_search_finds_nothing_where_nothing_is(site: Site) -> None:
    site.open("search.html?q=qwxyzzyq")
    site.tab.get_by_text("No results for qwxyzzyq").wait_for()


def test_landing_page_has_tabs_and_copy_buttons(site: Site) -> None:
    site.open("index.html")
    code = site.tab.locator(".sd-tab-content .highlight-python pre")
    assert [each.is_visible() for each in code.all()] == [True, False]
    site.tab.get_by_text("Hugging Face Trainer", exact=True).click()
    assert [each.is_visible() for each in code.all()] == [False, True]
    assert site.tab.locator("button.copybtn").count() == site.tab.locator("article pre").count()


def test_page_follows_the_colour_scheme(site: Site) -> None:
    site.open("index.html")
    shades = []
    for scheme in SCHEMES:
        site.tab.emulate_media(color_scheme=scheme)
        shades.append(site.tab.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert shades[0] == "rgb(255, 255, 255)"
    assert max(map(int, re.findall(r"\d+", shades[1]))) < 64


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("<p>Nothing is wrong.</p>", ""),
        ("<div style='width: 500px'>wide</div>", "phone: scrolls sideways by 118 pixels"),
        ("<p style='color: #888'>grey</p>", "light: contrast 3.54: grey"),
        ("<script>console.error('broken')</script>", "console: broken"),
        ("<script>nowhere()</script>", "error: nowhere is not defined"),
        ("<img src='nowhere.png'>", "404: "),
        ("<img src='https://example.org/picture.png'>", "network: https://example.org/picture.png"),
    ],
)
def test_checks_find_what_they_are_for(browser: Any, tmp_path: Path, body: str, problem: str) -> None:
    head = "<!doctype html><meta name=viewport content='width=device-width'><link rel=icon href='data:,'>"
    (tmp_path / "page.html").write_text(f"{head}<body>{body}</body>", encoding="utf-8")
    with serve(browser, tmp_path) as site:
        site.open("page.html")
        found = site.check()
    assert any(each.startswith(problem) for each in found) if problem else found == []
