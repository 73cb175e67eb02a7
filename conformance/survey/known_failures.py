"""Mark the known failures of a library in the records of a row, when its results are collected.

A new or narrower entry therefore needs no new run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from conformance.judging.settings import ExpectedFailure, Settings, load_expected_failures
from impls.libraries import library_specs
from reports.records import JUDGED, Record

_FOLDER = library_specs.FOLDER / "expected_failures"
_EXPECTATIONS = "expectations"  # the check of records that a run makes of entries, not of the implementation


def find_file(library: str) -> Path | None:
    """Return the file of the known failures of a library; None if it has none."""
    path = _FOLDER / f"{library}.toml"
    return path if path.is_file() else None


@functools.cache
def load_known_failures(library: str) -> tuple[ExpectedFailure, ...]:
    """Load the known failures of a library; none if it has no file of them."""
    path = find_file(library)
    return () if path is None else load_expected_failures(path)


def mark_known_failures(
    records: Sequence[Record], entries: Sequence[ExpectedFailure], environment: Mapping[str, str], level: str
) -> list[Record]:
    """Mark the records of a row by the entries, in place of the entries that were known when it was judged.

    Args:
      environment: the versions of the packages with which it was judged, JAX among them.
      level: the level of the grid. `smoke` has few cases, so failures that depend on the values may not occur.

    Returns:
      The records, then a red one for each entry of which all matching results passed. An entry that matches no result
      is none: the case that it is about may belong to another level.
    """
    jax_version = environment["jax"]
    known = [dataclasses.replace(one, package="") for one in entries if _is_installed(one.package, environment)]
    plain = [Settings.unmark_expected_failure(record) for record in records if record.check != _EXPECTATIONS]
    marked = [Settings(expected_failures=tuple(known)).mark_expected_failures(one, jax_version) for one in plain]
    judged = [record for record in plain if record.verdict in JUDGED]
    asked = tuple(
        entry
        for entry in known
        if not (entry.some and level == "smoke") and any(entry.applies(record, jax_version) for record in judged)
    )
    return [*marked, *Settings(expected_failures=asked).find_stale_entries(marked, jax_version)]


def _is_installed(requirement: str, environment: Mapping[str, str]) -> bool:
    """Return whether the environment has the package in a version of the range; true if none is asked for."""
    if not requirement:
        return True
    asked = Requirement(requirement)
    return asked.name in environment and asked.specifier.contains(environment[asked.name], prereleases=True)
