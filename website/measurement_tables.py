"""Generate the tables of `docs/measurements` and of the state of attention from files of results.

Results are the JSON files of `conformance/sensitivity`, `conformance/truth` and `tests/planted`, the files of
`docs/measurements/data`, and one JSON file for each chip, which `docs/measure_on_chip.py` writes.
"""

from __future__ import annotations

import collections
import functools
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cases.case_id import parse_case_id
from conformance.survey.upstream_findings import name_raising, read_findings
from impls.libraries.library_specs import load_libraries
from reports import survey_markdown, survey_page, survey_results
from reports.mutant_results import CAUGHT, NOT_RUN, PASSED, MutantResults, format_table, read_results
from website import case_matrices

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "measurements" / "data"
SURVEY_PAGE = "state-of-attention-table.html"
"""Where the site has the page of the survey."""
STORAGE_FAMILIES = ("latent", "packed", "paged", "quantised caches", "ring")


def format_tables(file: str, level: str = "##") -> str:
    """Format all tables of a TOML file as sections."""
    return "\n\n".join(_format_section(table, level) for table in _read_toml(file)["table"])


def format_detection_summary() -> str:
    """Say how many planted bugs were judged and seen, and when."""
    table = _read_detection()
    unseen = sum(not bug["kills"] for bug in table["bugs"])
    versions = ", ".join(f"{name} {value}" for name, value in table["environment"].items())
    return (
        f"{len(table['bugs'])} planted bugs were judged at the level `{table['level']}`. "
        f"{f'All but {unseen}' if unseen else 'All'} are seen by some check.\n\n"
        + _format_provenance({**_read_toml("measured.toml")["detection"], "versions": versions})
    )


def format_detection_by_check() -> str:
    """Format how many planted bugs each check saw, and which of them no other check saw."""
    return _format_table(
        ["check", "bugs seen", "seconds of all measurements", "bugs that only this check saw"],
        [
            [f"`{row['check']}`", row["kills"], f"{row['seconds']:.0f}", _format_names(row["alone"])]
            for row in _read_detection()["checks"]
        ],
        "lrrl",
    )


def format_detection_by_family() -> str:
    """Format how many bugs of each family were seen, and by which checks."""
    table = _read_detection()
    rows = []
    for family, members in _group_by_family(table["bugs"]).items():
        seen_by = collections.Counter(check for bug in members for check in bug["kills"])
        names = {bug["bug"] for bug in members}
        needed = [row["check"] for row in table["checks"] if row["alone"] and names >= set(row["alone"])]
        seen = sum(bool(bug["kills"]) for bug in members)
        most = ", ".join(check for check, _ in seen_by.most_common(4))
        rows.append([family, len(members), seen, most, _format_names(needed)])
    columns = ["family", "bugs", "bugs seen", "checks that saw most of them", "checks that it alone needs"]
    return _format_table(columns, rows, "lrrll")


def format_smallest_errors() -> str:
    """Format the smallest error that fails, by place, result and dtype."""
    return _format_table(*_list_resolutions(_read_detection()["resolution"]))


def format_bugs_beyond() -> str:
    """Say how many of the planted bugs beyond the grids are seen, and list those that are not."""
    beyond: dict[str, list[str] | str] = _read_json("tests/planted/beyond/detections.json")
    levels = collections.Counter(
        "not seen" if isinstance(seen, str) else seen[3] if len(seen) > 3 else "quick" for seen in beyond.values()
    )
    rows = [[f"`{name}`", why] for name, why in beyond.items() if isinstance(why, str)]
    return (
        f"There are {len(beyond)} of them. The level `quick` sees {levels['quick']}, and `standard` sees "
        f"{levels['standard']} more. These are not seen:\n\n" + _format_table(["bug", "why it is not seen"], rows)
    )


def format_planted_bugs() -> str:
    """List every planted bug of the main bank by family, with its reference and the checks that see it."""
    parts = []
    for family, bugs in _group_by_family(_read_detection()["bugs"]).items():
        rows = [
            [f"`{bug['bug']}`", bug["reference"], _format_names(list(bug["kills"])[:4])]
            for bug in sorted(bugs, key=lambda bug: str(bug["bug"]))
        ]
        parts += [f"## {family.capitalize()}", _format_table(["bug", "reference", "checks that see it"], rows)]
    return "\n\n".join(parts)


