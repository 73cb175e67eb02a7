"""Measure the error profile of a kernel: how large its errors are on fixed cases (`cases.error_profile_cases`).

An error profile has an entry for each supported case and each judged result of the case (`out`, `dq`, ...). The entry
is None if the result is right. Otherwise it is the base-10 logarithm of the ratio, which is the error in units of the
bound. Two kernels with the same mistake have the same error profile. So the planted bug with the most similar error
profile shows what may be wrong with a kernel (`conformance.sensitivity.diagnosis`). The error profiles of planted bugs
are stored in `error_profiles.json`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cases.error_profile_cases import ERROR_PROFILE_CASES
from conformance.check_api.subchecks import PULLBACKS, Subchecks
from conformance.checks import CHECKS_BY_NAME
from conformance.judging.job import Job
from impls.contract.implementation import Implementation
from reports.records import ERROR, JUDGED, RED, Record

SCHEMA = "attention-conformance/signatures/1"
FILE = Path(__file__).with_name("error_profiles.json")

# Differentiate only the call without residuals, which every kernel supports. Cases with the check `gradients_lse` also
# differentiate the call that returns residuals.
_PLAIN_SUBCHECKS = Subchecks(pullbacks=("plain",), cotangents=(), laws=(), poisons=("nan",), visible_nan=False)
_BOTH_SUBCHECKS = dataclasses.replace(_PLAIN_SUBCHECKS, pullbacks=PULLBACKS)
# Logarithms are rounded to multiples of this step, about 1% of a ratio: a kernel that only sums in another order may
# have a ratio that differs by as much.
_SIZE_STEP = 0.005
INFINITE_SIZE = 40.0
"""The logarithm that stands for an infinite ratio, for NaN, and for a call that raised."""
# If a later check finds a ratio more than ten times as large (in logarithms), the result has a second kind of error.
_MUCH_LARGER = 1.0

CHECK_SEPARATOR = "@"
"""Separator in names such as `dq@poison`: `dq` has a much larger error in the later check `poison`."""

Sizes = Mapping[str, float | None]
"""The errors of one case, by name of the result: base-10 logarithm of the ratio, or None if the result is right."""
Element = tuple[str, str]
"""Key of one result in an error profile: id of the case, and name of the result."""


@dataclasses.dataclass(frozen=True)
class ErrorProfile:
    """The errors of a kernel on the error profile cases.

    Attributes:
      sizes: by id of a judged case, the size of each result's error (`Sizes`).
    """

    sizes: Mapping[str, Sizes]

    @property
    def wrong(self) -> dict[Element, float]:
        """The wrong results of all cases, each with the base-10 logarithm of its ratio."""
        every = ((case, name, size) for case, sizes in self.sizes.items() for name, size in sizes.items())
        return {(case, name): size for case, name, size in every if size is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownBug:
    """A planted bug with its measured error profile; the other fields are copied from `PlantedBug`."""

    name: str
    family: str
    kind: str
    reference: str
    profile: ErrorProfile


def iter_profile_jobs(implementation: Implementation) -> Iterator[Job]:
    """Yield the jobs (a case with its checks) that measure a kernel's error profile; unsupported cases are skipped."""
    for profile_case in ERROR_PROFILE_CASES:
        if implementation.supports(profile_case.case) is None:
            selection = _BOTH_SUBCHECKS if "gradients_lse" in profile_case.checks else _PLAIN_SUBCHECKS
            yield Job(
                implementation,
                profile_case.case,
                tuple(CHECKS_BY_NAME[name] for name in profile_case.checks),
                selection,
            )


def build_profile(records: Iterable[Record]) -> ErrorProfile:
    """Build a kernel's error profile from the records of `iter_profile_jobs`; other records are ignored."""
    checks = {profile_case.case.id: profile_case.checks for profile_case in ERROR_PROFILE_CASES}
    by_case: dict[str, list[Record]] = {}
    for record in records:
        if record.check in checks.get(record.case, ()):
            by_case.setdefault(record.case, []).append(record)
    sizes = {case: _compute_sizes(case_records) for case, case_records in by_case.items()}
    return ErrorProfile({case: case_records for case, case_records in sizes.items() if case_records})


def _compute_sizes(records: Iterable[Record]) -> dict[str, float | None]:
    """Compute the size of the error of each result of one case.

    The first check that judges a result gives its entry. A result that is wrong in one check is usually wrong in later
    checks too. So a later check adds an entry (`dq@poison`) only if the result was right before, or if the error is
    much larger.
    """
    sizes: dict[str, float | None] = {}
    for record in records:
        if record.verdict in JUDGED or record.verdict == ERROR:
            size = _compute_size(record) if record.verdict in RED else None
            name, *_ = record.observable.split(".")
            if name not in sizes:
                sizes[name] = size
            elif size is not None and ((first := sizes[name]) is None or size > first + _MUCH_LARGER):
                separate = f"{name}{CHECK_SEPARATOR}{record.check}"
                sizes[separate] = max(size, sizes.get(separate) or 0.0)
    return sizes


def _compute_size(record: Record) -> float:
    """Return the base-10 logarithm of a record's ratio, rounded to `_SIZE_STEP`."""
    if record.ratio is None or not math.isfinite(record.ratio):
        return INFINITE_SIZE
    return round(round(math.log10(max(record.ratio, 1.0)) / _SIZE_STEP) * _SIZE_STEP, 3)


def load_profiles(path: Path = FILE) -> list[KnownBug]:
    """Load the stored error profiles of planted bugs; empty if the file does not exist.

    Cases that are no longer error profile cases are dropped.

    Raises:
      ValueError: if the file has another schema.
    """
    if not path.is_file():
        return []
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if table.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {table.get('schema')!r}, must be {SCHEMA!r}")
    present = {one.case.id for one in ERROR_PROFILE_CASES}
    case_ids = [case if case in present else None for case in table["cases"]]
    return [
        KnownBug(name=name, family=family, kind=kind, reference=reference, profile=_unpack_profile(packed, case_ids))
        for name, family, kind, reference, packed in table["bugs"]
    ]


def _unpack_profile(packed: Mapping[str, list[int]], case_ids: Sequence[str | None]) -> ErrorProfile:
    """Convert a row of the file back to an error profile; as `tests.bank.error_profiles_command` packs it.

    Cases that no longer exist have no id, and are left out.
    """
    sizes: dict[str, Sizes] = {}
    for words, numbers in packed.items():
        parsed = _parse_sizes(words)
        sizes |= {case: parsed for number in numbers if (case := case_ids[number]) is not None}
    return ErrorProfile(sizes)


@functools.lru_cache(maxsize=1 << 14)
def _parse_sizes(words: str) -> Sizes:
    """Parse the text of a case's results; `name` if it is right, `name:size` if it is wrong."""
    split = (word.partition(":") for word in words.split())
    return {name: float(size) if size else None for name, _, size in split}
