"""The page for everybody: narrow, without its script, by keys, and nothing that axe-core finds wrong."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from pathlib import Path

import pytest

from reports import html_page
from tests.reports import browser
from tests.reports.browser import Tab
from tests.reports.test_browser import RECORDS
from tests.reports.test_html_page import make_some
from tests.reports.test_reports import make_run_info

pytestmark = pytest.mark.skipif(
    browser.find_browser() is None, reason="no Chromium here: the page was not tried in one"
)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser.open_tab(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    html_page.save_page(path, RECORDS, make_run_info())
    return path


# Elements that the tab key stops at and that are seen.
STOPS = """[...document.querySelectorAll('a[href],button,input,select,summary,[tabindex]')]
  .filter((e) => e.tabIndex >= 0 && e.checkVisibility({visibilityProperty: true})).length"""


@pytest.mark.parametrize("script", [True, False], ids=["script", "no script"])
def test_the_page_is_complete_at_420_pixels_and_without_its_script(tab: Tab, page: Path, script: bool) -> None:
    tab.open(page, width=420, script=script)
    if not script:
        tab.call("Emulation.setScriptExecutionDisabled", value=False)  # to look at what is there
    assert tab.evaluate("document.documentElement.scrollWidth") <= 420
    wide = "[...document.querySelectorAll('main *')].filter((e) => e.checkVisibility() && !e.closest('.scroll, svg')"
    assert tab.evaluate(f"{wide} && e.getBoundingClientRect().right > 421).map((e) => e.outerHTML.slice(0, 99))") == []
    assert tab.evaluate("document.getElementById('explorer').hidden") is not script
    assert tab.evaluate("document.getElementById('few').hidden") is script
    cues = "[...document.querySelectorAll('.cue')].filter((e) => !e.hidden).length"
    assert (tab.evaluate(cues) > 0) is script
    if script:
        region = "document.querySelector('table.matrix').closest('.scroll')"
        assert tab.evaluate(f"!{region}.previousElementSibling.hidden")
        tab.evaluate(f"{region}.scrollLeft = 1e6; new Promise((done) => setTimeout(done, 200))")
        assert tab.evaluate(f"{region}.previousElementSibling.hidden")


def test_few_stops_of_the_tab_key(tab: Tab, page: Path) -> None:
    tab.open(page)
    assert tab.evaluate("document.querySelectorAll('table.matrix a.cell').length") > 30
    findings = tab.evaluate("document.querySelectorAll('.finding').length")
    # Beside what findings have: sections, filters, one of each matrix and of the records, what scrolls.
    assert tab.evaluate(STOPS) <= 50 + 5 * findings


@pytest.mark.parametrize("width", [1280, 420])
def test_axe_finds_nothing_serious(tab: Tab, tmp_path: Path, width: int) -> None:
    axe_core = pytest.importorskip("axe_core_python", reason="axe-core is not installed: the page was not audited")
    page = tmp_path / "report.html"
    html_page.save_page(
        page, [one for one in make_some() if not one.implementation.startswith("kernel_")], make_run_info()
    )
    tab.open(page, width=width)
    tab.evaluate((importlib.resources.files(axe_core) / "axe.min.js").read_text(encoding="utf-8") + ";0")
    found = "axe.run().then((told) => told.violations.map((one) => [one.id, one.impact, one.nodes[0].html]))"
    assert tab.evaluate(found) == []
    tab.evaluate("document.documentElement.removeAttribute('lang'); document.querySelector('p').style.color = '#ccc'")
    seen = {name for name, *_ in tab.evaluate(found)}
    assert seen == {"html-has-lang", "color-contrast"}  # it does look