def _read_detection() -> Any:
    return _read_json("conformance/sensitivity/detection_table.json")


def _group_by_family(bugs: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    families: dict[str, list[Mapping[str, Any]]] = {}
    for bug in bugs:
        families.setdefault(bug["family"], []).append(bug)
    return dict(sorted(families.items()))


def _list_resolutions(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]], str]:
    """List the smallest errors by perturbation and result, with a column for each dtype."""
    dtypes = [dtype for dtype in ("f32", "bf16", "f16") if any(row["dtype"] == dtype for row in rows)]
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        smallest = row["smallest"]
        cell = "not seen" if smallest is None else f"{float(smallest):.2g}"
        found.setdefault((row["perturbation"], row["observable"]), {})[row["dtype"]] = cell
    cells = [[where, f"`{name}`", *(by.get(dtype, "") for dtype in dtypes)] for (where, name), by in found.items()]
    return ["error in", "result that fails", *dtypes], cells, "ll" + "r" * len(dtypes)


def format_diagnosis_shares() -> str:
    """Format how often a planted bug is named rightly by the others, for dense and for stored operands."""
    families = _read_json("docs/measurements/data/diagnosis.json")["families"]
    rows = []
    for title, is_stored in (("dense operands", False), ("stored operands", True)):
        group = [row for row in families if (row["family"] in STORAGE_FAMILIES) is is_stored]
        bugs, none, first, named = (sum(row[name] for row in group) for name in ("bugs", "none", "first", "named"))
        called = bugs - none
        shares = [f"{first} ({first / called:.0%})", f"{named} ({named / called:.0%})"]
        rows.append([title, bugs, called, *shares, f"{first / bugs:.0%}, {named / bugs:.0%}"])
    columns = ["operands", "bugs", "similar to another bug", "first name right", "one of three names right"]
    return _format_table([*columns, "shares of all bugs"], rows, "lrrrrr")


def format_diagnosis_by_family() -> str:
    """Format how often the bugs of each family are named rightly."""
    families = _read_json("docs/measurements/data/diagnosis.json")["families"]
    names = ("bugs", "first", "named", "none", "alone")
    rows = [[row["family"], *(row[name] for name in names), ", ".join(row["others"])] for row in families]
    columns = ["family", "bugs", "first name right", "one of three names right", "similar to no other bug"]
    columns += ["only one of its kind", "families that were named first by mistake"]
    measured = _format_provenance(_read_toml("measured.toml")["diagnosis"])
    return f"{_format_table(columns, rows, 'lrrrrrl')}\n\n{measured}"


def format_suites() -> str:
    """Format how many wrong functions the tests of libraries catch, of those that their calls can see."""
    names = ("library", "version", "replaced function", "tests", "calls", "kinds of calls")
    columns = [*names, "can be seen", "tried", "caught", "passed", "share caught"]
    rows = []
    for one in _read_suites():
        caught, passed, left = (len(one.select(state)) for state in (CAUGHT, PASSED, NOT_RUN))
        share = "" if one.share is None else f"{one.share:.0%}"
        tests = one.command.removeprefix("pytest -q ")
        source = one.environment["library"], one.environment["version"], f"`{one.function}`", f"`{tests}`"
        rows.append([*source, *one.calls, caught + passed + left, caught + passed, caught, passed, share])
    return f"{_format_table(columns, rows, 'llll' + 'r' * 7)}\n\n{_format_suites_source()}"


def format_suites_by_family() -> str:
    """Format how many wrong functions of each family the tests catch, of those that their calls can see."""
    rows = format_table(_read_suites())
    libraries = ["family", *(one.environment["library"] for one in _read_suites())]
    return _format_table(libraries, list(zip(*(row[2:] for row in rows), strict=True)), "l" + "r" * (len(rows) - 1))


def format_suites_passed() -> str:
    """List the wrong functions with which the tests pass."""
    rows = [
        [one.environment["library"], bug.family, bug.sentence, bug.reference, bug.call]
        for one in _read_suites()
        for bug in one.select(PASSED)
    ]
    columns = ["library", "family", "what is wrong", "had by", "a call of the tests that could see it has"]
    return _format_table(columns, rows)


@functools.cache
def _read_suites() -> list[MutantResults]:
    return [read_results(path) for path in sorted((DATA / "mutants").glob("*.jsonl"))]


