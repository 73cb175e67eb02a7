"""In a browser the page filters, sorts, follows keys and addresses, and raises no error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from reports import html_page
from reports.matrices import build_matrices
from reports.page_model import build_summary
from reports.record_groups import get_implementation, group_records
from reports.records import RED
from tests.reports import browser
from tests.reports.browser import Tab
from tests.reports.report_samples import make_failure, make_many, make_record, make_run_info
from tests.reports.test_compiled_section import make_compilation
from tests.reports.test_html_page import make_some, run_query, save_two_runs

pytestmark = browser.requires_browser

RECORDS = [*make_some(), *(make_record(case=f"more/{i}", features=("sinks",), check="poison") for i in range(120))]
RED_ONES = sum(one.verdict in RED for one in RECORDS)
ROWS = "document.querySelectorAll('#rows tbody tr').length"
MATCH_COUNT = "document.getElementById('match-count').textContent"
FORM = "document.getElementById('filters').elements"
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
    assert tab.evaluate(ROWS) == 25
    tab.evaluate(f"{CHOOSE}('verdict', 'red')")
    assert tab.evaluate(MATCH_COUNT) == f"{RED_ONES} records"
    tab.evaluate(f"{CHOOSE}('implementation', 'kernel_1')")
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
        tab.evaluate(f"{CHOOSE}('implementation', {label!r})")
        command = tab.evaluate("document.getElementById('query').textContent")
        assert len(run_query(command, tmp_path)) == sum(get_implementation(one).label == label for one in found)
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
    label, feature = (tab.evaluate(f"{FORM}.{name}.selectedOptions[0].text") for name in ("implementation", "feature"))
    wanted = [one for one in RECORDS if get_implementation(one).label == label and feature in one.features]
    assert shown == f"{len(wanted)} record{'s' * (len(wanted) != 1)}"
    tab.press("Tab")
    assert tab.evaluate("document.activeElement.closest('#rows') !== null")


ROW_NAMES = """[...document.querySelector('table.matrix').querySelectorAll('tbody tr:not(.kind)')]
  .map((row) => row.cells[0].textContent)"""


def test_a_matrix_is_sorted_by_an_implementation_by_keys_alone(tab: Tab, page: Path) -> None:
    tab.open(page)
    matrix = build_matrices(group_records(RECORDS))[0]
    assert tab.evaluate(ROW_NAMES) == list(matrix.rows)
    places = [[matrix.ranks.get((one, row), 99) for row in matrix.rows] for one in matrix.implementations]
    number = next(n for n, each in enumerate(places) if each != sorted(each))
    implementation = matrix.implementations[number]
    cells = {row: matrix.cells.get((implementation, row)) for row in matrix.rows}
    tab.evaluate("document.querySelector('table.matrix thead button').focus()")
    for key in (*["ArrowRight"] * (number + 1), "Enter"):
        tab.press(key)
    head = "document.activeElement.closest('th')"
    assert implementation.name in tab.evaluate(f"{head}.textContent")
    assert tab.evaluate(f"{head}.ariaSort") == "descending"
    worst_first = tab.evaluate(ROW_NAMES)
    worst_ranks = [cell.rank for name in worst_first if (cell := cells[name])]
    assert worst_ranks == sorted(worst_ranks)
    assert worst_first != list(matrix.rows)
    assert [cells[name] for name in worst_first[len(worst_ranks) :]] == [None] * (len(cells) - len(worst_ranks))
    tab.press("Enter")
    assert tab.evaluate(f"{head}.ariaSort") == "ascending"
    best_ranks = [cell.rank for name in tab.evaluate(ROW_NAMES) if (cell := cells[name])]
    assert best_ranks == sorted(best_ranks, reverse=True)
    # The arrow down leads to a cell of the column, and the first column puts the rows back in their order.
    tab.press("ArrowDown")
    assert tab.evaluate("document.activeElement.matches('a.cell')")
    tab.press("ArrowUp")
    for key in ("Home", "Enter"):
        tab.press(key)
    assert tab.evaluate(ROW_NAMES) == list(matrix.rows)
    assert tab.evaluate("document.querySelector('table.matrix').querySelectorAll('tr.kind').length") == len(
        matrix.groups
    )
    assert tab.evaluate("document.querySelectorAll('table.matrix [aria-sort]').length") == 0
    assert tab.errors == []


def test_the_head_of_a_matrix_that_fits_stays_in_view(tab: Tab, tmp_path: Path) -> None:
    features = [f"feature-{i}" for i in range(60)]
    records = [make_record(implementation=f"kernel_{i}", features=tuple(features)) for i in range(9)]
    html_page.save_page(tmp_path / "report.html", build_summary(records, make_run_info()))
    tab.open(tmp_path / "report.html", width=1340)
    matrix = "document.querySelector('table.matrix')"
    assert tab.evaluate(f"{matrix}.closest('.scroll').scrollWidth <= {matrix}.closest('.scroll').clientWidth")
    tab.evaluate(f"{matrix}.querySelectorAll('tbody tr')[40].scrollIntoView({{block: 'center'}})")
    tab.evaluate("new Promise((done) => setTimeout(done, 100))")
    assert abs(tab.evaluate(f"{matrix}.tHead.querySelector('th').getBoundingClientRect().top")) < 2  # pixels


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


def test_a_link_restores_the_filters_and_the_back_button_undoes_one(tab: Tab, page: Path) -> None:
    tab.open(page)
    tab.evaluate(f"{CHOOSE}('verdict', 'red')")
    tab.evaluate(f"{CHOOSE}('implementation', 'kernel_1')")
    tab.evaluate("document.querySelector('#filters [type=search]').focus()")
    tab.type("train/")
    tab.evaluate("document.querySelector('[data-by=caseId]').click()")
    tab.evaluate("new Promise((done) => setTimeout(done, 200))")
    view = "[...document.querySelectorAll('#rows tbody tr')].map((row) => row.textContent)"
    count, rows, address = tab.evaluate(MATCH_COUNT), tab.evaluate(view), tab.evaluate("location.hash")
    assert {"verdict=red", "implementation=kernel_1", "text=train", "sort=caseId-up"} <= {
        part.partition("%")[0].partition("+")[0] for part in address.partition("?")[2].split("&")
    }
    tab.open(page, fragment=address)
    assert (tab.evaluate(MATCH_COUNT), tab.evaluate(view)) == (count, rows)
    tab.evaluate(f"{CHOOSE}('verdict', 'pass')")
    assert tab.evaluate(MATCH_COUNT) != count
    tab.evaluate("history.back(); new Promise((done) => setTimeout(done, 300))")
    assert (tab.evaluate(MATCH_COUNT), tab.evaluate(view)) == (count, rows)
    tab.evaluate("history.forward(); new Promise((done) => setTimeout(done, 300))")
    assert tab.evaluate(f"{FORM}.verdict.selectedOptions[0].text").endswith("pass")
    tab.evaluate("document.querySelector('#filters [type=reset]').click()")
    tab.evaluate("new Promise((done) => setTimeout(done, 100))")
    assert tab.evaluate("location.hash") == "#records?sort=caseId-up"  # the order is no filter
    assert tab.evaluate(MATCH_COUNT) == f"{len(RECORDS)} records"
    assert tab.errors == []


def test_the_back_button_leaves_the_records_of_a_cell(tab: Tab, page: Path) -> None:
    tab.open(page)
    tab.evaluate("document.querySelector('table.matrix a.cell').click(); new Promise((done) => setTimeout(done, 200))")
    assert tab.evaluate("location.hash").startswith("#records-")
    assert tab.evaluate(MATCH_COUNT) != f"{len(RECORDS)} records"
    tab.evaluate("history.back(); new Promise((done) => setTimeout(done, 300))")
    assert tab.evaluate("location.hash") == ""
    assert tab.evaluate(MATCH_COUNT) == f"{len(RECORDS)} records"
    assert tab.errors == []


def test_a_link_with_filters_that_this_page_lacks_shows_the_rest(tab: Tab, page: Path) -> None:
    tab.open(page, fragment="#records?verdict=red&implementation=of+another+page&sort=nonsense-up&%zz")
    assert tab.evaluate(MATCH_COUNT) == f"{RED_ONES} records"
    assert tab.errors == []


def test_the_search_of_findings_is_in_the_address(tab: Tab, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    records = [make_failure(implementation="first"), make_failure(implementation="second"), make_record()]
    html_page.save_page(page, build_summary(records, make_run_info()))
    tab.open(page)
    tab.evaluate("document.querySelector('#find [type=search]').focus()")
    tab.type("second")
    address = tab.evaluate("location.hash")
    tab.open(page, fragment=address)
    shown = "[...document.querySelectorAll('.finding')].filter((one) => !one.hidden).map((one) => one.id)"
    assert tab.evaluate(shown) == ["finding-2"]


def test_an_address_in_a_folded_section_opens_it(tab: Tab, page: Path) -> None:
    for fragment in ("#cost", "#word-bound"):
        tab.open(page, fragment=fragment)
        assert tab.evaluate(f"document.querySelector('{fragment}').closest('details.fold').open")
    assert tab.evaluate("[...document.querySelectorAll('details.fold')].filter((one) => one.open).length") == 1
    assert tab.errors == []


def test_a_word_shows_its_meaning_to_keys_and_to_the_pointer(tab: Tab, page: Path) -> None:
    tab.open(page)
    word = "document.querySelector('#findings ~ .lead a.term')"
    assert tab.evaluate(f"{word}.tabIndex") == 0
    tab.evaluate(f"{word}.focus()")
    shown = "document.querySelector('.tip').matches(':popover-open')"
    assert tab.evaluate(shown)
    meaning = tab.evaluate("document.querySelector('.tip').textContent")
    assert meaning == tab.evaluate(f"document.getElementById({word}.getAttribute('aria-describedby')).textContent")
    tab.press("Escape")
    assert not tab.evaluate(shown)
    tab.call("Accessibility.enable")
    found = tab.call("Runtime.evaluate", expression=word)["result"]["objectId"]
    (node,) = tab.call("Accessibility.getPartialAXTree", objectId=found, fetchRelatives=False)["nodes"]
    assert node["description"]["value"] == meaning  # to a screen reader, while the section of words is folded
    place = tab.evaluate(f"(({{x, y}}) => [x + 5, y + 5])({word}.getBoundingClientRect())")
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    assert tab.evaluate(shown)
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    tab.evaluate("new Promise((done) => setTimeout(done, 300))")
    assert not tab.evaluate(shown)
    tab.evaluate(f"{word}.focus()")
    tab.press("Enter")
    tab.evaluate("new Promise((done) => setTimeout(done, 100))")
    assert tab.evaluate(f"location.hash === {word}.hash")
    assert tab.errors == []


@pytest.mark.parametrize("script", [True, False], ids=["script", "no script"])
def test_paper_clips_nothing_and_shows_no_control(tab: Tab, page: Path, script: bool) -> None:
    width = 700  # pixels: A4 without its margins
    tab.open(page, width=width, script=script)
    tab.call("Emulation.setScriptExecutionDisabled", value=False)
    tab.call("Emulation.setEmulatedMedia", media="print")
    try:
        if script:
            tab.evaluate("dispatchEvent(new Event('beforeprint'))")
        visible = (
            "[...document.querySelectorAll('main *')].filter((e) => e.checkVisibility({contentVisibilityAuto: true}))"
        )
        wide = f"{visible}.filter((e) => e.getBoundingClientRect().right > {width + 1})"
        assert tab.evaluate(f"{wide}.map((e) => e.outerHTML.slice(0, 99))") == []
        controls = f"{visible}.filter((e) => e.matches('input, select, nav, #further, .cue')).length"
        assert tab.evaluate(controls) == 0
        folded = "[...document.querySelectorAll('.fold')].map((e) => e.lastElementChild.getBoundingClientRect().height)"
        assert all(height > 0 for height in tab.evaluate(folded))
        if script:
            tab.evaluate("dispatchEvent(new Event('afterprint'))")
            assert tab.evaluate("document.querySelectorAll('.fold[open]').length") == 0
    finally:
        tab.call("Emulation.setEmulatedMedia", media="")


def test_further_records_are_one_click_away(tab: Tab, page: Path) -> None:
    tab.open(page)
    while not tab.evaluate("document.getElementById('further').hidden"):
        before = tab.evaluate(ROWS)
        tab.evaluate("document.getElementById('further').click()")
        assert tab.evaluate(ROWS) > before
    assert tab.evaluate(ROWS) == len(RECORDS)


@pytest.mark.long
def test_of_20000_records_few_are_drawn_at_first(tab: Tab, tmp_path: Path) -> None:
    html_page.save_page(tmp_path / "report.html", build_summary(make_many(20_000), make_run_info()))
    tab.open(tmp_path / "report.html")
    assert tab.evaluate(MATCH_COUNT) == "20,000 records"
    assert tab.evaluate(ROWS) == 25
    assert tab.errors == []
