"""Generate the pages of `docs/measurements` from files of results.

Run it from the root of the repository:

    python docs/generate_measurements.py            # write the pages
    python docs/generate_measurements.py --measure  # first diagnose each planted bug by the others: a minute

Results are the JSON files of `conformance/sensitivity`, `conformance/truth` and `tests/planted`, and the TOML files of
`docs/measurements/data`. A test fails where a page is not what this script writes.
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
DIAGNOSIS = DATA / "diagnosis.json"
STORAGE_FAMILIES = ("latent", "packed", "paged", "quantised caches", "ring")

# Pages that are a file of tables, and the title of each in the index.
TABLE_PAGES = {
    "tpu-cycles.md": ("tpu_cycles.toml", "Static cycles of our TPU kernels, and of JAX's and tokamax's."),
    "gpu-bounds.md": ("gpu_bounds.toml", "What GPU kernels issue, and the bounds of their speed."),
    "gpu-times.md": ("gpu_times.toml", "Times and verdicts on an H100 and an H200."),
}
OTHER_PAGES = {
    "detection.md": "Which check sees which planted bugs, and the smallest error that is seen.",
    "planted-bugs.md": "Every planted bug: where a real project had it, and which checks see it.",
    "diagnosis.md": "How often a finding and the planted bugs that it names are right.",
    "limits.md": "The largest ratios of correct kernels, and the limits that follow.",
    "exploits.md": "Kernels that are wrong and try to be called right.",
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
    pages["index.md"] = _build_index()
    return {name: re.sub(r"\n{3,}", "\n\n", text).strip() + "\n" for name, text in pages.items()}


def measure_diagnoses() -> None:
    """Diagnose each planted bug by all others, and store the counts by family in `DIAGNOSIS`."""
    from conformance.sensitivity import diagnosis, failure_signatures

    bank = list(failure_signatures.load_signatures())
    rows = [dataclasses.asdict(row) for row in diagnosis.measure_confusions(bank)]
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    DIAGNOSIS.write_text(f'{{"bugs": {len(bank)}, "families": [\n{lines}\n]}}\n', encoding="utf-8")


def _build_index() -> str:
    """Build the list of pages."""
    listed = {name: text for name, (_, text) in TABLE_PAGES.items()} | OTHER_PAGES
    rows = [[f"[{name.removesuffix('.md')}]({name})", text] for name, text in listed.items()]
    return (
        "# Measurements\n\n"
        "These pages are generated from files of results (`docs/generate_measurements.py`). Each says when, where "
        "and how it "
        "was measured.\n\n" + _format_table(["page", "what it has"], rows)
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
    redundancy = _read_json("conformance/sensitivity/redundancy.json")["bugs"]
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
        family_rows.append([family, len(members), seen, ", ".join(check for check, _ in seen_by.most_common(4))])
    once = [[f"`{name}`", f"`{seen[0][0]}`", f"`{seen[0][1]}`"] for name, seen, _ in redundancy if len(seen) == 1]
    levels = collections.Counter(
        "not seen" if isinstance(seen, str) else seen[3] if len(seen) > 3 else "quick" for seen in beyond.values()
    )
    return "\n\n".join(
        [
            "# What the checks see",
            _format_source("../../conformance/sensitivity/detection_table.json"),
            f"{len(bugs)} planted bugs of the main bank were judged at `{table['level']}`. "
            f"{'All' if not unseen else f'All but {len(unseen)}'} are seen. "
            "[How sensitive the gate is](../sensitivity.md) explains the figures. [All bugs](planted-bugs.md) are "
            "listed too.",
            _format_provenance({**measured, "versions": f"{versions}"}),
            "## By check",
            "A bug is judged until two checks have seen it, so the counts say what was seen first. *Only here* has "
            "bugs that "
            "no other check saw. Seconds are those of judging all bugs.",
            _format_table(
                ["check", "bugs seen", "seconds", "only here"],
                [
                    [f"`{row['check']}`", row["kills"], f"{row['seconds']:.0f}", _format_names(row["alone"])]
                    for row in checks
                ],
                "lrrl",
            ),
            "## By family",
            _format_table(["family", "bugs", "seen", "most often by"], family_rows, "lrrl"),
            "## The smallest error that is seen",
            "A correct result is changed in one place by a relative error. The figure is the smallest error that "
            "fails. "
            "`ensemble` judges names with `.bias` and `.spread`.",
            _format_table(*_list_resolutions(table["resolution"])),
            "## Bugs that one case alone sees",
            f"Of {len(redundancy)} bugs, {len(redundancy) - len(once)} are seen by two cases that share no compiled "
            "program. "
            "The others are seen in one case of `quick`:",
            _format_table(["bug", "check", "result"], once),
            "## Bugs beyond the grids",
            f"{len(beyond)} bugs were written for what the grids of their time left out, or without a look at the "
            "cases "
            f"(`tests/planted/beyond`). At `quick`, {levels['quick']} of them are seen, and at `standard` "
            f"{levels['standard']} more.",
            "## Bugs that are not seen",
            _format_table(["bug", "why"], [[f"`{name}`", why] for name, why in beyond.items() if isinstance(why, str)]),
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
    return ["error in", "seen in", *dtypes], cells, "ll" + "r" * len(dtypes)


def _build_bug_page(measured: Mapping[str, Any]) -> str:
    """Build the page that lists every planted bug of the main bank."""
    table = _read_json("conformance/sensitivity/detection_table.json")
    versions = ", ".join(f"{name} {value}" for name, value in table["environment"].items())
    parts = [
        "# Planted bugs",
        _format_source("../../conformance/sensitivity/detection_table.json"),
        "Each bug is planted alone in a correct kernel. `tests/planted` has the code and says what is wrong. The "
        "reference "
        "names a real project that had the bug, or what it was inferred from. At most a few checks are listed, "
        "since judging "
        "stops once two have seen it.",
        _format_provenance({**measured, "versions": versions}),
    ]
    families: dict[str, list[list[Any]]] = {}
    for bug in sorted(table["bugs"], key=lambda bug: str(bug["bug"])):
        row = [f"`{bug['bug']}`", bug["reference"], _format_names(list(bug["kills"])[:4])]
        families.setdefault(bug["family"], []).append(row)
    for family, rows in sorted(families.items()):
        parts += [f"## {family.capitalize()}", _format_table(["bug", "reference", "seen by"], rows)]
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
            "[Findings](../findings.md) explains what is measured here.",
            "## Each planted bug, diagnosed by the others",
            f"{kept['bugs']} bugs have signatures. Each was diagnosed as if it were unknown. A name is right if it "
            "is of the "
            "same family or kind, or wrong by the same numbers. For stored operands only the kind counts. Left out "
            "are bugs "
            "that are right on all signature cases, and bugs of code around a kernel.",
            _format_table(
                ["bugs of", "bugs", "similar to some bug", "first name right", "one of three right", "of all bugs"],
                groups,
                "lrrrrr",
            ),
            "By family. *None* counts bugs that are similar to no other. *Alone* counts bugs without another of "
            "their kind, "
            "which no name could be right for.",
            _format_table(
                ["family", "bugs", "first", "one of three", "none", "alone", "else first named"], rows, "lrrrrrl"
            ),
            *(
                f"For no bug of *{row['family']}* is the first name right. Of these {row['bugs']} bugs, {row['alone']} "
                "have no other of their kind."
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
            f"The largest ratios of correct kernels in {source['judgements']:,} records, {source['name']}. "
            "[Limits](../numerics.md#6-the-limits) follow from them by fixed rules.",
            _format_table(
                ["result", "dtype", "records", "largest ratio", "largest rms", "by", "on the case"], rows, "llrrrll"
            ),
            "The kernels: " + ", ".join(f"`{name}`" for name in source["implementations"]) + ".",
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
        f"Of the {len(BANK)} kernels in `tests/exploits`, none gets away with a wrong result. {len(right)} are "
        "called right, "
        f"because their numbers are right: {', '.join(right)}. [The sandbox and its limits](../isolation.md) "
        "explains why.",
        _format_table(
            ["family", "what they do", "kernels"],
            [[f"`{name}`", text, len(families[name])] for name, text in data["families"].items()],
            "llr",
        ),
        _format_provenance(measured),
        "## Attacks, and what stops them",
        _format_table(
            ["attempt", "stopped by", "what remains"],
            [[row["attempt"], row["stopped_by"], row["remains"]] for row in data["attack"]],
        ),
        "## All kernels",
    ]
    for name, members in families.items():
        rows = [[f"`{each.name.partition('/')[2]}`", each.about, each.published] for each in members]
        parts += [f"### {name.capitalize()}", _format_table(["kernel", "what it does", "seen in"], rows)]
    return "\n\n".join(parts)


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
    return f"{text} To measure it again:\n\n```sh\n{commands}\n```"


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