def _format_suites_source() -> str:
    """Say when and where the suites were measured."""
    days = sorted({one.date for one in _read_suites()})
    where = sorted({f"{one.environment['cpu']}, JAX {one.environment['jax']}" for one in _read_suites()})
    return f"*Measured {' and '.join(days)} with `python -m conformance mutants` on {'; '.join(where)}.*"


def format_limits() -> str:
    """Format the largest ratios of correct kernels, by result and dtype."""
    calibration = _read_json("conformance/truth/calibration.json")
    source = calibration["provenance"]
    rows = [
        [
            f"`{row['observable']}`",
            row["dtype"],
            row["judged"],
            f"{row['max_ratio']:.3g}",
            "" if row["max_rms"] is None else f"{row['max_rms']:.3g}",
            f"`{row['reached_by']}`",
            f"`{row['reached_on']}`",
        ]
        for row in calibration["rows"]
    ]
    measured = {**_read_toml("measured.toml")["limits"], "versions": f"jax {source['jax']}"}
    return "\n\n".join(
        [
            f"{source['judgements']:,} results were judged {source['name']}, of these kernels: "
            f"{_format_names(source['implementations'])}.",
            _format_table(
                ["result", "dtype", "records", "largest ratio", "largest rms", "kernel", "case"], rows, "llrrrll"
            ),
            _format_provenance(measured),
        ]
    )


def format_exploits() -> str:
    """List the attacks on the judge with what stops them, and every kernel of `tests/exploits`."""
    from tests.exploits.bank import BANK

    data = _read_toml("exploits.toml")
    families: dict[str, list[Any]] = {name: [] for name in data["families"]}
    for exploit in BANK:
        families[exploit.name.partition("/")[0]].append(exploit)
    right = [exploit.name for exploit in BANK if exploit.right]
    columns = ["what a kernel tries", "what stops it", "what it can still do"]
    rows = [[row["attempt"], row["stopped_by"], row["remains"]] for row in data["attack"]]
    parts = [
        f"`tests/exploits` has {len(BANK)} such kernels. None passes with a wrong result. {len(right)} pass because "
        f"their results are right: {_format_names(right)}.",
        _format_provenance(_read_toml("measured.toml")["exploits"]),
        "## Attacks, and what stops them",
        _format_table(columns, rows),
    ]
    for name, about in data["families"].items():
        kernels = [[f"`{each.name.partition('/')[2]}`", each.about, each.published] for each in families[name]]
        table = _format_table(["kernel", "what it does", "published example"], kernels)
        parts += [f"## {name.capitalize()}: {len(kernels)} kernels", about, table]
    return "\n\n".join(parts)


def format_chips(folder: Path = DATA / "chips") -> str:
    """Format one section for each file of `docs/measure_on_chip.py` in a folder."""
    parts: list[str] = []
    for path in sorted(folder.glob("*.json"), reverse=True):
        parts += _build_chip_section(json.loads(path.read_text(encoding="utf-8")))
    return "\n\n".join(parts)


def _build_chip_section(found: Mapping[str, Any]) -> list[str]:
    """Build the section of one chip."""
    title = f"## {found['chip']}, {found['date']}"
    parts = [title, *_describe_comparisons(found["comparisons"])]
    results = [row for row in found["rows"] if row["status"] == "result"]
    if trained := [row for row in results if row["case"].startswith("train/")]:
        columns = ["batch", "length", "heads", "depth", "mask", "kernel", "forward", "rate", "with gradients"]
        parts += [
            "Times are medians, with quartiles in brackets.",
            _format_table(columns, _list_training_cells(trained), "rrrrllrrr"),
        ]
    decoding = [row for row in results if row["case"].startswith("decode/")]
    if decoding:
        parts += [
            "Decoding of one query for each sequence. The rate counts the bytes of keys and values, each read once.",
            _format_table(
                ["keys and values", "sequences", "keys", "heads", "kernel", "time", "rate"],
                [_list_decode_cells(row) for row in decoding],
                "lrrrlrr",
            ),
        ]
    parts += [text for text in [_describe_ceilings(found["ceilings"]), *found["notes"]] if text]
    hidden = sorted({f"`{row['kernel']}` ({row['status']})" for row in found["rows"] if row["status"] != "result"})
    if hidden:
        parts.append(f"Times that are no results, and are not shown: {', '.join(hidden)}.")
    parts += [_describe_judging(found["judged"]), _describe_run(found)]
    return parts


