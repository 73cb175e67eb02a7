"""In a browser the page filters, sorts, follows keys and addresses, and raises no error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.records import RED
from reports import html_page
from reports.matrices import build_matrices
from reports.page_model import build_summary
from reports.record_groups import get_contender, group_records
from tests.reports import browser
from tests.reports.browser import Tab
from tests.reports.report_samples import make_failure, make_many, make_record, make_run_info
from tests.reports.test_compiled_section import make_compilation
from tests.reports.test_html_page import make_some, run_query, save_two_runs

pytestmark = pytest.mark.skipif(
    browser.find_browser() is None, reason="no Chromium here: the page was not tried in one"
)

RECORDS = [*make_some(), *(make_record(case=f"more/{i}", features=("sinks",), check="poison") for i in range(120))]
RED_ONES = sum(one.verdict in RED for one in RECORDS)
ROWS = "document.querySelectorAll('#rows tbody tr').length"
MATCH_COUNT = "document.getElementById('match-count').textContent"
CHOOSE = """((name, text) => {
  const select = document.getElementById('filters').elements[name];
  select.value = [...select.options].find((one) => one.text.includes(text)).value;
  select.dispatchEvent(new Event('input', {bubbles: true}));
  return new Promise((done) => setTimeout(done, 200));
})"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser.open_tab(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    html_page.save_page(path, build_summary(RECORDS, make_run_info()))
    return path


def test_filters_search_and_sort(tab: Tab, page: Path) -> None:
    tab.open(page)
    assert tab.evaluate(MATCH_COUNT) == f"{len(RECORDS)} records"
    assert tab.evaluate(ROWS) == 50
    tab.evaluate(f"{CHOOSE}('verdict', 'red')")
    assert tab.evaluate(MATCH_COUNT) == f"{RED_ONES} records"
    tab.evaluate(f"{CHOOSE}('contender', 'kernel_1')")
    mine = [one for one in RECORDS if one.implementation == "kernel_1" and one.verdict in RED]
    assert tab.evaluate(MATCH_COUNT) == f"{len(mine)} records"
    query = tab.evaluate("document.getElementById('query').textContent")
    assert '.implementation=="kernel_1"' in query
    tab.evaluate("document.querySelector('#filters [type=reset]').click()")
    tab.evaluate("document.querySelector('#filters [type=search]').focus()")
    tab.type("MORE/11")
    tab.evaluate("new Promise((done) => setTimeout(done, 200))")
    assert tab.evaluate(MATCH_COUNT) == f"{sum('more/11' in one.case for one in RECORDS)} records"
    tab.evaluate("document.querySelector('[data-by=caseId]').click()")
    cases = tab.evaluate("[...document.querySelectorAll('#rows summary')].map((one) => one.textContent)")
    assert cases == sorted(cases)
    assert tab.evaluate("document.querySelector('[data-by=caseId]').parentElement.ariaSort") == "ascending"
    tab.evaluate("document.querySelector('[data-by=caseId]').click()")
    assert cases[::-1] == tab.evaluate("[...document.querySelectorAll('#rows summary')].map((one) => one.textContent)")
    assert tab.errors == []


def test_the_command_tells_runs_of_one_file_apart(tab: Tab, tmp_path: Path) -> None:
    page, found, info = save_two_runs(tmp_path)
    tab.open(page)
    for label in info.runs:
        tab.evaluate(f"{CHOOSE}('contender', {label!r})")
        command = tab.evaluate("document.getElementById('query').textContent")
        assert len(run_query(command, tmp_path)) == sum(get_contender(one).label == label for one in found)
    assert tab.errors == []


