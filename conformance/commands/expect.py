"""`expect`: the table entries for what fails now, with reasons to be filled in."""

from __future__ import annotations

import argparse

from conformance.commands import lookup
from conformance.commands.errors import CannotJudge
from conformance.judging.evidence import gather
from conformance.judging.expectations import entries, toml
from conformance.records import printable


def expect(arguments: argparse.Namespace) -> int:
    """`expect`: print an entry for each group of failures, to be pasted into `pyproject.toml`."""
    recorded = [one for name in arguments.records for one in lookup.recorded(name)]
    found, _ = gather(recorded, command="expect")
    known = sorted({record.implementation for record in found})
    for name in arguments.impl:
        if name not in known:
            raise CannotJudge(f"--impl={printable(name)} has no record in these files: known are {', '.join(known)}")
    wanted = [record for record in found if not arguments.impl or record.implementation in arguments.impl]
    print("\n".join(toml(entry) for entry in entries(wanted)), end="")
    return 0