def _describe_comparisons(compared: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say in how many calls ours is faster, and list the ratios of all calls."""
    if not compared:
        return ["No comparison of attention is a result."]
    counts = []
    for phase in ("forward", "backward"):
        ratios = [one[phase] for one in compared if one[phase] is not None]
        counts.append(f"{phase} in {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} calls")
    pairs = sorted({(one["ours"], one["published"]) for one in compared})
    versus = "; ".join(f"`{ours}` against {_name_kernel(published)}" for ours, published in pairs)
    cells = [
        [*_list_shape_cells(one["case"]), *map(_format_ratio, (one["forward"], one["backward"]))] for one in compared
    ]
    return [
        f"{versus}. Ours is faster {counts[0]}, and {counts[1]}.",
        _format_table(["batch", "length", "heads", "depth", "mask", "forward", "backward"], cells, "rrrrlrr"),
    ]


def _list_training_cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the cells of each call and kernel: the time of the call, its rate, and its time with gradients."""
    by_call: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        by_call.setdefault((row["case"], row["kernel"]), {})[row["phase"]] = row
    cells = []
    for (case, kernel), phases in by_call.items():
        forward, whole = phases.get("forward"), phases.get("forward+backward")
        rate = "" if forward is None else f"{forward['flops_per_second'] / 1e12:.3g} TFLOP/s"
        times = [_format_time(forward), rate, _format_time(whole)]
        cells.append([*_list_shape_cells(case), f"`{kernel}`", *times])
    return cells


def _format_time(row: Mapping[str, Any] | None) -> str:
    """Format the median and the quartiles of a row in microseconds; empty without a row."""
    if row is None:
        return ""
    lower, median, upper = (f"{row['seconds'][name] * 1e6:,.0f}" for name in ("lower", "median", "upper"))
    return f"{median} µs ({lower} to {upper})"


def _name_kernel(name: str) -> str:
    """Format what a kernel is called: the name of an implementation as code, a description as it is."""
    return f"`{name}`" if name.isidentifier() else name


def _list_shape_cells(case_id: str) -> list[str]:
    """Return batch, length, heads, depth and mask of a case of training as cells."""
    case = parse_case_id(case_id)
    heads = (
        str(case.num_q_heads) if case.num_q_heads == case.num_kv_heads else f"{case.num_q_heads} on {case.num_kv_heads}"
    )
    depth = str(case.head_dim) if case.head_dim == case.v_head_dim else f"{case.head_dim}, values {case.v_head_dim}"
    mask = {"full": "none", "causal": "causal"}.get(case.mask, "window")
    return [str(case.batch), f"{case.q_length:,}", heads, depth, mask]


def _list_decode_cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of one decoding kernel: the call, the kernel, its time, and its rate."""
    case = parse_case_id(row["case"])
    size = 4 if case.dtype == "f32" else 2
    stored = ""
    if case.kv_cache is not None:
        stored = case.kv_cache.removeprefix("kv").split("-")[0]
        size = 1
    moved = size * case.batch * case.kv_length * case.num_kv_heads * (case.head_dim + case.v_head_dim)
    seconds = row["seconds"]["median"]
    layout = "in pages" if "/paged" in row["case"] else "contiguous"
    layout = f"{layout}, {stored}" if stored else layout
    heads = f"{case.num_q_heads} on {case.num_kv_heads}"
    cells = [layout, str(case.batch), f"{case.kv_length:,}", heads, f"`{row['kernel']}`"]
    return [*cells, f"{seconds * 1e6:,.0f} µs", f"{moved / seconds / 1e12:.2f} TB/s"]


def _describe_ceilings(ceilings: Mapping[str, Any]) -> str:
    """Describe what a copy and a matrix product reach on the chip; empty if neither was measured."""
    said = []
    rates = sorted({f"{one['bytes_per_second'] / 1e12:.2f}" for one in ceilings.get("copies", ())})
    if rates:
        said.append(f"A copy reaches {' to '.join(dict.fromkeys((rates[0], rates[-1])))} TB/s, read and written.")
    if product := ceilings.get("product"):
        rate, side = product["flops_per_second"], product["side"]
        reached = " to ".join(dict.fromkeys(f"{rate[end] / 1e12:.0f}" for end in ("lower", "upper")))
        said.append(f"A bf16 matrix product of {side:,} by {side:,} reaches {reached} TFLOP/s.")
    return " ".join(said)


def _describe_judging(judged: Mapping[str, Any]) -> str:
    """Describe which kernels were judged in the same run, and how far."""
    said = []
    for name, standing in judged.items():
        levels = standing["levels"].items()
        jobs = ", ".join(f"{level['jobs']} of {level['planned']} jobs of `{what}`" for what, level in levels)
        said.append(f"`{name}` {standing['verdict']}" + (f" ({jobs})" if jobs else ""))
    return f"Judged in the same run: {'; '.join(said)}." if said else "No verdict of the same run was recorded."


def _describe_run(found: Mapping[str, Any]) -> str:
    """Describe how the figures were made: versions, what is missing, and the command."""
    names = ("jax", "jaxlib", "attention-conformance")
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in names if name in found["versions"])
    parts = [f"Measured {found['date']} on: {found['chip']}. Versions: {versions}."]
    parts += [f"Driver: {found['driver']}."] * bool(found["driver"]) + [found["provenance"]] * bool(found["provenance"])
    if found["ended"] != "complete":
        parts.append(f"The run is not complete: {found['ended']}.")
    if found["left_out"]:
        parts.append(f"Left out: {'; '.join(found['left_out'])}.")
    command = f"\n\n```sh\n{found['command']}\n```" if found["command"] else ""
    return " ".join(parts) + command


def _format_ratio(ratio: float | None) -> str:
    """Format a ratio of times; bold if ours is faster."""
    if ratio is None:
        return ""
    return f"**{ratio:.2f}**" if ratio < 1 else f"{ratio:.2f}"


def _format_section(table: Mapping[str, Any], level: str = "##") -> str:
    """Format one table of a TOML file with its text, notes and provenance."""
    parts = [f"{level} {table['title']}", table["text"], _format_table(table["columns"], table["rows"], table["align"])]
    if table.get("notes"):
        parts.append("\n".join(f"- {note}" for note in table["notes"]))
    return "\n\n".join([*parts, _format_provenance(table)])


def _format_provenance(measured: Mapping[str, Any]) -> str:
    """Format when, where and by which versions something was measured, and the commands that measure it again."""
    text = f"Measured {measured['date']} on: {measured['machine']}. Versions: {measured['versions']}."
    if not measured["commands"]:
        return text
    commands = "\n".join(_break_command(command) for command in measured["commands"])
    return f"{text} To repeat the measurement:\n\n```sh\n{commands}\n```"


def _break_command(command: str) -> str:
    """Break a long command before each of its cases, and then before other options."""
    for option in (" --case=", " --knob=fused", " --target=v5e", " --impl=jax_mha_gpu"):
        if max(map(len, command.split("\n"))) > 110:
            command = command.replace(option, f" \\\n {option}", 1 if option != " --case=" else -1)
    return command


def _format_names(names: Sequence[str]) -> str:
    """Format a list of names as code."""
    return ", ".join(f"`{name}`" for name in names)


def _format_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], align: str = "") -> str:
    """Format a Markdown table; `align` has `l` or `r` for each column."""
    marks = ["---:" if side == "r" else "---" for side in align.ljust(len(columns), "l")]
    lines = [columns, marks, *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _read_toml(name: str) -> dict[str, Any]:
    """Read a file of `docs/measurements/data`."""
    return tomllib.loads((DATA / name).read_text(encoding="utf-8"))


def _read_json(path: str) -> Any:
    """Read a JSON file of the repository."""
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


@functools.cache
def _read_survey() -> list[survey_results.RowResult]:
    return survey_results.read_results(DATA / "survey.json.gz")


def format_survey_facts() -> str:
    """Format when and where published libraries were judged, with a link to the page of all rows."""
    facts = survey_markdown.format_facts(_read_survey())
    return f"{facts}\n\n[The table with all features, dtypes and versions]({SURVEY_PAGE}) has filters."


def render_survey_page() -> str:
    """Render the page in HTML with the results of the survey of published libraries, with filters."""
    findings = read_findings()
    titles = {one.name: one.title.replace("`", "") for one in findings}
    return survey_page.render_survey_page(_read_survey(), titles, name_raising(findings))


def format_unsurveyed() -> str:
    """List the versions of libraries that an adapter names and the survey's results do not have."""
    judged = {(row.library, row.version) for row in _read_survey()}
    missing = [
        f"{library.package} {version}"
        for library in load_libraries().values()
        for version in library.versions
        if (library.name, version) not in judged
    ]
    return f"Listed, and not part of these results: {', '.join(missing)}." if missing else ""


def format_case_matrices() -> str:
    """Format how many pairs of values each suite covers, and how many of these `quick` covers."""
    reading, writing = case_matrices.list_quick_cases()
    rows = []
    for suite, found in _compare_suites():
        chosen = sum(test["cases"] for test in suite["test"])
        share = f"{len(found.covered)} ({len(found.covered) / len(found.pairs):.0%})"
        name = f"[{suite['name']}]({suite['source']}), {suite['date']:%Y-%m-%d}"
        rows.append([name, f"{suite['all_cases']:,}", f"{chosen:,}", len(found.values), len(found.pairs), share])
    columns = ["suite, date of its commit", "cases", "cases of the tests compared", "values", "pairs of values"]
    table = _format_table([*columns, "pairs that `quick` covers"], rows, "lrrrrr")
    return f"{table}\n\nLevel `quick` has {len({*reading, *writing}):,} cases in all grids of all storage forms."


def format_case_values() -> str:
    """Format, for each value and suite, how many of the pairs with this value `quick` covers."""
    compared = _compare_suites()
    rows = []
    for value in case_matrices.sort_values({value for _, found in compared for value in found.values}):
        cells = []
        for _, found in compared:
            pairs = [pair for pair in found.pairs if value in pair]
            cells.append(f"{len(found.covered.intersection(pairs))} of {len(pairs)}" if pairs else "")
        rows.append([case_matrices.find_kind(value), value, *cells])
    return _format_table(["kind", "value", *(suite["name"] for suite, _ in compared)], rows, "llrrr")


def format_missing_pairs() -> str:
    """Format why `quick` lacks pairs of the suites, with the number of pairs and an example for each reason."""
    reasons = _read_toml("case_matrices.toml")["reason"]
    missing = sorted({pair for _, found in _compare_suites() for pair in found.pairs - found.covered})
    grouped = collections.defaultdict(list)
    for pair in missing:
        grouped[case_matrices.find_reason(pair, reasons)].append(pair)
    rows = [[len(grouped[n]), " with ".join(grouped[n][0]), reason["text"]] for n, reason in enumerate(reasons)]
    return _format_table(["pairs", "for example", "reason"], rows, "rll")


@functools.cache
def _compare_suites() -> list[tuple[Mapping[str, Any], case_matrices.Comparison]]:
    suites = _read_toml("case_matrices.toml")["suite"]
    return [(suite, case_matrices.compare_suite(suite)) for suite in suites]


PARTS: dict[str, Callable[[], str]] = {
    "tpu-cycles": functools.partial(format_tables, "tpu_cycles.toml"),
    "gpu-bounds": functools.partial(format_tables, "gpu_bounds.toml"),
    "gpu-times": functools.partial(format_tables, "gpu_times.toml"),
    "chips": format_chips,
    "detection-summary": format_detection_summary,
    "detection-by-check": format_detection_by_check,
    "detection-by-family": format_detection_by_family,
    "smallest-errors": format_smallest_errors,
    "bugs-beyond": format_bugs_beyond,
    "planted-bugs": format_planted_bugs,
    "diagnosis-shares": format_diagnosis_shares,
    "diagnosis-by-family": format_diagnosis_by_family,
    "unknown-kernels": functools.partial(format_tables, "unknown_kernels.toml", "###"),
    "suites": format_suites,
    "suites-by-family": format_suites_by_family,
    "suites-passed": format_suites_passed,
    "limits": format_limits,
    "exploits": format_exploits,
    "case-matrices": format_case_matrices,
    "case-values": format_case_values,
    "missing-pairs": format_missing_pairs,
    "outside-corpora": functools.partial(format_tables, "outside_corpora.toml", "###"),
    "state-facts": format_survey_facts,
    "state-newest": lambda: survey_markdown.format_newest(_read_survey(), name_raising(read_findings())),
    "state-versions": lambda: survey_markdown.format_versions(_read_survey(), name_raising(read_findings())),
    "state-precision": lambda: survey_markdown.format_precision(_read_survey()),
    "state-speed": lambda: survey_markdown.format_speed(_read_survey()),
    "state-unjudged": lambda: survey_markdown.format_unjudged(_read_survey()),
    "state-missing": format_unsurveyed,
}
"""The generated parts by the names that pages use."""
