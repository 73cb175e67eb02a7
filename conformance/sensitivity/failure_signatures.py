"""Measure signatures: how wrong a kernel is on each of `cases.signature_cases`. Those of planted bugs are in a file.

For each case that the kernel supports, a signature has each judged result: None where it is right, the size of its
ratio where it is wrong. Two kernels that compute the same wrong thing have the same signature. So the planted bug with
the nearest signature names what may be wrong with a kernel (`conformance.sensitivity.diagnosis`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cases.signature_cases import SIGNATURE_CASES
from conformance.check_api.rotation import PULLBACKS, Rotation
from conformance.checks import CHECKS_BY_NAME
from conformance.contract import Implementation
from conformance.judging.job import Job
from conformance.records import ERROR, JUDGED, RED, Record
from conformance.sensitivity.bank import PlantedBug

SCHEMA = "attention-conformance/signatures/1"
FILE = Path(__file__).with_name("failure_signatures.json")

# One backward pass, of the plain call, which every kernel has. A case that asks for `gradients_lse` has both.
_PLAIN_ROTATION = Rotation(pullbacks=("plain",), cotangents=(), laws=(), poisons=("nan",))
_BOTH_ROTATION = dataclasses.replace(_PLAIN_ROTATION, pullbacks=PULLBACKS)
# The step of kept logarithms: 1% of a ratio, which is what two orders of summation may differ by.
_SIZE_STEP = 0.005
_INFINITE_SIZE = 40.0
"""The logarithm that stands for an infinite ratio, for NaN and for an error."""
# A result that a later check finds wrong by ten times as much is wrong in another way.
_MUCH_LARGER = 1.0

CHECK_SEPARATOR = "@"
"""Stands between a result and a later check that found it wrong in another way than the first check."""

Sizes = Mapping[str, float | None]
"""For each judged result, the base-10 logarithm of its ratio where it is wrong; None where it is right."""
Element = tuple[str, str]
"""The id of a case, and the name of a result."""


@dataclasses.dataclass(frozen=True)
class Signature:
    """How wrong a kernel is: sizes by the id of each judged case."""

    sizes: Mapping[str, Sizes]

    @property
    def wrong(self) -> dict[Element, float]:
        """The wrong results, each with the size of its ratio."""
        every = ((case, name, size) for case, sizes in self.sizes.items() for name, size in sizes.items())
        return {(case, name): size for case, name, size in every if size is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownBug:
    """A planted bug with its signature; `name`, `family`, `kind` and `reference` as planted."""

    name: str
    family: str
    kind: str
    reference: str
    signature: Signature


def iter_signature_jobs(implementation: Implementation) -> Iterator[Job]:
    """Yield the jobs that measure the signature of a kernel."""
    for signature_case in SIGNATURE_CASES:
        if implementation.supports(signature_case.case) is None:
            turn = _BOTH_ROTATION if "gradients_lse" in signature_case.checks else _PLAIN_ROTATION
            yield Job(
                implementation, signature_case.case, tuple(CHECKS_BY_NAME[name] for name in signature_case.checks), turn
            )


def build_signature(records: Iterable[Record]) -> Signature:
    """Build the signature from records of these jobs; other records are left out."""
    checks = {signature_case.case.id: signature_case.checks for signature_case in SIGNATURE_CASES}
    by_case: dict[str, list[Record]] = {}
    for record in records:
        if record.check in checks.get(record.case, ()):
            by_case.setdefault(record.case, []).append(record)
    sizes = {case: _compute_sizes(case_records) for case, case_records in by_case.items()}
    return Signature({case: case_records for case, case_records in sizes.items() if case_records})


def _compute_sizes(records: Iterable[Record]) -> dict[str, float | None]:
    """Compute the size of each result of a case.

    A result that one check finds wrong is wrong in later checks too. It has a further entry only for a check that finds
    it much more wrong.
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
    """Return the logarithm of a record's ratio, rounded to the step."""
    if record.ratio is None or not math.isfinite(record.ratio):
        return _INFINITE_SIZE
    return round(round(math.log10(max(record.ratio, 1.0)) / _SIZE_STEP) * _SIZE_STEP, 3)


def measure_known_bug(bug: PlantedBug) -> KnownBug:
    """Measure the signature of a planted bug."""
    from conformance.sensitivity.examination import create_single_look_runner

    runner = create_single_look_runner()
    measured = build_signature(record for job in iter_signature_jobs(bug.build()) for record in runner.stream(job))
    return KnownBug(name=bug.name, family=bug.family, kind=bug.kind, reference=bug.reference, signature=measured)


def save_signatures(known_bugs: Iterable[KnownBug], path: Path = FILE) -> None:
    """Write signatures, one bug a line, by name.

    A row groups the numbers of its cases by their results. A right result is its name alone; a wrong one has its size
    too. Most cases of a bug share the same results, all right.
    """
    rows = [
        [bug.name, bug.family, bug.kind, bug.reference, _pack_signature(bug.signature)]
        for bug in sorted(known_bugs, key=lambda bug: bug.name)
    ]
    cases = ",\n".join(f"  {json.dumps(signature_case.case.id)}" for signature_case in SIGNATURE_CASES)
    lines = ",\n".join(f"  {json.dumps(row, separators=(',', ':'))}" for row in rows)
    text = f'{{\n "schema": {json.dumps(SCHEMA)},\n "cases": [\n{cases}\n ],\n "bugs": [\n{lines}\n ]\n}}\n'
    path.write_text(text, encoding="utf-8")


def load_signatures(path: Path = FILE) -> list[KnownBug]:
    """Load the kept signatures, for cases that still exist; empty if there is no file."""
    if not path.is_file():
        return []
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if table.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {table.get('schema')!r}, must be {SCHEMA!r}")
    present = {one.case.id for one in SIGNATURE_CASES}
    case_ids = [case if case in present else None for case in table["cases"]]
    return [
        KnownBug(
            name=name, family=family, kind=kind, reference=reference, signature=_unpack_signature(packed, case_ids)
        )
        for name, family, kind, reference, packed in table["bugs"]
    ]


def _pack_signature(signature: Signature) -> dict[str, list[int]]:
    """Group the numbers of cases by the text of their sizes."""
    numbers = {signature_case.case.id: number for number, signature_case in enumerate(SIGNATURE_CASES)}
    packed: dict[str, list[int]] = {}
    for case, sizes in signature.sizes.items():
        packed.setdefault(" ".join(_format_sizes(sizes)), []).append(numbers[case])
    return packed


def _format_sizes(sizes: Sizes) -> Iterator[str]:
    """Yield each result as text, with its size if it is wrong."""
    for name, size in sizes.items():
        yield name if size is None else f"{name}:{size:.4g}"


def _unpack_signature(packed: Mapping[str, list[int]], case_ids: Sequence[str | None]) -> Signature:
    """Restore a signature from its row; cases that no longer exist have no id, and are left out."""
    sizes: dict[str, Sizes] = {}
    for words, numbers in packed.items():
        parsed = _parse_sizes(words)
        sizes |= {case: parsed for number in numbers if (case := case_ids[number]) is not None}
    return Signature(sizes)


@functools.lru_cache(maxsize=1 << 14)
def _parse_sizes(words: str) -> Sizes:
    """Parse the text of sizes."""
    split = (word.partition(":") for word in words.split())
    return {name: float(size) if size else None for name, _, size in split}
