"""Signatures: how wrong a kernel is on each of `cases.signature_cases`. Those of planted bugs are kept in a file.

A signature holds, of each case that the kernel supports, each result that was judged: nothing where it is right, the
size of its ratio where it is not. A kernel that computes the same wrong thing as another has the same signature, so
whose a kernel's comes closest to names what may be wrong (`conformance.sensitivity.diagnosis`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
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

# One backward pass, of the call that every kernel has; the other too where a case asks for that of `logsumexp`.
_PLAIN_ROTATION = Rotation(pulled=("plain",), cotangents=(), laws=(), poisons=("nan",))
_BOTH_ROTATION = dataclasses.replace(_PLAIN_ROTATION, pulled=PULLBACKS)
# A ratio is kept as its logarithm in steps of so much: 1%, which is what two orders of summation may differ by.
_SIZE_STEP = 0.005
_INFINITE_SIZE = 40.0
"""The logarithm that stands for an infinite ratio, for NaN and for an error."""
# What a later check finds wrong by more than ten times as much is wrong in another way.
_MUCH_LARGER = 1.0

CHECK_SEPARATOR = "@"
"""What stands between a result and the check that found it wrong in another way than the first that judged it."""

Sizes = Mapping[str, float | None]
"""Of each result that was judged, the logarithm to base 10 of its ratio where it is wrong, none where it is right."""
Element = tuple[str, str]
"""The id of a case, and a result."""


@dataclasses.dataclass(frozen=True)
class Signature:
    """How wrong a kernel is: the sizes by the id of each case that was asked."""

    sizes: Mapping[str, Sizes]

    @property
    def wrong(self) -> dict[Element, float]:
        """What is wrong, and how large the ratio is."""
        every = ((case, name, size) for case, sizes in self.sizes.items() for name, size in sizes.items())
        return {(case, name): size for case, name, size in every if size is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownBug:
    """A planted bug with its signature: `name`, `family`, `kind` and `reference` as planted."""

    name: str
    family: str
    kind: str
    reference: str
    signature: Signature


def iter_signature_jobs(implementation: Implementation) -> Iterator[Job]:
    """What is judged for the signature of a kernel."""
    for asked in SIGNATURE_CASES:
        if implementation.supports(asked.case) is None:
            turn = _BOTH_ROTATION if "gradients_lse" in asked.checks else _PLAIN_ROTATION
            yield Job(implementation, asked.case, tuple(CHECKS_BY_NAME[name] for name in asked.checks), turn)


def build_signature(records: Iterable[Record]) -> Signature:
    """The signature that records of these jobs make; other records say nothing."""
    checks = {asked.case.id: asked.checks for asked in SIGNATURE_CASES}
    by_case: dict[str, list[Record]] = {}
    for record in records:
        if record.check in checks.get(record.case, ()):
            by_case.setdefault(record.case, []).append(record)
    sizes = {case: _compute_sizes(found) for case, found in by_case.items()}
    return Signature({case: found for case, found in sizes.items() if found})


def _compute_sizes(records: Iterable[Record]) -> dict[str, float | None]:
    """What a result is wrong by already, it is wrong by in every later check that looks at it again."""
    found: dict[str, float | None] = {}
    for record in records:
        if record.verdict in JUDGED or record.verdict == ERROR:
            size = _compute_size(record) if record.verdict in RED else None
            name, *_ = record.observable.split(".")
            if name not in found:
                found[name] = size
            elif size is not None and ((first := found[name]) is None or size > first + _MUCH_LARGER):
                beside = f"{name}{CHECK_SEPARATOR}{record.check}"
                found[beside] = max(size, found.get(beside) or 0.0)
    return found


def _compute_size(record: Record) -> float:
    if record.ratio is None or not math.isfinite(record.ratio):
        return _INFINITE_SIZE
    return round(round(math.log10(max(record.ratio, 1.0)) / _SIZE_STEP) * _SIZE_STEP, 3)


def measure_known_bug(bug: PlantedBug) -> KnownBug:
    """A planted bug with its signature, measured."""
    from conformance.sensitivity.examination import create_single_look_runner

    runner = create_single_look_runner()
    found = build_signature(record for job in iter_signature_jobs(bug.build()) for record in runner.stream(job))
    return KnownBug(name=bug.name, family=bug.family, kind=bug.kind, reference=bug.reference, signature=found)


def save_signatures(found: Iterable[KnownBug], path: Path = FILE) -> None:
    """Write signatures, a bug a line, in the order of their names.

    Cases stand by their numbers behind the results that they have. One that is right is its name, and one that is wrong
    has its size. Most cases of a bug have the same results, all right.
    """
    rows = [
        [bug.name, bug.family, bug.kind, bug.reference, _pack_signature(bug.signature)]
        for bug in sorted(found, key=lambda bug: bug.name)
    ]
    cases = ",\n".join(f"  {json.dumps(asked.case.id)}" for asked in SIGNATURE_CASES)
    lines = ",\n".join(f"  {json.dumps(row, separators=(',', ':'))}" for row in rows)
    text = f'{{\n "schema": {json.dumps(SCHEMA)},\n "cases": [\n{cases}\n ],\n "bugs": [\n{lines}\n ]\n}}\n'
    path.write_text(text, encoding="utf-8")


def load_signatures(path: Path = FILE) -> list[KnownBug]:
    """The signatures that are kept, of cases that there still are; none if there is no file."""
    if not path.is_file():
        return []
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if table.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {table.get('schema')!r}, must be {SCHEMA!r}")
    asked = table["cases"]
    return [
        KnownBug(name=name, family=family, kind=kind, reference=reference, signature=_unpack_signature(packed, asked))
        for name, family, kind, reference, packed in table["bugs"]
    ]


def _pack_signature(found: Signature) -> dict[str, list[int]]:
    numbers = {asked.case.id: number for number, asked in enumerate(SIGNATURE_CASES)}
    packed: dict[str, list[int]] = {}
    for case, sizes in found.sizes.items():
        packed.setdefault(" ".join(_format_sizes(sizes)), []).append(numbers[case])
    return packed


def _format_sizes(sizes: Sizes) -> Iterator[str]:
    for name, size in sizes.items():
        yield name if size is None else f"{name}:{size:.4g}"


def _unpack_signature(packed: Mapping[str, list[int]], asked: list[str]) -> Signature:
    now = {one.case.id for one in SIGNATURE_CASES}
    sizes = {asked[number]: _parse_sizes(words) for words, numbers in packed.items() for number in numbers}
    return Signature({case: found for case, found in sizes.items() if case in now})


def _parse_sizes(words: str) -> dict[str, float | None]:
    split = (word.partition(":") for word in words.split())
    return {name: float(size) if size else None for name, _, size in split}
