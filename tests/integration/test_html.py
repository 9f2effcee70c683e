"""The page of a run in a real browser: nothing is missing, nothing is asked for, nothing sticks out."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import chromium
import fakes
from specbisect.compare import compare
from specbisect.report import page, run
from specbisect.store import Store
from specbisect.trace import Failure

NARROW, WIDE = 390, 1280
SCREENSHOTS = os.environ.get("SPECBISECT_SCREENSHOTS")
"""A directory in which the pages are kept as pictures, for people."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    program = chromium.find()
    if program is None:
        reason = "NOT RUN: there is no Chromium on this machine; install Debian's package chromium"
        warnings.warn(reason, stacklevel=1)
        pytest.skip(reason)
    with chromium.Browser(program, tmp_path_factory.mktemp("browser") / "profile") as opened:
        yield opened


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run with more drafters than fit a narrow window, failures, and long words everywhere."""
    directory = tmp_path_factory.mktemp("run")
    with Store.create(directory / ("a-run-with-a-long-name-" * 4), "plan", {}) as store:
        with store.transaction():
            for place, case in enumerate(fakes.plan(quants=6, drafters=12, prompts=("",) * 6)):
                vanilla, speculative = fakes.arm(case.vanilla), fakes.arm(case)
                failed = Failure("verify 3", "an/unbroken/path/" * 12, ())
                arm = speculative if place % 29 else failed
                store.save_arm(case.vanilla.key, vanilla)
                store.save_arm(case.key, arm)
                store.save_case(place, case, compare(vanilla, arm), arm)
        html = page.page(run.read(store))
    path = directory / "index.html"
    path.write_bytes(html.encode())
    return path.as_uri()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_page_fits_and_asks_for_nothing(
    width: int, dark: bool, browser: chromium.Browser, url: str
) -> None:
    browser.requests.clear()
    browser.console.clear()
    browser.show(url, width, dark=dark)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("document.querySelectorAll('figure svg').length") >= 2
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (
        sum(map(int, background.removeprefix("rgb(").removesuffix(")").split(","))) < 382
    ) == dark
    if SCREENSHOTS:
        name = f"page-{width}-{'dark' if dark else 'light'}.png"
        browser.screenshot(Path(SCREENSHOTS) / name)
    assert browser.requests == [url]
    assert browser.console == []


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_every_cell_leads_to_its_cases(width: int, browser: chromium.Browser, url: str) -> None:
    browser.show(url, width)
    links = browser.evaluate("[...document.querySelectorAll('.matrix a')].map(a => a.hash)")
    assert len(links) == 72
    for link in links:
        browser.evaluate(f"document.querySelector('.matrix a[href=\"{link}\"]').click()")
        shown = browser.evaluate(
            "[...document.querySelectorAll('.group')].filter(g => g.offsetHeight).map(g => '#' + g.id)"
        )
        assert shown == [link]
        assert browser.evaluate(f"document.querySelector('{link} tbody').rows.length") == 6
        assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_all_listed_cases_can_be_seen_at_once(browser: chromium.Browser, url: str) -> None:
    browser.show(url, WIDE)
    browser.evaluate("document.querySelector('a[href=\"#cases\"]').click()")
    hidden = "[...document.querySelectorAll('.group')].filter(g => !g.offsetHeight).length"
    assert browser.evaluate(hidden) == 0


def test_plots_follow_the_colours_of_the_page(browser: chromium.Browser, url: str) -> None:
    colours = []
    for dark in (False, True):
        browser.show(url, WIDE, dark=dark)
        colours.append(
            browser.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill")
        )
        assert colours[-1] == browser.evaluate("getComputedStyle(document.body).color")
    assert colours[0] != colours[1]


def test_the_browser_would_have_said_something(browser: chromium.Browser, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.html"
    wrong.write_text(
        "<body style='width: 2000px'><img src='missing.png'><script>console.error('x'); y()</script>"
    )
    browser.requests.clear()
    browser.console.clear()
    browser.show(wrong.as_uri(), WIDE)
    assert browser.evaluate("document.documentElement.scrollWidth") > WIDE
    assert len(browser.requests) == 2
    assert len(browser.console) >= 3
