"""Generate the pages of `docs/measurements` from files of results.

Run it from the root of the repository:

    python docs/generate_measurements.py            # write the pages
    python docs/generate_measurements.py --measure  # first diagnose each planted bug by the others: a minute

Results are the JSON files of `conformance/sensitivity`, `conformance/truth` and `tests/planted`, the TOML files of
`docs/measurements/data`, and one JSON file for each chip, which `docs/measure_on_chip.py` writes. A test fails where a
page is not what this script writes.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "measurements"
DATA = PAGES / "data"
CHIPS = DATA / "chips"
DIAGNOSIS = DATA / "diagnosis.json"
STORAGE_FAMILIES = ("latent", "packed", "paged", "quantised caches", "ring")

# Pages that are a file of tables, and the title of each in the index.
TABLE_PAGES = {
    "tpu-cycles.md": (
        "tpu_cycles.toml",
        "Cycles of TPU kernels of this project, JAX and tokamax, counted in the compiler's schedule.",
    ),
    "gpu-bounds.md": ("gpu_bounds.toml", "Upper bounds of the speed of GPU kernels, counted in their machine code."),
    "gpu-times.md": ("gpu_times.toml", "Times and verdicts of GPU kernels, measured on an H100 and an H200."),
}
OTHER_PAGES = {
    "chips.md": "Speed of our kernels beside cuDNN and JAX's, chip by chip.",
    "detection.md": "How many planted bugs each check sees, and the smallest error that fails.",
    "planted-bugs.md": "Every planted bug: where a real project had it, and which checks see it.",
    "diagnosis.md": "How often a finding is right, and how often the planted bugs that it names are.",
    "limits.md": "The largest errors of correct kernels, from which the limits follow.",
    "exploits.md": "Kernels that are wrong and try to get a verdict of right.",
}


def build_pages() -> dict[str, str]:
    """Build all pages, by their file names."""
    measured = _read_toml("measured.toml")
    pages = {name: _build_table_page(file) for name, (file, _) in TABLE_PAGES.items()}
    pages["detection.md"] = _build_detection_page(measured["detection"])
    pages["planted-bugs.md"] = _build_bug_page(measured["detection"])
    pages["diagnosis.md"] = _build_diagnosis_page(measured["diagnosis"])
    pages["limits.md"] = _build_limit_page(measured["limits"])
    pages["exploits.md"] = _build_exploit_page(measured["exploits"])
    pages["chips.md"] = build_chip_page(CHIPS)
    pages["index.md"] = _build_index()
    return {name: re.sub(r"\n{3,}", "\n\n", text).strip() + "\n" for name, text in pages.items()}


def measure_diagnoses() -> None:
    """Diagnose each planted bug by all others, and store the counts by family in `DIAGNOSIS`."""
    from conformance.sensitivity import failure_signatures
    from tests.bank import confusions

    bank = list(failure_signatures.load_signatures())
    rows = [dataclasses.asdict(row) for row in confusions.measure_confusions(bank)]
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    DIAGNOSIS.write_text(f'{{"bugs": {len(bank)}, "families": [\n{lines}\n]}}\n', encoding="utf-8")


def _build_index() -> str:
    """Build the list of pages."""
    listed = {name: text for name, (_, text) in TABLE_PAGES.items()} | OTHER_PAGES
    rows = [[f"[{name.removesuffix('.md')}]({name})", text] for name, text in listed.items()]
    return (
        "# Measurements\n\n"
        "`docs/generate_measurements.py` generates these pages from files of results. Each page says when, where "
        "and how its figures were measured. The [glossary](../glossary.md) explains words such as *planted bug*, "
        "*ratio* and *limit*.\n\n" + _format_table(["page", "content"], rows)
    )


def _build_table_page(file: str) -> str:
    """Build a page that is the tables of a TOML file."""
    page = _read_toml(file)
    parts = [f"# {page['title']}", _format_source(f"data/{file}"), page["text"].strip()]
    parts += [_format_section(table) for table in page["table"]]
    return "\n\n".join(parts)


def _build_detection_page(measured: Mapping[str, Any]) -> str:
    """Build the page of what the checks see."""
    table = _read_json("conformance/sensitivity/detection_table.json")
    beyond: dict[str, list[str] | str] = _read_json("tests/planted/beyond/kills.json")
    versions = ", ".join(f"{name} {value}" for name, value in table["environment"].items())
    bugs, checks = table["bugs"], table["checks"]
    unseen = [bug["bug"] for bug in bugs if not bug["kills"]]
    families: dict[str, list[Any]] = {}
    for bug in bugs:
        families.setdefault(bug["family"], []).append(bug)
    family_rows = []
    for family, members in sorted(families.items()):
        seen_by = collections.Counter(check for bug in members for check in bug["kills"])
        seen = sum(bool(bug["kills"]) for bug in members)
        names = {bug["bug"] for bug in members}
        needed = [row["check"] for row in checks if row["alone"] and names >= set(row["alone"])]
        most = ", ".join(check for check, _ in seen_by.most_common(4))
        family_rows.append([family, len(members), seen, most, _format_names(needed)])
    levels = collections.Counter(
        "not seen" if isinstance(seen, str) else seen[3] if len(seen) > 3 else "quick" for seen in beyond.values()
    )
    return "\n\n".join(
        [
            "# What the checks see",
            _format_source("../../conformance/sensitivity/detection_table.json"),
            "A *planted bug* is a small mistake in an otherwise correct kernel. A check *sees* a bug if it fails the "
            "kernel with that bug. The planted bugs of `tests/planted` are the main bank, except those in "
            "`tests/planted/beyond`.",
            f"{len(bugs)} planted bugs of the main bank were judged at the level `{table['level']}`. "
            f"{'All' if not unseen else f'All but {len(unseen)}'} are seen by some check. "
            "[How sensitive the gate is](../sensitivity.md) explains the figures. [Planted bugs](planted-bugs.md) "
            "lists every bug.",
            _format_provenance({**measured, "versions": f"{versions}"}),
            "## By check",
            "Judging a bug stops once two checks have seen it. So a check may see more bugs than are counted here: "
            "it may never have judged them. The last column lists bugs that no other check saw.",
            _format_table(
                ["check", "bugs seen", "seconds of all measurements", "bugs that only this check saw"],
                [
                    [f"`{row['check']}`", row["kills"], f"{row['seconds']:.0f}", _format_names(row["alone"])]
                    for row in checks
                ],
                "lrrl",
            ),
            "## By family",
            "A family is a group of bugs in the same feature or part of a kernel. The last column lists checks that no "
            "bug of another family needs: without the family, such a check would have no bug that it alone sees.",
            _format_table(
                ["family", "bugs", "bugs seen", "checks that saw most of them", "checks that it alone needs"],
                family_rows,
                "lrrll",
            ),
            "## The smallest error that is seen",
            "One place of a correct computation is multiplied by `1 + error`, and the results are judged. The first "
            "column names the place. The figures are the smallest error that fails in some case, by the dtype of the "
            "operands. The check `ensemble` judges the results whose names end in `.bias` or `.spread`.",
            _format_table(*_list_resolutions(table["resolution"])),
            "## Bugs beyond the grids",
            f"`tests/planted/beyond` has {len(beyond)} more bugs. They were written without looking at the cases that "
            "are judged, or to exploit what these cases left out at that time. "
            f"At the level `quick`, {levels['quick']} of them are seen. The level `standard` sees {levels['standard']} "
            "more.",
            "## Bugs that are not seen",
            _format_table(
                ["bug", "why it is not seen"],
                [[f"`{name}`", why] for name, why in beyond.items() if isinstance(why, str)],
            ),
        ]
    )


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


def _build_bug_page(measured: Mapping[str, Any]) -> str:
    """Build the page that lists every planted bug of the main bank."""
    table = _read_json("conformance/sensitivity/detection_table.json")
    versions = ", ".join(f"{name} {value}" for name, value in table["environment"].items())
    parts = [
        "# Planted bugs",
        _format_source("../../conformance/sensitivity/detection_table.json"),
        "A *planted bug* is a small mistake in an otherwise correct kernel. Each kernel has one. `tests/planted` has "
        "the code of each bug, and says there what is wrong. The reference names the real project that had the bug, "
        "or what the bug was inferred from. The last column has the checks that failed the kernel. It lists only a "
        "few, because judging stops once two checks have failed it.",
        _format_provenance({**measured, "versions": versions}),
    ]
    families: dict[str, list[list[Any]]] = {}
    for bug in sorted(table["bugs"], key=lambda bug: str(bug["bug"])):
        row = [f"`{bug['bug']}`", bug["reference"], _format_names(list(bug["kills"])[:4])]
        families.setdefault(bug["family"], []).append(row)
    for family, rows in sorted(families.items()):
        parts += [f"## {family.capitalize()}", _format_table(["bug", "reference", "checks that see it"], rows)]
    return "\n\n".join(parts)


def _build_diagnosis_page(measured: Mapping[str, Any]) -> str:
    """Build the page of how often findings and diagnoses are right."""
    kept = json.loads(DIAGNOSIS.read_text(encoding="utf-8"))
    families = kept["families"]
    unknown = _read_toml("unknown_kernels.toml")
    groups = []
    for title, group in (
        ("dense operands", [row for row in families if row["family"] not in STORAGE_FAMILIES]),
        ("stored operands", [row for row in families if row["family"] in STORAGE_FAMILIES]),
    ):
        bugs, none, first, named = (sum(row[name] for row in group) for name in ("bugs", "none", "first", "named"))
        called = bugs - none
        groups.append(
            [
                title,
                bugs,
                called,
                f"{first} ({first / called:.0%})",
                f"{named} ({named / called:.0%})",
                f"{first / bugs:.0%}, {named / bugs:.0%}",
            ]
        )
    names = ("bugs", "first", "named", "none", "alone")
    rows = [[row["family"], *(row[name] for name in names), ", ".join(row["others"])] for row in families]
    return "\n\n".join(
        [
            "# How often findings and diagnoses are right",
            _format_source("data/diagnosis.json"),
            "A *finding* is a group of failures that one cause explains. The *bank* is this project's set of planted "
            "bugs, which are small mistakes in otherwise correct kernels. For a finding, the run names up to three "
            "planted bugs with similar errors. This naming is called the diagnosis. "
            "[Findings](../findings.md) explains how findings and diagnoses are made.",
            "## Each planted bug, diagnosed by the others",
            "A *signature* is the pattern of a kernel's errors on a fixed set of cases, the signature cases. "
            f"{kept['bugs']} bugs have a signature. Each was diagnosed as if it were unknown, so only other bugs "
            "could be named. A name is right if that bug is of the same family or kind, or if its errors have the same "
            "numbers. For stored operands (pages, packed sequences, latents, ring buffers and quantised caches), the "
            "same family is not enough. Two groups of bugs are left out: those that are right on all signature cases, "
            "and those in code around a kernel.",
            "Percentages in brackets refer to the bugs that are similar to some other bug. The last column has the "
            "same two shares of all bugs. The bank has one bug of each family, kind and set of checks that see it, so "
            "a bug that is left out often has no near relative. [Kernels that are in no bank]"
            "(#kernels-that-are-in-no-bank) are named more often.",
            _format_table(
                [
                    "operands",
                    "bugs",
                    "similar to another bug",
                    "first name right",
                    "one of three names right",
                    "shares of all bugs",
                ],
                groups,
                "lrrrrr",
            ),
            "The same by family. If a bug is the only one of its kind, no name could be right for it.",
            _format_table(
                [
                    "family",
                    "bugs",
                    "first name right",
                    "one of three names right",
                    "similar to no other bug",
                    "only one of its kind",
                    "families that were named first by mistake",
                ],
                rows,
                "lrrrrrl",
            ),
            *(
                f"The first name is right for no bug of the family *{row['family']}*. Bugs in it: {row['bugs']}. Only "
                f"ones of their kind: {row['alone']}."
                for row in families
                if not row["first"]
            ),
            _format_provenance(measured),
            f"## {unknown['title']}",
            unknown["text"].strip(),
            *(_format_section(table, "###") for table in unknown["table"]),
        ]
    )


def _build_limit_page(measured: Mapping[str, Any]) -> str:
    """Build the page of what correct kernels reached."""
    calibration = _read_json("conformance/truth/calibration.json")
    source = calibration["provenance"]
    levels = source["name"].replace("at ", "at the level ")
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
    return "\n\n".join(
        [
            "# What correct kernels reach",
            _format_source("../../conformance/truth/calibration.json"),
            "A *ratio* is the error of a result in units of its bound. The bound is the rounding error that a correct "
            "kernel may have there. Of each result, the ratio of its worst element is judged, and the root mean square "
            "(rms) of the ratios of all elements.",
            f"Correct kernels were judged {levels}. This gave "
            f"{source['judgements']:,} records. The table has the largest ratios among them. "
            "[Limits](../numerics.md#6-the-limits) follow from these ratios by fixed rules. The last two columns name "
            "the kernel and the case that reached the largest ratio.",
            _format_table(
                ["result", "dtype", "records", "largest ratio", "largest rms", "kernel", "case"], rows, "llrrrll"
            ),
            "These correct kernels were judged: " + ", ".join(f"`{name}`" for name in source["implementations"]) + ".",
            _format_provenance({**measured, "versions": f"jax {source['jax']}"}),
        ]
    )


def _build_exploit_page(measured: Mapping[str, Any]) -> str:
    """Build the page of kernels that try to be called right."""
    sys.path.insert(0, str(ROOT))
    from tests.exploits.bank import BANK

    data = _read_toml("exploits.toml")
    families: dict[str, list[Any]] = {name: [] for name in data["families"]}
    for exploit in BANK:
        families[exploit.name.partition("/")[0]].append(exploit)
    right = [f"`{exploit.name}`" for exploit in BANK if exploit.right]
    parts = [
        "# Kernels that try to be called right",
        _format_source("data/exploits.toml"),
        f"`tests/exploits` has {len(BANK)} kernels that try to deceive the judge, for example by replacing the "
        "comparison or by ending the process early. None of them passes with a wrong result. "
        f"{len(right)} pass because their results are in fact right: {', '.join(right)}. "
        "[The sandbox and its limits](../isolation.md) explains what stops the others.",
        _format_table(
            ["family", "what its kernels do", "kernels"],
            [[f"`{name}`", text, len(families[name])] for name, text in data["families"].items()],
            "llr",
        ),
        _format_provenance(measured),
        "## Attacks, and what stops them",
        _format_table(
            ["what a kernel tries", "what stops it", "what it can still do"],
            [[row["attempt"], row["stopped_by"], row["remains"]] for row in data["attack"]],
        ),
        "## All kernels",
    ]
    for name, members in families.items():
        rows = [[f"`{each.name.partition('/')[2]}`", each.about, each.published] for each in members]
        parts += [f"### {name.capitalize()}", _format_table(["kernel", "what it does", "published example"], rows)]
    return "\n\n".join(parts)


def build_chip_page(folder: Path) -> str:
    """Build the page of the chips: one section for each file of `docs/measure_on_chip.py` in a folder."""
    parts = [
        "# Speed on chips",
        _format_source("data/chips"),
        "A ratio is the time of our kernel divided by that of the published one. **Below 1, ours is faster.** Calls "
        "are in bf16. The window is causal and has 1024 keys. Only results are shown: the results of the timed program "
        "agreed with the oracle, and the kernel was judged green in the same run. A section says where this was not "
        "recorded. To measure a chip, see [how to](../how-to/on-the-chip.md#5-measure-the-chip).",
    ]
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
    case = _parse_case(case_id)
    heads = (
        str(case.num_q_heads) if case.num_q_heads == case.num_kv_heads else f"{case.num_q_heads} on {case.num_kv_heads}"
    )
    depth = str(case.head_dim) if case.head_dim == case.v_head_dim else f"{case.head_dim}, values {case.v_head_dim}"
    mask = {"full": "none", "causal": "causal"}.get(case.mask, "window")
    return [str(case.batch), f"{case.q_length:,}", heads, depth, mask]


def _list_decode_cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of one decoding kernel: the call, the kernel, its time, and its rate."""
    case = _parse_case(row["case"])
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


def _parse_case(case_id: str) -> Any:
    """Parse the id of a case. The package is found from the root of the repository."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from cases.case_id import parse_case_id

    return parse_case_id(case_id)


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


def _format_source(file: str) -> str:
    """Format the remark for whoever would edit the page."""
    return f"<!-- Generated by docs/generate_measurements.py from {file}. Edit that, and run the script. -->"


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


def main() -> None:
    """Write all pages."""
    parser = argparse.ArgumentParser(description="Generate the pages of docs/measurements.")
    parser.add_argument("--measure", action="store_true", help="first diagnose each planted bug by the others")
    if parser.parse_args().measure:
        measure_diagnoses()
    for name, text in build_pages().items():
        (PAGES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
