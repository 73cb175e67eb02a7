"""Implement `expect`: print a known-failure entry for each finding, with the reason left blank."""

from __future__ import annotations

import argparse
import re

from cases.operand_registry import OPTIONAL
from conformance.judging.expected_failures import format_toml, suggest_entries, suggest_entries_by_cause
from conformance.judging.run_aggregation import aggregate_runs
from conformance.session import input_files
from conformance.session.failures import CannotJudge
from reports.causes import root_causes
from reports.causes.case_levels import parse_fields
from reports.causes.finding import Finding
from reports.causes.finding_text import format_title
from reports.printable_text import make_printable

_PARTS = frozenset({"mask", "distribution", "storage", "front_end", *(operand.field for operand in OPTIONAL)})
"""The fields of a case that are parts of its id behind the shape."""


def expect(arguments: argparse.Namespace) -> int:
    """Print a known-failure entry for each finding or set of failing cases, to be pasted into `pyproject.toml`."""
    recorded = [one for name in arguments.records for one in input_files.read_recorded_runs(name)]
    found, info = aggregate_runs(recorded, command="expect")
    if not found:
        raise CannotJudge(f"there is no record in {', '.join(arguments.records)}")
    known = sorted({record.implementation for record in found})
    for name in arguments.impl:
        if name not in known:
            raise CannotJudge(
                f"--impl={make_printable(name)} has no record in these files: known are {', '.join(known)}"
            )
    wanted = [record for record in found if not arguments.impl or record.implementation in arguments.impl]
    if arguments.all:
        entries = suggest_entries(wanted)
    else:
        causes = root_causes.find_root_causes(wanted, info.probes)
        named = [(format_title(cause), build_query(cause), cause.records) for cause in causes]
        entries = suggest_entries_by_cause(wanted, named)
    print("\n".join(format_toml(entry) for entry in entries), end="")
    return 0


def build_query(cause: Finding) -> str:
    """Build a query of an id's parts that a finding needs, such as `*/softcap*`; sizes are no parts; empty if none."""
    names = {name for level in cause.levels or () for name in level.fields} & _PARTS
    fields = [parse_fields(record.case) or {} for record in cause.own]
    found = []
    for part in cause.own[0].case.split("/"):  # in the order of the id
        name = next((name for name in names if fields[0].get(name) == part), None)
        if name is not None:
            words = {re.sub("[^a-z].*", "", one.get(name, "")) for one in fields}
            found.append(words.pop() if len(words) == 1 else "")
    return "*/" + "/".join(f"{word}*" for word in found) if found and all(found) else ""
