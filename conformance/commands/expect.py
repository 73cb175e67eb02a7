"""Implement `expect`: print a known-failure entry for each group of current failures, with the reason left blank."""

from __future__ import annotations

import argparse

from conformance.judging.expected_failures import format_toml, suggest_entries
from conformance.judging.run_aggregation import aggregate_runs
from conformance.records import make_printable
from conformance.session import input_files
from conformance.session.failures import CannotJudge


def expect(arguments: argparse.Namespace) -> int:
    """Print a known-failure entry for each group of failures, to be pasted into `pyproject.toml`."""
    recorded = [one for name in arguments.records for one in input_files.read_recorded_runs(name)]
    found, _ = aggregate_runs(recorded, command="expect")
    known = sorted({record.implementation for record in found})
    for name in arguments.impl:
        if name not in known:
            raise CannotJudge(
                f"--impl={make_printable(name)} has no record in these files: known are {', '.join(known)}"
            )
    wanted = [record for record in found if not arguments.impl or record.implementation in arguments.impl]
    print("\n".join(format_toml(entry) for entry in suggest_entries(wanted)), end="")
    return 0
