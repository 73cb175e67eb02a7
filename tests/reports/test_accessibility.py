"""The page works in a narrow window, without its script and by keys, and axe-core finds nothing wrong."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from pathlib import Path

import pytest

from reports import html_page
from reports.html_fragment import render_fragment
from reports.page_model import build_summary
from tests.reports import browser
from tests.reports.browser import Tab
from tests.reports.report_samples import make_run_info
from tests.reports.test_browser import RECORDS
from tests.reports.test_html_page import make_some

pytestmark = browser.requires_browser


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser.open_tab(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    html_page.save_page(path, build_summary(RECORDS, make_run_info()))
    return path


# Counts the visible elements that the tab key stops at.
STOPS = """[...document.querySelectorAll('a[href],button,input,select,summary,[tabindex]')]
  .filter((e) => e.tabIndex >= 0 && e.checkVisibility({visibilityProperty: true})).length"""


@pytest.mark.parametrize("script", [True, False], ids=["script", "no script"])
def test_the_page_is_complete_at_420_pixels_and_without_its_script(tab: Tab, page: Path, script: bool) -> None:
    tab.open(page, width=420, script=script)
    if not script:
        tab.call("Emulation.setScriptExecutionDisabled", value=False)  # the test itself evaluates JavaScript
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
    # Stops beside those of findings: sections, filters, one for each matrix and the records, and what scrolls.
    assert tab.evaluate(STOPS) <= 50 + 5 * findings


AXE = "axe.run().then((result) => result.violations.map((one) => [one.id, one.impact, one.nodes[0].html]))"


def load_axe(tab: Tab) -> None:
    axe_core = pytest.importorskip("axe_core_python", reason="axe-core is not installed: the page was not audited")
    tab.evaluate((importlib.resources.files(axe_core) / "axe.min.js").read_text(encoding="utf-8") + ";0")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (420, "light")])
def test_axe_finds_nothing_serious(tab: Tab, tmp_path: Path, width: int, scheme: str) -> None:
    page = tmp_path / "report.html"
    records = [one for one in make_some() if not one.implementation.startswith("kernel_")]
    meanings = {"forward": "Check `out`."}
    html_page.save_page(page, build_summary(records, make_run_info(check_meanings=meanings)))
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    tab.open(page, width=width)
    load_axe(tab)
    tab.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
    assert tab.evaluate(AXE) == []
    tab.evaluate("document.querySelector('a.term').focus()")
    assert tab.evaluate(AXE) == []
    tab.evaluate(
        "document.documentElement.removeAttribute('lang'); document.querySelector('.lead').style.color = '#777'"
    )
    assert {name for name, *_ in tab.evaluate(AXE)} == {"html-has-lang", "color-contrast"}  # axe-core does find faults
    tab.call("Emulation.setEmulatedMedia", features=[])


@pytest.mark.parametrize("background", ["white", "#111"])
def test_axe_finds_nothing_serious_in_a_fragment(tab: Tab, tmp_path: Path, background: str) -> None:
    ink = "black" if background == "white" else "white"
    text = render_fragment(build_summary(make_some(), make_run_info()))
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Notebook</title></head>'
    body = f'<body style="background: {background}; color: {ink}"><main><h1>A</h1><h2>B</h2>{text}</main></body></html>'
    (tmp_path / "notebook.html").write_text(head + body)
    tab.open(tmp_path / "notebook.html")
    load_axe(tab)
    assert tab.evaluate(AXE) == []
