"""The site builds without a warning, and axe-core finds nothing wrong with its pages."""

from __future__ import annotations

import importlib.resources
import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reports import browser
from tests.reports.browser import Tab
from website import hooks
from website.fences import find_fences, split_console

ROOT = Path(__file__).parent.parent.parent
PAGES = (
    "index.html",
    "tutorial.html",
    "how-to/read-a-finding.html",
    "reference/command-line.html",
    "reference/python.html",
    "reference/records.html",
    "contract.html",
    "numerics.html",
    "verdicts.html",
    "contributing.html",
)

FOUND = "result.violations.map((one) => [one.id, one.nodes.map((node) => node.html.slice(0, 120))])"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # With `--quiet`, `--strict` passes in spite of broken links: it counts the warnings that are printed.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    if browser.find_browser() is None:
        pytest.skip("no Chromium here: the site was not tried in one")
    with browser.open_tab(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        pytest.param(1280, "light", marks=pytest.mark.long),
        pytest.param(390, "dark", marks=pytest.mark.long),
        pytest.param(1280, "dark", marks=pytest.mark.nightly),
        pytest.param(390, "light", marks=pytest.mark.nightly),
    ],
)
def test_axe_finds_nothing_on_the_site(tab: Tab, site: Path, width: int, scheme: str) -> None:
    axe_core = pytest.importorskip("axe_core_python", reason="axe-core is not installed: the site was not audited")
    axe = (importlib.resources.files(axe_core) / "axe.min.js").read_text(encoding="utf-8") + ";0"
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    tab.open(site / PAGES[0])
    tab.evaluate("localStorage.clear(); 0")  # the page remembers the scheme of its first visit
    found = []
    for page in PAGES:
        tab.open(site / page, width=width)
        assert (tab.evaluate("document.body.dataset.mdColorScheme") == "slate") is (scheme == "dark")
        tab.evaluate(axe)
        violations = tab.evaluate(f"axe.run().then((result) => {FOUND})")
        found += [(page, *violation) for violation in violations]
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, f"{page} is wider than {width} pixels"
    assert found == []


@pytest.mark.long
def test_a_copied_console_block_is_its_commands(tab: Tab, site: Path) -> None:
    tab.open(site / "tutorial.html")
    copied = """[...document.querySelectorAll('pre > code:has(.gp)')].map((code) => {
      code.dataset.mdCopying = '';  // as the theme's button does before it reads the text
      return code.innerText.trim();
    })"""
    page = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    blocks = [fence.text for fence in find_fences(page) if fence.language == "console"]
    commands = ["\n".join(command for command, _ in split_console(text)) for text in blocks]
    assert commands
    assert [re.sub(r"\n+", "\n", text) for text in tab.evaluate(copied)] == commands


def test_no_script_and_no_raw_data_are_published(site: Path) -> None:
    assert list(site.rglob("*.py")) == []
    assert not (site / "measurements" / "data").exists()


@pytest.mark.long
def test_search_works_from_a_disk(tab: Tab, site: Path) -> None:
    tab.open(site / "tutorial.html")
    assert [error for error in tab.errors if "network" in error] == []
    tab.evaluate(
        """
        document.getElementById('__search').click();
        const searchBox = document.querySelector('.md-search__input');
        searchBox.focus();
        searchBox.value = 'soft cap';
        new Promise((found, missing) => {
          let left = 600;
          const timer = setInterval(() => {
            searchBox.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));
            if (document.querySelector('.md-search-result__item')) { clearInterval(timer); found(true); }
            if (!--left) { clearInterval(timer); missing('no result after a minute'); }
          }, 100);
        })
        """
    )
    assert "soft cap" in tab.evaluate("document.querySelector('.md-search-result').innerText").lower()


@pytest.mark.parametrize(
    ("wanted", "page"),
    [
        ("how a bound is derived", "numerics.md"),
        ("where a check lives", "source/conformance/checks.md"),
        ("how to add a storage form", "how-to/add-a-storage-form.md"),
        ("how to release", "how-to/release.md"),
    ],
)
def test_what_maintainers_look_for_is_three_clicks_away(wanted: str, page: str) -> None:
    assert page in find_pages_within(3), wanted


def find_pages_within(clicks: int) -> set[str]:
    """Return the pages of the site that so many links of texts lead to from the front page, without the navigation."""
    found, last = {"index.md"}, {"index.md"}
    for _ in range(clicks):
        last = {link for page in last for link in list_links(page)} - found
        found |= last
    return found


def list_links(page: str) -> set[str]:
    """Return the pages that the text of a page links to; none for pages of source code."""
    source = next((path for path, uri in hooks.MIRRORED.items() if uri == page), f"docs/{page}")
    if not page.endswith(".md") or not (ROOT / source).is_file():
        return set()
    text = hooks.rewrite_links((ROOT / source).read_text(encoding="utf-8"), source, page)
    targets = re.findall(r"\]\(([^)\s#:]+)", text)
    return {posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) for target in targets}


def test_links_out_of_the_documents_lead_to_pages_of_the_site() -> None:
    page = "[a](../reports/metrics.py) [`b`](checks.md#forward) [c](../README.md) `[d](../reports/metrics.py)`"
    assert hooks.rewrite_links(page, "docs/contract.md", "contract.md") == (
        "[a](source/reports/metrics.py.md) [`b`](checks.md#forward) [c](index.md) `[d](../reports/metrics.py)`"
    )
    assert (
        hooks.rewrite_links("[a](../docs/checks.md)", ".github/CONTRIBUTING.md", "contributing.md") == "[a](checks.md)"
    )
    assert hooks.rewrite_links("[a](../../x/none.py)", "docs/how-to/a.md", "how-to/a.md") == "[a](../../x/none.py)"


def test_a_document_beside_source_code_is_a_page_whose_links_work() -> None:
    page = hooks._format_source_page("conformance/checks", {"conformance/checks", "conformance/checks/forward.py"})
    assert "](../../checks.md)" in page  # of the README
    assert "](executor_tasks/README.md.md)" in page
    assert "[`forward.py`](checks/forward.py.md): " in page
    shown = hooks._follow_documents({"conformance/checks"})
    assert "conformance/executor_tasks/README.md" in shown