def test_findings_are_searched(tab: Tab, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    records = [make_failure(implementation="first"), make_failure(implementation="second"), make_record()]
    html_page.save_page(page, build_summary(records, make_run_info()))
    tab.open(page)
    tab.evaluate("document.querySelector('#find [type=search]').focus()")
    tab.type("second")
    shown = "[...document.querySelectorAll('.finding')].filter((one) => !one.hidden).map((one) => one.id)"
    assert tab.evaluate(shown) == ["finding-2"]


def test_a_cell_opens_its_records_by_keys_alone(tab: Tab, page: Path) -> None:
    tab.open(page)
    tab.evaluate("document.querySelector('table.matrix a.cell').focus()")
    first = tab.evaluate("document.activeElement.hash")
    tab.press("ArrowDown")
    tab.press("ArrowRight")
    tab.press("ArrowLeft")
    tab.press("ArrowUp")
    assert tab.evaluate("document.activeElement.hash") == first
    tab.press("End")
    last = tab.evaluate("document.activeElement.closest('tr').querySelectorAll('a.cell').length")
    assert tab.evaluate("document.activeElement.hash") != first or last == 1
    tab.press("Home")
    tab.press("Enter")
    tab.evaluate("new Promise((done) => setTimeout(done, 100))")
    counts = tab.evaluate("[...document.querySelectorAll('table.matrix a.cell')][0].textContent")
    assert tab.evaluate(MATCH_COUNT).partition(" ")[0] in counts or tab.evaluate(ROWS) > 0
    assert tab.evaluate("document.activeElement.id") == "match-count"
    shown = tab.evaluate(MATCH_COUNT)
    label = tab.evaluate("document.querySelector('table.matrix tbody th').firstChild.textContent")
    feature = tab.evaluate("document.getElementById('filters').elements.feature.selectedOptions[0].text")
    wanted = [one for one in RECORDS if one.implementation == label and feature in one.features]
    assert shown == f"{len(wanted)} record{'s' * (len(wanted) != 1)}"
    tab.press("Tab")
    assert tab.evaluate("document.activeElement.closest('#rows') !== null")


NAMES = "[...document.querySelector('table.matrix').tBodies[0].rows].map((row) => row.cells[0].firstChild.textContent)"


def test_a_matrix_is_sorted_by_a_column_by_keys_alone(tab: Tab, page: Path) -> None:
    tab.open(page)
    by_name = tab.evaluate(NAMES)
    matrix = build_matrices(group_records(RECORDS))[0]
    places = [[matrix.ranks.get((x, column), 99) for x in matrix.contenders] for column in matrix.columns]
    number = next(n for n, each in enumerate(places) if each != sorted(each))
    column = matrix.columns[number]
    cells = {x.implementation: matrix.cells.get((x, column)) for x in matrix.contenders}
    assert by_name == list(cells)
    tab.evaluate("document.querySelector('table.matrix thead button').focus()")
    for key in (*["ArrowRight"] * (number + 1), "Enter"):
        tab.press(key)
    head = "document.activeElement.closest('th')"
    assert tab.evaluate(f"{head}.textContent") == column
    assert tab.evaluate(f"{head}.ariaSort") == "descending"
    worst_first = tab.evaluate(NAMES)
    worst_ranks = [cell.rank for name in worst_first if (cell := cells[name])]
    assert worst_ranks == sorted(worst_ranks)
    assert worst_first != by_name
    assert [cells[name] for name in worst_first[len(worst_ranks) :]] == [None] * (len(cells) - len(worst_ranks))
    tab.press("Enter")
    assert tab.evaluate(f"{head}.ariaSort") == "ascending"
    best_ranks = [cell.rank for name in tab.evaluate(NAMES) if (cell := cells[name])]
    assert best_ranks == sorted(best_ranks, reverse=True)
    # The arrow down leads to a cell of the column, and the first column sorts by name again.
    tab.press("ArrowDown")
    assert tab.evaluate("document.activeElement.matches('a.cell')")
    tab.press("ArrowUp")
    for key in ("Home", "Enter"):
        tab.press(key)
    assert tab.evaluate(NAMES) == by_name
    assert tab.evaluate("document.querySelectorAll('table.matrix [aria-sort]').length") == 1
    assert tab.errors == []


def test_a_page_with_tables_of_compiled_programs_has_its_table_of_records(tab: Tab, tmp_path: Path) -> None:
    figures = {"kernel.full_block_cycles": 900.0, "kernel.mxu_share": 0.5}
    records = [make_compilation(figures=figures), make_compilation(observable="v4.forward")]
    path = tmp_path / "report.html"
    html_page.save_page(path, build_summary(records, make_run_info()))
    tab.open(path)
    assert tab.evaluate(MATCH_COUNT) == "2 records"
    assert tab.evaluate(ROWS) == 2
    assert tab.evaluate("document.querySelectorAll('#compiled ~ .scroll thead button').length") == 0
    assert tab.errors == []


def test_addresses_of_a_case_a_finding_and_a_cell(tab: Tab, page: Path) -> None:
    case = "train/f32/drawn"
    tab.open(page, fragment=f"#case-{case}")
    assert tab.evaluate(MATCH_COUNT) == f"1 record of case {case}"
    tab.open(page, fragment="#finding-1")
    assert abs(tab.evaluate("document.getElementById('finding-1').getBoundingClientRect().top")) < 100  # pixels
    tab.open(page, fragment="#records-finding-1")
    assert tab.evaluate("document.getElementById('filters').elements.finding.value") == "1"
    tab.evaluate("document.querySelector('#rows summary').click()")
    tab.evaluate("new Promise((done) => setTimeout(done, 100))")
    assert "python -m conformance run" in tab.evaluate("document.querySelector('#rows details').textContent")
    assert tab.errors == []


def test_further_records_are_one_click_away(tab: Tab, page: Path) -> None:
    tab.open(page)
    while not tab.evaluate("document.getElementById('further').hidden"):
        before = tab.evaluate(ROWS)
        tab.evaluate("document.getElementById('further').click()")
        assert tab.evaluate(ROWS) > before
    assert tab.evaluate(ROWS) == len(RECORDS)


@pytest.mark.long
def test_a_page_of_20000_records_is_drawn_in_two_seconds(tab: Tab, tmp_path: Path) -> None:
    html_page.save_page(tmp_path / "report.html", build_summary(make_many(20_000), make_run_info()))
    assert tab.open(tmp_path / "report.html") < 2
    assert tab.evaluate(MATCH_COUNT) == "20,000 records"
    assert tab.errors == []
